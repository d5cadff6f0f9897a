"""The settings that a search for the longest context may change, as flags and as a command."""

import shlex
from collections.abc import Callable, Sequence
from typing import Any

from megatron_untied.cli.arguments import parse_flags
from megatron_untied.config.run import RunConfig
from megatron_untied.planner.machine import Machine

_VALUES: dict[str, Callable[[RunConfig], Any]] = {
    "--seq-length": lambda run: run.batch.seq_length,
    "--context-parallel-size": lambda run: run.parallel.context_parallel_size,
    "--cp-comm-type": lambda run: run.parallel.cp_comm_type,
    "--hierarchical-context-parallel-sizes": (
        lambda run: run.parallel.hierarchical_context_parallel_sizes
    ),
    "--cp-heads-per-chunk": lambda run: run.parallel.heads_per_chunk,
    "--no-cp-overlap": lambda run: not run.parallel.cp_overlap,
    "--loss-chunk-size": lambda run: run.memory.loss_chunk_size,
    "--use-distributed-optimizer": lambda run: run.optimization.use_distributed_optimizer,
    "--use-torch-fsdp2": lambda run: run.optimization.use_torch_fsdp2,
    "--optimizer-cpu-offload": lambda run: run.optimization.optimizer_cpu_offload,
    "--recompute-granularity": lambda run: run.memory.recompute_granularity,
}
_STREAMED: dict[str, Callable[[RunConfig], Any]] = {
    "--recompute-num-layers": lambda run: run.memory.recompute_num_layers,
    "--cpu-offloading-num-layers": lambda run: run.memory.cpu_offloading_num_layers,
    "--park-during-attention": lambda run: run.memory.park_during_attention,
    "--sequence-tile-size": lambda run: run.memory.sequence_tile_size,
}
"""Of streamed layers; refused without ``--recompute-granularity``."""
_REPLACED = {*_VALUES, *_STREAMED, "--recompute-method"}


def context_flags(config: RunConfig) -> list[str]:
    """Every setting that the search may change, as flags."""
    streamed = _STREAMED if config.memory.recompute_granularity is not None else {}
    return [
        word
        for flag, value_of in (_VALUES | streamed).items()
        for word in _written(flag, value_of(config))
    ]


def training_flags(given: Sequence[str], config: RunConfig) -> list[str]:
    """``given`` flags of training with the settings of ``config`` in place of theirs."""
    kept, is_replaced = [], False
    for word in given:
        if word.startswith("--"):
            is_replaced = word.partition("=")[0] in _REPLACED
        if not is_replaced:
            kept.append(word)
    values, tokens = parse_flags(given), config.batch.seq_length
    # An architecture that comes with a length of its own would refuse a longer sequence.
    has_length = values.keys() & {"max_position_embeddings", "use_checkpoint_args"}
    longer = has_length and config.model.max_position_embeddings < tokens
    more = ["--max-position-embeddings", str(tokens)] if longer else []
    return [*kept, *context_flags(config), *more]


def launch_command(flags: Sequence[str], machine: Machine) -> str:
    """The command that starts training with ``flags``, on each node of ``machine``."""
    ranks = f"torchrun --nproc-per-node {machine.gpus_per_node}"
    if machine.nodes > 1:
        ranks += (
            f' --nnodes {machine.nodes} --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"'
            ' --master-port "${MASTER_PORT:-29500}"'
        )
    return f"{ranks} pretrain_gpt.py {shlex.join(flags)}"


def _written(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag] if value else []
    if value is None:
        return []
    return [flag, *map(str, value if isinstance(value, tuple) else [value])]
