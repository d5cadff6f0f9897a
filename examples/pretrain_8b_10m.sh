#!/usr/bin/env bash
# Pretrains a model of Llama 3 8B's shape on samples of 10,485,760 tokens: one node of 8 GPUs of 80 GB, 2 TiB of memory.
#
#   bash examples/pretrain_8b_10m.sh [--dry-run|--rehearse] [CHECKPOINTS [TENSORBOARD [TOKENIZER [DATA]]]] [FLAGS]
#
# Nothing that attention computes is kept: 10M tokens of it would take more than the node has. With
# ACTIVATION_DISK=/nvme0,/nvme1, folders on local drives, it is kept for as many layers as host and drives hold:
# all of them with 1.8 TB of drives, and a step takes 21,400 s instead of 26,900 by the plan.
source "$(dirname "$0")/launch.sh"
read_arguments "$@"
name_paths pretrain_8b_10m "${PATHS[@]}"

MODEL_ARGS=(
    --model llama3-8b
    --seq-length 10485760
)
PARALLEL_ARGS=(
    --context-parallel-size 8
    --cp-heads-per-chunk 8
    --no-cp-overlap # overlap doubles the chunk's buffers, and at this length an exchange is nothing beside attention
    --use-torch-fsdp2
)
MEMORY_ARGS=(
    --bf16
    --recompute-granularity full # attention forward runs twice
    --recompute-num-layers 8     # 1.8 TiB of host memory
    --cpu-offloading-num-layers all
    --park-during-attention      # 39.5 GiB per GPU instead of 70
    --sequence-tile-size 8192
    --loss-chunk-size 8192
)
add_activation_disk
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1
    --train-iters 100
    --lr 1e-5
    --min-lr 1e-6
    --lr-decay-style cosine
    --lr-warmup-iters 2
    --weight-decay 0.1
    --adam-beta2 0.95
    --save-interval 5
    --save-retain-interval 50
)

launch 1 "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${MEMORY_ARGS[@]}" "${TRAINING_ARGS[@]}"
