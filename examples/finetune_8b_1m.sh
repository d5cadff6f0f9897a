#!/usr/bin/env bash
# Goes on with Llama 3 8B at a context of 1,048,576 tokens: one node of 8 GPUs of 80 GB, 1 TiB of memory.
#
#   python tools/convert_checkpoint.py hf-to-megatron --hf-path Meta-Llama-3-8B --save checkpoints/llama3-8b
#   bash examples/finetune_8b_1m.sh [--dry-run|--rehearse] [CONVERTED [CHECKPOINTS [TENSORBOARD [TOKENIZER [DATA]]]]] [FLAGS]
#
# CONVERTED is checkpoints/llama3-8b by default, TOKENIZER the one in it. Where CHECKPOINTS has one already, it goes on.
HOST_MEMORY_GIB="${HOST_MEMORY_GIB:-1024}"
source "$(dirname "$0")/launch.sh"
read_arguments "$@"
name_converted checkpoints/llama3-8b llama3-8b finetune_8b_1m

MODEL_ARGS+=(
    --seq-length 1048576
    --max-position-embeddings 1048576
    --rotary-base 2.8e9 # of gradientai/Llama-3-8B-Instruct-Gradient-1048k on Hugging Face, as is the rate; trained with 8192
)
PARALLEL_ARGS=(
    --context-parallel-size 8
    --cp-heads-per-chunk 8
    --use-torch-fsdp2
)
MEMORY_ARGS=(
    --bf16
    --recompute-granularity selective # attention runs once per step; 516 GiB of host memory
    --cpu-offloading-num-layers all
    --sequence-tile-size 8192
    --loss-chunk-size 8192
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 4
    --train-iters 200
    --lr 2e-5
    --lr-decay-style constant
    --lr-warmup-iters 5
    --weight-decay 0.1
    --adam-beta2 0.95
    --save-interval 20
)

launch 1 "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${MEMORY_ARGS[@]}" "${TRAINING_ARGS[@]}"
