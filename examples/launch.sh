# Sourced by the launchers beside it: their arguments, the memory plan, a look at this node, and torchrun.
#
#   bash examples/LAUNCHER.sh [--dry-run|--rehearse] [CHECKPOINTS [TENSORBOARD [TOKENIZER [DATA]]]] [FLAGS]
#
# CHECKPOINTS and TENSORBOARD are folders under runs/ by default. TOKENIZER is a SentencePiece .model or a Hugging Face
# folder, DATA the prefix of token files, or a blend "weight prefix weight prefix"; MOCK, the default, is random tokens.
# FLAGS are those of pretrain_gpt.py; they come last and win. --dry-run stops after the plan, on any machine.
#
# --rehearse tries the whole way on a machine without GPUs, in minutes: after the plan it trains with the same flags at
# tiny sizes on two to four ranks, saves, and goes on from that checkpoint. Its folders end in -rehearsal.
#
# Several nodes: the same command on each, with MASTER_ADDR, MASTER_PORT, NNODES, NODE_RANK and GPUS_PER_NODE set as
# torchrun knows them. Other nodes: GPU, a name that plan_memory.py --gpu takes; GPU_MEMORY_GIB, of one GPU, and
# HOST_MEMORY_GIB, of a node, where they differ from that GPU's usual nodes. DISK_GIB: free space of a node in the folders
# of ACTIVATION_DISK, for launchers that take it.
set -euo pipefail
ROOT="$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# The nodes that are planned for, unless a launcher or the caller says otherwise.
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
GPU="${GPU:-h100-80}"
DEFAULT_TOKENIZER=MOCK
TORCHRUN=(python "$ROOT/tools/torchrun.py")

# The comments at the top of a script.
header_of() { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$1"; }

usage() {
    header_of "$0"
    echo
    header_of "${BASH_SOURCE[0]}"
}

fail() {
    echo "error: $*" >&2
    exit 1
}

# Sorts the launcher's arguments into DRY_RUN, REHEARSE, PATHS and FURTHER_ARGS.
read_arguments() {
    local argument
    DRY_RUN=no REHEARSE=no PATHS=() FURTHER_ARGS=()
    for argument in "$@"; do
        if [[ "$argument" == --help || "$argument" == -h ]]; then
            usage
            exit 0
        elif [[ "$argument" == --dry-run ]]; then
            DRY_RUN=yes
        elif [[ "$argument" == --rehearse ]]; then
            REHEARSE=yes
        elif [[ "$argument" == -* || ${#FURTHER_ARGS[@]} -gt 0 ]]; then
            FURTHER_ARGS+=("$argument")
        else
            PATHS+=("$argument")
        fi
    done
}

# Sets CHECKPOINTS, TENSORBOARD and what follows from the paths: LOAD_ARGS, OUTPUT_ARGS, DATA_ARGS. First the name of the run.
name_paths() {
    local run="runs/$1"
    shift
    (($# <= 4)) || fail "'${*:5}' is no path that a launcher takes: CHECKPOINTS TENSORBOARD TOKENIZER DATA, then FLAGS"
    local suffix=""
    [[ "$REHEARSE" == no ]] || suffix=-rehearsal
    CHECKPOINTS="${1:-$run/checkpoints}"
    CHECKPOINTS="${CHECKPOINTS%/}$suffix"
    TENSORBOARD="${2:-$run/tensorboard}"
    TENSORBOARD="${TENSORBOARD%/}$suffix"
    LOAD_ARGS=(--load "$CHECKPOINTS")
    OUTPUT_ARGS=(
        --save "$CHECKPOINTS"
        --tensorboard-dir "$TENSORBOARD"
        --log-interval 1
        --log-throughput
        --eval-iters 0
        --exit-signal-handler
    )
    name_data "${3:-$DEFAULT_TOKENIZER}" "${4:-MOCK}"
}

# Sets what name_paths sets, and MODEL_ARGS, for a run that begins with a converted checkpoint: its folder by default, the
# architecture to plan for where it is not there yet, and the name of the run.
name_converted() {
    local converted="${PATHS[0]:-$1}"
    MODEL_ARGS=(--use-checkpoint-args)
    DEFAULT_TOKENIZER="$converted/tokenizer"
    if [[ ! -e "$converted" ]]; then
        [[ "$DRY_RUN" == yes || "$REHEARSE" == yes ]] || fail "no checkpoint in $converted; tools/convert_checkpoint.py hf-to-megatron makes one"
        echo "no checkpoint in $converted: planned for a model of its shape"
        MODEL_ARGS=(--model "$2")
        DEFAULT_TOKENIZER=MOCK
    fi
    name_paths "$3" "${PATHS[@]:1}"
    # A rehearsal starts over.
    if [[ -e "$converted" && ("$REHEARSE" == yes || ! -e "$CHECKPOINTS/latest_checkpointed_iteration.txt") ]]; then
        LOAD_ARGS=(--load "$converted" --finetune)
    fi
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

# An integer from the environment: its name, the smallest and the largest that work.
require_integer() {
    [[ "${!1}" =~ ^[0-9]{1,9}$ ]] && ((10#${!1} >= $2 && 10#${!1} <= $3)) ||
        fail "$1 '${!1}' is not an integer from $2 to $3"
}

# Sets NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT. First the number of nodes that the flags are for.
name_nodes() {
    NNODES="${NNODES:-$1}" MASTER_PORT="${MASTER_PORT:-29500}"
    require_integer NNODES 1 100000
    require_integer GPUS_PER_NODE 1 1024
    require_integer MASTER_PORT 1 65535
    if ((NNODES == 1)); then
        NODE_RANK="${NODE_RANK:-0}" MASTER_ADDR="${MASTER_ADDR:-localhost}"
    elif [[ "$DRY_RUN" == no && "$REHEARSE" == no ]]; then
        [[ -n "${MASTER_ADDR:-}" ]] ||
            fail "$NNODES nodes meet at MASTER_ADDR, which is not set; give all the name of the node whose NODE_RANK is 0"
        [[ -n "${NODE_RANK:-}" ]] ||
            fail "NODE_RANK is not set; give each of the $NNODES nodes its own, 0 to $((NNODES - 1))"
    fi
    [[ -z "${NODE_RANK:-}" ]] || require_integer NODE_RANK 0 $((NNODES - 1))
}

# The command that each node runs. Words in capitals stand for variables that a dry run was not told.
print_command() {
    printf '%q ' "$@"
    echo
    local unset=()
    [[ -n "${MASTER_ADDR:-}" ]] || unset+=(MASTER_ADDR)
    [[ -n "${NODE_RANK:-}" ]] || unset+=(NODE_RANK)
    ((${#unset[@]} == 0)) ||
        echo "this command works once ${unset[*]} in it are replaced: the host of node 0, and each node's own number"
}

# Adds to MEMORY_ARGS what local drives change, if ACTIVATION_DISK names folders on them: the planner chooses what goes there,
# and for how many layers host and drives hold attention's output.
add_activation_disk() {
    [[ -n "${ACTIVATION_DISK:-}" ]] || return 0
    MEMORY_ARGS+=(--activation-disk "$ACTIVATION_DISK" --recompute-granularity selective --attention-output-layers auto)
}

# Sets flags: a launcher's own, given here, those that follow from the paths, and the user's, which win.
join_flags() {
    flags=("$@" "${DATA_ARGS[@]}" "${LOAD_ARGS[@]}" "${OUTPUT_ARGS[@]}" "${FURTHER_ARGS[@]}")
}

# Plans, looks at this node, and starts its ranks. First the number of nodes that the flags are for, then the flags.
launch() {
    name_nodes "$1"
    shift
    source "$ROOT/tools/environment.sh"
    local flags
    join_flags "$@"
    local nodes=(--nodes "$NNODES" --gpus-per-node "$GPUS_PER_NODE" --gpu "$GPU")
    [[ -z "${GPU_MEMORY_GIB:-}" ]] || nodes+=(--gpu-memory-gib "$GPU_MEMORY_GIB")
    [[ -z "${HOST_MEMORY_GIB:-}" ]] || nodes+=(--host-memory-gib "$HOST_MEMORY_GIB")
    [[ -z "${DISK_GIB:-}" ]] || nodes+=(--disk-gib "$DISK_GIB")
    # Each rank on the CPUs and in the memory beside its GPU: what it offloads does not cross sockets.
    local binding=(--numa-binding node)
    [[ "$DRY_RUN" == yes ]] || can_bind || binding=()
    local command=(
        "${TORCHRUN[@]}" "${binding[@]}" --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "${NODE_RANK:-NODE_RANK}"
        --master-addr "${MASTER_ADDR:-MASTER_ADDR}" --master-port "$MASTER_PORT"
        "$ROOT/pretrain_gpt.py" "${flags[@]}"
    )
    # Ends here if such nodes are too small ...
    python "$ROOT/tools/plan_memory.py" "${nodes[@]}" "${flags[@]}"
    if [[ "$REHEARSE" == yes ]]; then
        rehearse "$@"
        exit 0
    fi
    print_command "${command[@]}"
    [[ "$DRY_RUN" == no ]] || exit 0
    # ... or if this one has less than the plan takes.
    python "$ROOT/tools/check_node.py" "${nodes[@]}" "${flags[@]}"
    # torchrun would give each rank one thread, and an optimizer on the host all of its time.
    local cores
    cores="$(nproc)"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > GPUS_PER_NODE ? cores / GPUS_PER_NODE : 1))}"
    exec "${command[@]}"
}

# Whether torchrun can bind ranks: it needs GPUs, and numactl.
can_bind() {
    compgen -G '/dev/nvidia[0-9]*' > /dev/null || return 1
    command -v numactl > /dev/null && return
    echo "numactl is not installed: ranks run on any CPU, and host copies may cross sockets" >&2
    return 1
}

# The run that the flags describe, at tiny sizes on the CPUs of this machine.
rehearse() {
    local small mark="$CHECKPOINTS/made_by_rehearsal" flags
    join_flags "$@"
    small="$(python "$ROOT/tools/rehearsal_flags.py" "${flags[@]}")"
    mapfile -t small <<< "$small"
    local torchrun=("${TORCHRUN[@]}" --standalone --nproc-per-node "${small[0]}" "$ROOT/pretrain_gpt.py")
    small=("${small[@]:1}" --save "$CHECKPOINTS" --tensorboard-dir "$TENSORBOARD")
    [[ ! -e "$CHECKPOINTS" || -e "$mark" ]] ||
        fail "$CHECKPOINTS was not made by a rehearsal; move it away, or give other CHECKPOINTS"
    rm -rf "$CHECKPOINTS"
    mkdir -p "$CHECKPOINTS"
    touch "$mark"
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    echo "== rehearsal"
    print_command "${torchrun[@]}" "${flags[@]}" "${small[@]}"
    "${torchrun[@]}" "${flags[@]}" "${small[@]}" --exit-interval 2
    echo "== rehearsal: goes on from its checkpoint"
    LOAD_ARGS=(--load "$CHECKPOINTS")
    join_flags "$@"
    "${torchrun[@]}" "${flags[@]}" "${small[@]}"
    echo "== rehearsal: done, nothing failed; its checkpoints are in $CHECKPOINTS"
}
