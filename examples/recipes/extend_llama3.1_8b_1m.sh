#!/usr/bin/env bash
# Extends Llama-3.1-8B from 131,072 to 1,048,576 tokens: YaRN as in UltraLong (arXiv 2504.06214), 8 GPUs of 80 GB, 1 TiB of memory.
#
#   python tools/convert_checkpoint.py hf-to-megatron --hf-path Llama-3.1-8B --save checkpoints/llama3.1-8b
#   bash examples/recipes/extend_llama3.1_8b_1m.sh [--dry-run|--rehearse] [CONVERTED [CHECKPOINTS [TENSORBOARD [TOKENIZER [DATA]]]]] [FLAGS]
#
# CONVERTED is checkpoints/llama3.1-8b by default, TOKENIZER the one in it. Where CHECKPOINTS has one already, it goes on.
source "$(dirname "$0")/common.sh"
read_arguments "$@"
name_converted checkpoints/llama3.1-8b llama3-8b extend_llama3.1_8b_1m

MODEL_ARGS+=(
    --seq-length 1048576
    --max-position-embeddings 1048576
    --rotary-base 500000
    --position-embedding-type yarn # in the place of Llama 3.1's scaling by 8 from 8,192 positions
    --yarn-rotary-scaling-factor 128
    --yarn-original-max-position-embeddings 8192
    --yarn-beta-slow 1
    --yarn-beta-fast 4
)
MODEL_ARGS+=(
    --context-parallel-size 8
    --cp-heads-per-chunk 8
    --global-batch-size 4
    --train-iters 240 # a billion tokens
    --lr 2e-5
)

launch 1 "${COMMON_ARGS[@]}" "${MODEL_ARGS[@]}"
