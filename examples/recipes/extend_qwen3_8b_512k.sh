#!/usr/bin/env bash
# Extends Qwen3-8B from 32,768 to 524,288 tokens with YaRN: 8 GPUs of 80 GB, 1 TiB of memory.
#
#   python tools/convert_checkpoint.py hf-to-megatron --hf-path Qwen3-8B-Base --save checkpoints/qwen3-8b
#   bash examples/recipes/extend_qwen3_8b_512k.sh [--dry-run|--rehearse] [CONVERTED [CHECKPOINTS [TENSORBOARD [TOKENIZER [DATA]]]]] [FLAGS]
#
# CONVERTED is checkpoints/qwen3-8b by default, TOKENIZER the one in it. Where CHECKPOINTS has one already, it goes on.
source "$(dirname "$0")/common.sh"
read_arguments "$@"
name_converted checkpoints/qwen3-8b qwen3-8b extend_qwen3_8b_512k

MODEL_ARGS+=(
    --seq-length 524288
    --max-position-embeddings 524288
    --position-embedding-type yarn # as its authors publish for 131,072 tokens, with a factor of 4
    --yarn-rotary-scaling-factor 16
    --yarn-original-max-position-embeddings 32768
)
MODEL_ARGS+=(
    --context-parallel-size 8
    --cp-heads-per-chunk 8
    --global-batch-size 8
    --train-iters 240 # a billion tokens
    --lr 1e-5
)

launch 1 "${COMMON_ARGS[@]}" "${MODEL_ARGS[@]}"
