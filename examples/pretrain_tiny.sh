#!/usr/bin/env bash
# Trains a 2 M parameter Llama-style model on the Python standard library's sources, on any machine:
# two ranks share each sequence of 4096 tokens, two query heads are exchanged at a time.
#
#   bash examples/pretrain_tiny.sh [OUTPUT_FOLDER] [further flags of pretrain_gpt.py]
#
# Leaves loss.png, TensorBoard files, metrics.jsonl and checkpoints under runs/tiny (or OUTPUT_FOLDER).
set -euo pipefail
HERE="$PWD"
cd "$(dirname "$0")/.."
source tools/environment.sh

OUT=runs/tiny
if [[ $# -gt 0 && "$1" != --* ]]; then
    OUT="$(cd "$HERE" && realpath -m "$1")"
    shift
    if [[ -e "$OUT/checkpoints" ]]; then
        echo "error: $OUT/checkpoints exists; remove it, or give another folder" >&2
        exit 1
    fi
fi
ITERATIONS=120
STOP_AFTER=90
VOCABULARY=2048
mkdir -p "$OUT"

echo "== corpus, tokenizer, token files"
if [[ ! -e "$OUT/corpus_text_document.idx" ]]; then
    python tools/build_corpus.py --output "$OUT/corpus.jsonl"
    python tools/train_tokenizer.py --input "$OUT/corpus.jsonl" \
        --model-prefix "$OUT/tokenizer" --vocab-size "$VOCABULARY"
    python tools/preprocess_data.py --input "$OUT/corpus.jsonl" --output-prefix "$OUT/corpus" \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUT/tokenizer.model" \
        --append-eod --workers 2
fi
python tools/dataset_statistics.py "$OUT/corpus_text_document"

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 192
    --ffn-hidden-size 512
    --num-attention-heads 6
    --group-query-attention
    --num-query-groups 2
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm
    --untie-embeddings-and-output-weights
)
PARALLEL_ARGS=(
    --context-parallel-size 2
    --cp-heads-per-chunk 2
    --use-distributed-optimizer
)
BATCH_ARGS=(
    --seq-length 4096
    --micro-batch-size 1
    --global-batch-size 1
    --lr 2e-3
    --min-lr 2e-4
    --lr-decay-style cosine
    --lr-warmup-iters 10
    --lr-decay-iters "$ITERATIONS"
    --weight-decay 0.1
    --adam-beta2 0.95
)
DATA_ARGS=(
    --data-path "$OUT/corpus_text_document"
    --split "95,5,0"
    --tokenizer-type SentencePieceTokenizer
    --tokenizer-model "$OUT/tokenizer.model"
    --data-cache-path "$OUT/cache"
)
OUTPUT_ARGS=(
    --save "$OUT/checkpoints"
    --save-interval 30
    --eval-interval 30
    --eval-iters 4
    --log-interval 10
    --metrics-jsonl "$OUT/metrics.jsonl"
    --tensorboard-dir "$OUT/tensorboard"
)

train() {
    OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 2 --standalone pretrain_gpt.py \
        "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${BATCH_ARGS[@]}" "${DATA_ARGS[@]}" \
        "${OUTPUT_ARGS[@]}" "$@"
}

echo "== training"
rm -rf "$OUT/checkpoints" "$OUT/metrics.jsonl" "$OUT/tensorboard"
train --train-iters "$STOP_AFTER" "$@"
echo "== resuming from the checkpoint"
train --train-iters "$ITERATIONS" --load "$OUT/checkpoints" "$@"

echo "== result"
python - "$OUT" <<'PYTHON'
import json, subprocess, sys

out = sys.argv[1]
report = ["tools/dataset_statistics.py", f"{out}/corpus_text_document", "--json"]
entropy = json.loads(subprocess.check_output([sys.executable, *report]))["unigram_entropy"]
lines = [json.loads(line) for line in open(f"{out}/metrics.jsonl")]
loss = [line["validation_loss"] for line in lines if "validation_loss" in line][-1]
subprocess.check_call(
    [sys.executable, "tools/plot_loss.py", f"{out}/metrics.jsonl", "--output", f"{out}/loss.png"]
    + ["--unigram-entropy", str(entropy)]
)
print(f"validation loss {loss:.3f} nats a token, unigram entropy of the corpus {entropy:.3f}")
sys.exit(loss >= entropy and "the validation loss is not below the unigram entropy")
PYTHON
