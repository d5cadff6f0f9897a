#!/usr/bin/env bash
# Goes on with Qwen2.5-Coder-7B on whole repositories at 262,144 tokens, YaRN: 8 GPUs of 80 GB, 1 TiB of memory.
#
#   python tools/convert_checkpoint.py hf-to-megatron --hf-path Qwen2.5-Coder-7B --save checkpoints/qwen2.5-coder-7b
#   python tools/preprocess_data.py --input repositories/* --join-folders --output-prefix data/code --append-eod \
#       --tokenizer-type HuggingFaceTokenizer --tokenizer-model checkpoints/qwen2.5-coder-7b/tokenizer --workers 8
#   bash examples/recipes/code_repositories_256k.sh [--dry-run|--rehearse] [CONVERTED [CHECKPOINTS [TENSORBOARD [TOKENIZER [DATA]]]]] [FLAGS]
#
# CONVERTED is checkpoints/qwen2.5-coder-7b by default, TOKENIZER the one in it, DATA for example data/code_text_document, in
# which a document is a repository. Where CHECKPOINTS has one already, it goes on.
source "$(dirname "$0")/common.sh"
read_arguments "$@"
name_converted checkpoints/qwen2.5-coder-7b qwen2.5-7b code_repositories_256k

MODEL_ARGS+=(
    --seq-length 262144
    --max-position-embeddings 262144
    --position-embedding-type yarn
    --yarn-rotary-scaling-factor 8
    --yarn-original-max-position-embeddings 32768
)
if has_data; then
    MODEL_ARGS+=(
        --reset-position-ids
        --dataloader-inter-document-masking # repositories do not see each other
        --long-document-weight 32768:4      # those of 32,768 tokens and more, four times per epoch
    )
fi
MODEL_ARGS+=(
    --context-parallel-size 4 # and two data-parallel groups
    --cp-heads-per-chunk 4
    --global-batch-size 16
    --train-iters 240 # a billion tokens
    --lr 1e-5
)

launch 1 "${COMMON_ARGS[@]}" "${MODEL_ARGS[@]}"
