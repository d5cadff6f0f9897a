#!/usr/bin/env bash
# Starts a launcher in the image of the Dockerfile. The same command on each node, but for NODE_RANK:
#
#   MASTER_ADDR=node0 NODE_RANK=0 bash examples/docker_multinode.sh [OPTIONS of docker run --] LAUNCHER [its arguments]
#
# For instance `--volume /data:/data -- examples/pretrain_32b_4m.sh /data/checkpoints`: /data is storage that the nodes
# share. IMAGE is megatron_untied by default; MASTER_PORT, NNODES, GPUS_PER_NODE, GPU,
# GPU_MEMORY_GIB and HOST_MEMORY_GIB are passed on.
set -euo pipefail
OPTIONS=()
if [[ " $* " == *" -- "* ]]; then
    while [[ "$1" != -- ]]; do
        OPTIONS+=("$1")
        shift
    done
    shift
fi
[[ $# -gt 0 ]] || { echo "error: no launcher; give one, such as examples/pretrain_32b_4m.sh" >&2; exit 1; }

# NCCL and the data loader's workers share memory, the arena pins it, and NCCL's ports are not known before.
OPTIONS+=(--ipc=host --ulimit memlock=-1 --network=host)
# What InfiniBand and RoCE need, on nodes that have them.
[[ ! -e /dev/infiniband ]] || OPTIONS+=(--device /dev/infiniband --cap-add IPC_LOCK)
for variable in MASTER_ADDR MASTER_PORT NNODES NODE_RANK GPUS_PER_NODE GPU GPU_MEMORY_GIB HOST_MEMORY_GIB; do
    [[ -z "${!variable:-}" ]] || OPTIONS+=(--env "$variable=${!variable}")
done

exec docker run --rm --gpus all "${OPTIONS[@]}" "${IMAGE:-megatron_untied}" bash "$@"
