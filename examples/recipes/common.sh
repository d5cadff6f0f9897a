# Sourced by the recipes beside it: the launchers' code, and flags that all of them have, for one node of 8 GPUs of 80 GB.
HOST_MEMORY_GIB="${HOST_MEMORY_GIB:-1024}"
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
COMMON_ARGS=(
    --bf16
    --use-torch-fsdp2
    --recompute-granularity selective # attention runs once per step
    --cpu-offloading-num-layers all
    --sequence-tile-size 8192
    --loss-chunk-size 4096
    --micro-batch-size 1
    --lr-decay-style constant
    --lr-warmup-iters 5
    --weight-decay 0.1
    --adam-beta2 0.95
    --save-interval 20
)

# Whether the user named DATA; --dry-run and --rehearse do without.
has_data() { [[ "${PATHS[4]:-MOCK}" != MOCK ]]; }
