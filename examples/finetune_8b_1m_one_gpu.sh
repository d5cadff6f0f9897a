#!/usr/bin/env bash
# Goes on with Llama 3 8B at a context of 1,048,576 tokens on one GPU of 24 GB and more, with 512 GiB of memory.
#
#   python tools/convert_checkpoint.py hf-to-megatron --hf-path Meta-Llama-3-8B --save checkpoints/llama3-8b
#   bash examples/finetune_8b_1m_one_gpu.sh [--dry-run|--rehearse] [CONVERTED [CHECKPOINTS [TENSORBOARD [TOKENIZER [DATA]]]]] [FLAGS]
#
# CONVERTED is checkpoints/llama3-8b by default, TOKENIZER the one in it. Where CHECKPOINTS has one already, it goes on.
# With 320 GiB add --recompute-granularity full --recompute-num-layers 4: 262 GiB there, and attention forward twice.
# With ACTIVATION_DISK=/nvme0,/nvme1, folders on local drives, what the host does not hold goes there: 256 GiB are enough.
# Planned for a GeForce RTX 4090; GPU=h100-80 and so on plans for another one.
GPUS_PER_NODE="${GPUS_PER_NODE:-1}" GPU="${GPU:-rtx-4090}" HOST_MEMORY_GIB="${HOST_MEMORY_GIB:-512}"
source "$(dirname "$0")/launch.sh"
read_arguments "$@"
name_converted checkpoints/llama3-8b llama3-8b finetune_8b_1m_one_gpu

MODEL_ARGS+=(
    --seq-length 1048576
    --max-position-embeddings 1048576
    --rotary-base 2.8e9 # as in finetune_8b_1m.sh
)
PARALLEL_ARGS=(
    --cp-heads-per-chunk 1
    --use-torch-fsdp2
    --optimizer-cpu-offload # weights, moments and gradients are on the host: 120 GiB
)
MEMORY_ARGS=(
    --bf16
    --recompute-granularity selective # attention runs once per step
    --recompute-num-layers 8          # the input of every layer too would take 657 GiB
    --cpu-offloading-num-layers all
    --park-during-attention
    --sequence-tile-size 4096
    --loss-chunk-size 2048
)
add_activation_disk
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1
    --train-iters 200
    --lr 2e-5
    --lr-decay-style constant
    --lr-warmup-iters 5
    --weight-decay 0.1
    --adam-beta2 0.95
    --save-interval 5
    --most-recent-k 2
)

launch 1 "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${MEMORY_ARGS[@]}" "${TRAINING_ARGS[@]}"
