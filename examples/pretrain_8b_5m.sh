#!/usr/bin/env bash
# Pretrains a model of Llama 3 8B's shape on samples of 5,242,880 tokens: one node of 8 GPUs of 80 GB, 2 TiB of memory.
#
#   bash examples/pretrain_8b_5m.sh [--dry-run|--rehearse] [CHECKPOINTS [TENSORBOARD [TOKENIZER [DATA]]]] [FLAGS]
#
# With 1 TiB add --recompute-granularity full --recompute-num-layers 4: 606 GiB there, and attention forward twice.
source "$(dirname "$0")/launch.sh"
read_arguments "$@"
name_paths pretrain_8b_5m "${PATHS[@]}"

MODEL_ARGS=(
    --model llama3-8b
    --seq-length 5242880
)
PARALLEL_ARGS=(
    --context-parallel-size 8
    --cp-heads-per-chunk 8
    --no-cp-overlap # overlap doubles the chunk's buffers, and at this length an exchange is nothing beside attention
    --use-torch-fsdp2
)
MEMORY_ARGS=(
    --bf16
    --recompute-granularity selective # attention runs once per step
    --recompute-num-layers 8          # the input of every layer too would take more than 2 TiB
    --cpu-offloading-num-layers all
    --sequence-tile-size 8192
    --loss-chunk-size 8192
)
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
