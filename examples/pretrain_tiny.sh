#!/usr/bin/env bash
# Trains a 2 M parameter Llama-style model on the Python standard library's sources, on any machine:
# two ranks share each sequence of 4096 tokens, two query heads are exchanged at a time.
#
#   bash examples/pretrain_tiny.sh [OUTPUT_FOLDER] [FLAGS]
#
# Leaves loss.png, TensorBoard files, metrics.jsonl and checkpoints under runs/tiny (or OUTPUT_FOLDER). Nothing there is
# deleted: started again, it goes on from the last checkpoint. FLAGS are those of pretrain_gpt.py; they come last and win.
HERE="$PWD"
source "$(dirname "$0")/launch.sh"
usage() { header_of "$0"; }
read_arguments "$@"
[[ "$DRY_RUN" == no && "$REHEARSE" == no ]] || fail "this run is made for laptops; leave out --dry-run and --rehearse"
((${#PATHS[@]} <= 1)) || fail "'${PATHS[1]}' belongs to no flag; give OUTPUT_FOLDER, then FLAGS"
cd "$ROOT"
OUT=runs/tiny
((${#PATHS[@]} == 0)) || OUT="$(cd "$HERE" && realpath -m "${PATHS[0]}")"
MARK="$OUT/made_by_pretrain_tiny"
[[ -e "$MARK" || -z "$(ls -A "$OUT" 2> /dev/null)" ]] ||
    fail "$OUT holds files that this script did not make; give another OUTPUT_FOLDER"
source tools/environment.sh

ITERATIONS=120
STOP_AFTER=90
VOCABULARY=2048
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
    --exit-signal-handler
    --save-interval 30
    --eval-interval 30
    --eval-iters 4
    --log-interval 10
    --metrics-jsonl "$OUT/metrics.jsonl"
    --tensorboard-dir "$OUT/tensorboard"
)

# Flags are read before anything is written; memory is not in question here.
python tools/plan_memory.py --gpus-per-node 2 --gpu-memory-gib 1e6 --host-memory-gib 1e6 --json - \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${BATCH_ARGS[@]}" --train-iters "$ITERATIONS" \
    "${FURTHER_ARGS[@]}" > /dev/null

mkdir -p "$OUT"
touch "$MARK"

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

train() {
    OMP_NUM_THREADS=1 "${TORCHRUN[@]}" --nproc-per-node 2 --standalone pretrain_gpt.py \
        "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${BATCH_ARGS[@]}" "${DATA_ARGS[@]}" \
        --load "$OUT/checkpoints" "${OUTPUT_ARGS[@]}" --train-iters "$ITERATIONS" "$@" "${FURTHER_ARGS[@]}"
}

iteration() { cat "$OUT/checkpoints/latest_checkpointed_iteration.txt" 2> /dev/null || echo 0; }

if (($(iteration) < STOP_AFTER)); then
    echo "== training"
    train --exit-interval "$STOP_AFTER"
fi
if (($(iteration) < ITERATIONS)); then
    echo "== resuming from the checkpoint"
    train
fi

echo "== result"
python - "$OUT" <<'PYTHON'
import json, subprocess, sys

out = sys.argv[1]
report = ["tools/dataset_statistics.py", f"{out}/corpus_text_document", "--json"]
entropy = json.loads(subprocess.check_output([sys.executable, *report]))["unigram_entropy"]
lines = [json.loads(line) for line in open(f"{out}/metrics.jsonl")]
losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
subprocess.check_call(
    [sys.executable, "tools/plot_loss.py", f"{out}/metrics.jsonl", "--output", f"{out}/loss.png"]
    + ["--unigram-entropy", str(entropy)]
)
if not losses:
    sys.exit("no validation loss: the flags leave evaluation out")
loss = losses[-1]
print(f"validation loss {loss:.3f} nats per token, unigram entropy of the corpus {entropy:.3f}")
sys.exit(loss >= entropy and "the validation loss is not below the unigram entropy")
PYTHON
