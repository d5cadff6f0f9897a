#!/usr/bin/env bash
# Builds the Dockerfile without a Docker engine and without a GPU, and trains the tiny example in the image.
#
#   bash tests/docker.sh [FOLDER]
#
# Instead of NVIDIA's image the base is this machine's Debian release with its own Python, and the CPU's torch of
# requirements.txt. Needs root, `apt-get install buildah debootstrap`, and about 12 GiB in FOLDER (a temporary one).
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in buildah debootstrap; do
    command -v "$tool" > /dev/null || { echo "error: no $tool here; apt-get install buildah debootstrap" >&2; exit 1; }
done

WORK="$(mktemp -d -p "${1:-${TMPDIR:-/tmp}}" docker.XXXXXX)"
trap 'in_store rm --all > /dev/null; in_store rmi --all --force > /dev/null; rm -rf "$WORK"' EXIT
in_store() { buildah --root "$WORK/store" --runroot "$WORK/run" --storage-driver vfs "$@"; }
mapfile -t PIP_VOLUMES < <(python3 tests/support/pip_settings.py "$WORK/pip.conf")
run_in() { in_store run --isolation chroot --hostname localhost "$@"; }
build_on() {
    in_store bud --quiet --isolation chroot --format docker "${PIP_VOLUMES[@]}" --build-arg BASE_IMAGE="$1" --build-arg FLASH_ATTENTION_3=none --tag "$2" .
}
expect() { grep -q "$1" <<< "$2" || { echo "error: expected '$1' in: $2" >&2; exit 1; }; }

echo "== a base without torch is refused"
base="$(in_store from scratch)"
release="$(. /etc/os-release && echo "$VERSION_CODENAME")"
debootstrap --variant=minbase --include=ca-certificates,python3-pip,python-is-python3 "$release" \
    "$(in_store mount "$base")" > "$WORK/debootstrap.log"
in_store commit --quiet "$base" localhost/no-torch > /dev/null
said="$(build_on localhost/no-torch megatron_untied 2>&1 || true)"
expect "error: the base image has no torch" "$said"
in_store rmi localhost/no-torch > /dev/null

echo "== a base with torch"
run_in "${PIP_VOLUMES[@]}" "$base" -- pip install --quiet --break-system-packages --no-cache-dir \
    "$(grep '^torch==' requirements.txt)"
torch_before="$(run_in "$base" -- pip list --format=freeze | grep '^torch==')"
in_store commit --rm --quiet "$base" localhost/base > /dev/null

echo "== the image"
build_on localhost/base megatron_untied
image="$(in_store from megatron_untied)"
expect "^$torch_before$" "$(run_in "$image" -- pip list --format=freeze)"
expect '^megatron$' "$(run_in "$image" -- whoami)"

echo "== the tiny example in it"
run_in "$image" -- bash examples/pretrain_tiny.sh runs/tiny
run_in "$image" -- test -s runs/tiny/loss.png
echo "built on $torch_before; the tiny example trained in the image"
