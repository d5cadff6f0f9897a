#!/usr/bin/env bash
# Trains a model of 0.1 M parameters to copy over 4,096 tokens on a CPU, and measures that it reads its context:
# an induction head forms on short spans first, then the context grows to 512 and to 8,192 tokens.
#
#   bash benchmarks/learn_to_copy.sh [OUTPUT_FOLDER]
#
# Leaves token files, checkpoints, context.json and pictures under runs/copy (or OUTPUT_FOLDER); the JSON and the pictures in
# benchmarks/results/ are of such a run. A stage that is complete is not repeated.
set -euo pipefail
OUT="$(realpath -m "${1:-runs/copy}")"
cd "$(dirname "$0")/.."
source tools/environment.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
VOCABULARY=512

# Biases and norms of queries and keys make a head that finds the token before; three quarters of a head match content at any
# distance.
MODEL=(
    --num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 64 --swiglu --disable-bias-linear
    --normalization RMSNorm --qk-layernorm --add-qkv-bias --rotary-base 100 --rotary-percent 0.5
    --init-method-std 0.125 --max-position-embeddings 8192
)
DATA=(--tokenizer-type NullTokenizer --vocab-size "$VOCABULARY" --split 98,2,0 --num-workers 0)

corpus() { # tokens of a document, documents, shortest span
    [[ -e "$OUT/tokens_$1.idx" ]] || python tools/build_copy_corpus.py --output-prefix "$OUT/tokens_$1" \
        --document-tokens "$1" --num-documents "$2" --min-distance "$3" --vocab-size "$VOCABULARY"
}

stage() { # tokens of a sample, samples of a step, steps, learning rate, further flags
    local checkpoints="$OUT/checkpoints_$1"
    [[ ! -e "$checkpoints/latest_checkpointed_iteration.txt" ]] || return 0
    python pretrain_gpt.py "${MODEL[@]}" "${DATA[@]}" --data-path "$OUT/tokens_$1" --seq-length "$1" \
        --micro-batch-size "$2" --global-batch-size "$2" --train-iters "$3" --lr "$4" --lr-decay-style constant \
        --lr-warmup-iters 20 --adam-beta2 0.98 --weight-decay 0 --log-interval 100 --eval-iters 0 \
        --save "$checkpoints" "${@:5}"
}

corpus 64 48000 2
corpus 512 6000 2
corpus 8192 400 16
stage 64 16 2400 5e-3
stage 512 8 600 3e-3 --load "$OUT/checkpoints_64" --finetune
stage 8192 1 150 2e-3 --load "$OUT/checkpoints_512" --finetune --recompute-granularity selective
python tools/evaluate_context.py --output "$OUT/context" --load "$OUT/checkpoints_8192" --use-checkpoint-args \
    "${DATA[@]}" --data-path "$OUT/tokens_8192" --seq-length 8192
