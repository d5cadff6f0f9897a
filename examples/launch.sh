# Sourced by the launchers beside it: their arguments, the memory plan, a look at this node, and torchrun.
#
#   bash examples/LAUNCHER.sh [--dry-run] [CHECKPOINTS [TENSORBOARD [TOKENIZER [DATA]]]] [FLAGS]
#
# CHECKPOINTS and TENSORBOARD are folders under runs/ by default. TOKENIZER is a SentencePiece .model or a Hugging Face
# folder, DATA the prefix of token files, or a blend "weight prefix weight prefix"; MOCK, the default, is random tokens.
# FLAGS are those of pretrain_gpt.py; they come last and win. --dry-run stops after the plan, on any machine.
#
# Several nodes: the same command on each, with MASTER_ADDR, MASTER_PORT, NNODES, NODE_RANK and GPUS_PER_NODE set as
# torchrun knows them. Other nodes: GPU_MEMORY_GIB, of one GPU, and HOST_MEMORY_GIB, of a node.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/tools/environment.sh"

# The nodes that are planned for, unless a launcher or the caller says otherwise.
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
GPU_MEMORY_GIB="${GPU_MEMORY_GIB:-80}"
HOST_MEMORY_GIB="${HOST_MEMORY_GIB:-2048}"
DEFAULT_TOKENIZER=MOCK

# The comments at the top of the launcher and of this file.
usage() {
    for script in "$0" "${BASH_SOURCE[0]}"; do
        sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$script"
        echo
    done
}

fail() {
    echo "error: $*" >&2
    exit 1
}

# Sorts the launcher's arguments into DRY_RUN, PATHS and FURTHER_ARGS.
read_arguments() {
    local argument
    DRY_RUN=no PATHS=() FURTHER_ARGS=()
    for argument in "$@"; do
        if [[ "$argument" == --help || "$argument" == -h ]]; then
            usage
            exit 0
        elif [[ "$argument" == --dry-run ]]; then
            DRY_RUN=yes
        elif [[ "$argument" == -* || ${#FURTHER_ARGS[@]} -gt 0 ]]; then
            FURTHER_ARGS+=("$argument")
        else
            PATHS+=("$argument")
        fi
    done
}

# Sets CHECKPOINTS and what follows from the paths: LOAD_ARGS, OUTPUT_ARGS, DATA_ARGS. First the name of the run.
name_paths() {
    local run="runs/$1"
    shift
    (($# <= 4)) || fail "'${*:5}' is no path that a launcher takes: CHECKPOINTS TENSORBOARD TOKENIZER DATA, then FLAGS"
    CHECKPOINTS="${1:-$run/checkpoints}"
    LOAD_ARGS=(--load "$CHECKPOINTS")
    OUTPUT_ARGS=(
        --save "$CHECKPOINTS"
        --tensorboard-dir "${2:-$run/tensorboard}"
        --log-interval 1
        --log-throughput
        --eval-iters 0
    )
    name_data "${3:-$DEFAULT_TOKENIZER}" "${4:-MOCK}"
}

name_data() {
    local tokenizer="$1" data="$2"
    case "$tokenizer" in
        MOCK) DATA_ARGS=(--tokenizer-type NullTokenizer) ;;
        *.model) DATA_ARGS=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$tokenizer") ;;
        *) DATA_ARGS=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$tokenizer") ;;
    esac
    if [[ "$data" == MOCK ]]; then
        DATA_ARGS+=(--mock-data)
    elif [[ "$tokenizer" == MOCK ]]; then
        fail "DATA $data needs the TOKENIZER that made it, a .model file or a folder, instead of MOCK"
    else
        read -ra data <<< "$data"
        DATA_ARGS+=(--data-path "${data[@]}")
    fi
}

# Plans, looks at this node, and starts its ranks. First the number of nodes that the flags are for, then the flags.
launch() {
    NNODES="${NNODES:-$1}" NODE_RANK="${NODE_RANK:-0}"
    shift
    [[ "$NNODES" == 1 || "$DRY_RUN" == yes || -n "${MASTER_ADDR:-}" ]] ||
        fail "$NNODES nodes meet at MASTER_ADDR, which is not set; give all the name of the node whose NODE_RANK is 0"
    local flags=("$@" "${DATA_ARGS[@]}" "${LOAD_ARGS[@]}" "${OUTPUT_ARGS[@]}" "${FURTHER_ARGS[@]}")
    local nodes=(
        --nodes "$NNODES" --gpus-per-node "$GPUS_PER_NODE"
        --gpu-memory-gib "$GPU_MEMORY_GIB" --host-memory-gib "$HOST_MEMORY_GIB"
    )
    local command=(
        torchrun --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK"
        --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}"
        "$ROOT/pretrain_gpt.py" "${flags[@]}"
    )
    # Ends here if such nodes are too small ...
    python "$ROOT/tools/plan_memory.py" "${nodes[@]}" "${flags[@]}"
    printf '%q ' "${command[@]}"
    echo
    [[ "$DRY_RUN" == no ]] || exit 0
    # ... or if this one has less than the plan takes.
    python "$ROOT/tools/check_node.py" "${nodes[@]}" "${flags[@]}"
    # Buffers of many sizes follow each other: let memory that was given back be mapped anywhere.
    export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
    exec "${command[@]}"
}
