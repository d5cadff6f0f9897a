#!/usr/bin/env bash
# Fine-tunes Llama-3.1-8B-Instruct on chats of up to 131,072 tokens: 8 GPUs of 80 GB, 1 TiB of memory.
#
#   python tools/convert_checkpoint.py hf-to-megatron --hf-path Llama-3.1-8B-Instruct --save checkpoints/llama3.1-8b-instruct
#   bash examples/recipes/sft_chats_128k.sh [--dry-run|--rehearse] [CONVERTED [CHECKPOINTS [TENSORBOARD [TOKENIZER [DATA]]]]] [FLAGS]
#
# CONVERTED is checkpoints/llama3.1-8b-instruct by default, TOKENIZER the one in it; its chat template writes the text. DATA is
# JSON lines, Parquet, Arrow or a folder of them, with messages. Where CHECKPOINTS has one already, it goes on.
source "$(dirname "$0")/common.sh"
read_arguments "$@"
name_converted checkpoints/llama3.1-8b-instruct llama3-8b sft_chats_128k

MODEL_ARGS+=(
    --seq-length 131072
    --max-position-embeddings 131072
)
if has_data; then
    MODEL_ARGS+=(
        --sft
        --split 1,0,0
        --long-samples drop # counted in the log; longer chats need a longer --seq-length
    )
elif [[ "$DRY_RUN" == no && "$REHEARSE" == no ]]; then
    fail "DATA is missing: chats, after CONVERTED CHECKPOINTS TENSORBOARD TOKENIZER"
fi
MODEL_ARGS+=(
    --context-parallel-size 4 # and two data-parallel groups
    --cp-heads-per-chunk 8
    --global-batch-size 16 # packed samples, not chats
    --train-iters 200
    --lr 1e-5
    --min-lr 1e-6
    --lr-decay-style cosine
    --lr-warmup-iters 10
    --weight-decay 0
    --save-interval 50
)

launch 1 "${COMMON_ARGS[@]}" "${MODEL_ARGS[@]}"
