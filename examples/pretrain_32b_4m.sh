#!/usr/bin/env bash
# Pretrains a model of Qwen3 32B's shape on samples of 4,194,304 tokens: two nodes of 8 GPUs of 80 GB, 2 TiB of memory
# each. Within a node ranks exchange heads (Ulysses), the nodes are a ring: only keys and values cross the network.
#
#   MASTER_ADDR=... NODE_RANK=0 bash examples/pretrain_32b_4m.sh [--dry-run|--rehearse] [CHECKPOINTS [TENSORBOARD [TOKENIZER [DATA]]]] [FLAGS]
#
# On each node, with folders that all nodes share; slurm_multinode.sbatch, docker_multinode.sh and
# kubernetes_pytorchjob.yaml set the variables.
source "$(dirname "$0")/launch.sh"
read_arguments "$@"
name_paths pretrain_32b_4m "${PATHS[@]}"

MODEL_ARGS=(
    --model qwen3-32b
    --seq-length 4194304
)
PARALLEL_ARGS=(
    --context-parallel-size 16
    --cp-comm-type a2a+p2p
    --hierarchical-context-parallel-sizes 8 2
    --cp-heads-per-chunk 8
    --no-cp-overlap
    --use-torch-fsdp2
)
MEMORY_ARGS=(
    --bf16
    --recompute-granularity full # attention outputs of 64 layers, 1.6 times as wide as the residual, are beyond 2 TiB
    --recompute-num-layers 2
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

launch 2 "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${MEMORY_ARGS[@]}" "${TRAINING_ARGS[@]}"
