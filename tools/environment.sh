# Sourced by the scripts: makes .venv from requirements.txt if it is missing or out of date, and activates it.
# An already active environment (a container's, or one of your own) is used as it is.
environment_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ -z "${VIRTUAL_ENV:-}" && ! -e /.dockerenv ]]; then
    environment_stamp="$environment_root/.venv/requirements.stamp"
    if ! cmp -s "$environment_root/requirements.txt" "$environment_stamp"; then
        echo "environment: installing requirements.txt into .venv (a few minutes, once)"
        "${PYTHON:-python3}" -m venv "$environment_root/.venv"
        "$environment_root/.venv/bin/pip" install -q --disable-pip-version-check -r "$environment_root/requirements.txt"
        "$environment_root/.venv/bin/pip" install -q --disable-pip-version-check --no-deps -e "$environment_root"
        cp "$environment_root/requirements.txt" "$environment_stamp"
    fi
    source "$environment_root/.venv/bin/activate"
fi
