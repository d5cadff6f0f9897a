# Sourced by the scripts. A Python that has this package installed (a container's, or an environment
# of your own) is used as it is; else .venv is made from requirements.txt, or renewed if that changed.
environment_root="$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# -I: the egg-info that an editable install leaves in this folder is not an installation.
environment_has_package() { python -I -c 'import importlib.metadata as m; m.version("megatron-untied")' 2> /dev/null; }
# Its commands are joined: sourced from a prompt there is no set -e, and half of an environment would be used ever after.
environment_make() {
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: ${PYTHON:-python3} is no Python 3.11 or newer; PYTHON=python3.12 names another" >&2
        return 1
    }
    echo "environment: installing requirements.txt into .venv (a few minutes, once)"
    "${PYTHON:-python3}" -m venv "$environment_venv" &&
        "$environment_venv/bin/pip" install -q --disable-pip-version-check -r "$environment_root/requirements.txt" &&
        "$environment_venv/bin/pip" install -q --disable-pip-version-check --no-deps -e "$environment_root" &&
        cp "$environment_root/requirements.txt" "$environment_venv/requirements.stamp"
}
if ! environment_has_package; then
    environment_venv="$environment_root/.venv"
    if python -I -c 'import torch, sys; sys.exit(torch.version.cuda is None)' 2> /dev/null; then
        echo "environment: this Python has torch with CUDA, and .venv will not use it nor what was built for it;" \
            "pip install --no-deps -e $environment_root uses it" >&2
    fi
    if ! cmp -s "$environment_root/requirements.txt" "$environment_venv/requirements.stamp"; then
        environment_make || return 1
    fi
    source "$environment_venv/bin/activate"
fi
