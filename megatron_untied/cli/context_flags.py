"""Flags and launch command of the settings found by a search for the longest context."""

import shlex
from collections.abc import Sequence

from megatron_untied.cli.arguments import parse_flags
from megatron_untied.config.flag_names import flag_of
from megatron_untied.config.run import RunConfig
from megatron_untied.planner.automatic import OPEN, flags_of
from megatron_untied.planner.machine import Machine

_SEARCHED = (
    ("batch", "seq_length"),
    ("parallel", "context_parallel_size"),
    ("parallel", "cp_comm_type"),
    ("parallel", "hierarchical_context_parallel_sizes"),
    ("optimization", "use_distributed_optimizer"),
    ("optimization", "use_torch_fsdp2"),
    ("optimization", "optimizer_cpu_offload"),
    *OPEN,
)
"""Parts and fields of a configuration that the search for the longest context may change."""

_REPLACED_FLAGS = {
    # Refused without --recompute-granularity, which the search may remove.
    "--recompute-method",
    "--no-cp-overlap",
    *(flag_of(f"{part}.{name}") for part, name in _SEARCHED),
}


def context_flags(config: RunConfig) -> list[str]:
    """Write every setting that the search may change as flags."""
    return flags_of(config, _SEARCHED)


def training_flags(given: Sequence[str], config: RunConfig) -> list[str]:
    """Replace the searched settings in the training flags ``given`` by those of ``config``."""
    kept, is_replaced = [], False
    for word in given:
        if word.startswith("--"):
            # The words up to the next flag are its values and go with it.
            is_replaced = word.partition("=")[0] in _REPLACED_FLAGS
        if not is_replaced:
            kept.append(word)
    values, tokens = parse_flags(given), config.batch.seq_length
    # A preset or a checkpoint has a maximum length, and would refuse a longer sequence.
    has_length = values.keys() & {"max_position_embeddings", "use_checkpoint_args"}
    longer = has_length and config.model.max_position_embeddings < tokens
    more = ["--max-position-embeddings", str(tokens)] if longer else []
    return [*kept, *context_flags(config), *more]


def launch_command(flags: Sequence[str], machine: Machine) -> str:
    """The shell command that starts training with ``flags``; run it on each node of ``machine``."""
    ranks = f"torchrun --nproc-per-node {machine.gpus_per_node}"
    # Variables are expanded by each node's own shell, so one command serves all nodes.
    if machine.nodes > 1:
        ranks += (
            f' --nnodes {machine.nodes} --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"'
            ' --master-port "${MASTER_PORT:-29500}"'
        )
    return f"{ranks} pretrain_gpt.py {shlex.join(flags)}"
