"""One training step of one rank with tensors that have no memory, and what it would take."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_untied.context_parallel.kernels.traced import TracedFlashAttention3
from megatron_untied.model import UntiedGPTModel, build_model
from megatron_untied.streaming.host_arena import HostArena
from megatron_untied.tracing.live_bytes import LiveBytes
from megatron_untied.training.batch import Batch
from megatron_untied.training.config import RunConfig
from megatron_untied.training.initialize import make_groups
from megatron_untied.training.learner import build_learner
from megatron_untied.training.step import forward_backward


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace:
    """What a step takes of one rank. Bytes are of tensors; see :mod:`.live_bytes`."""

    peak_device_bytes: int
    peak_phase: str
    live_at_peak: dict[str, int]
    """Bytes by the line of code that allocated them, most first."""
    peak_by_phase: dict[str, int]
    model_state_bytes: int
    """Alive between steps."""
    host_bytes: int
    """Of the stash's arena, and of what the optimizer keeps there."""
    attention_forward_calls_per_layer: float
    """How often a layer's attention is computed in a forward and backward: 1 if it is kept."""
    attention_flops: int
    """Of the kernels of all layers, forward and backward; a multiply and an add are two."""
    exchange_bytes_per_layer: int
    """What attention sends in a forward and backward, to other ranks or to this one itself."""


def trace_step(config: RunConfig, *, world_size: int, rank: int = 0) -> StepTrace:
    """Run the step that ``config`` describes on fake tensors, as ``rank`` of ``world_size``.

    Everything of it is real but kernels and collectives, which only allocate. Makes and destroys
    the process groups of this process.
    """
    arena, kernel, live = HostArena.for_tracing(), TracedFlashAttention3(), LiveBytes()

    def model_provider(config: RunConfig, groups: ProcessGroupCollection) -> UntiedGPTModel:
        return build_model(
            config.model,
            config.parallel,
            config.memory,
            type(config.precision)(bf16=False),
            groups,
            kernel=kernel,
            arena=arena,
        )

    with _fake_groups(config, world_size, rank) as groups, FakeTensorMode(), live:
        learner = build_learner(model_provider, config, groups)
        model_state_bytes = live.num_bytes
        batches = _batches(config, groups)
        learner.sharding.zero_grad()
        forward_backward(learner.sharding, batches, config.batch.tokens, _forward_step)
        learner.sharding.step()
    return StepTrace(
        peak_device_bytes=live.peak.num_bytes,
        peak_phase=live.peak_phase,
        live_at_peak=dict(sorted(live.peak.by_cause.items(), key=lambda item: -item[1])),
        peak_by_phase={phase: peak.num_bytes for phase, peak in live.peaks.items()},
        model_state_bytes=model_state_bytes,
        host_bytes=arena.reserved_bytes,
        attention_forward_calls_per_layer=0.0,
        attention_flops=kernel.counter.flops,
        exchange_bytes_per_layer=0,
    )


@contextlib.contextmanager
def _fake_groups(config: RunConfig, world_size: int, rank: int) -> Iterator[ProcessGroupCollection]:
    """The groups of a rank whose collectives return at once, having done nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield make_groups(config.parallel, config.distributed)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _batches(config: RunConfig, groups: ProcessGroupCollection) -> list[Batch]:
    """This rank's micro-batches of one step."""
    batch = config.batch
    shape = batch.micro_batch_size, batch.seq_length // groups.cp.size()
    return [
        Batch(
            tokens=torch.empty(shape, dtype=torch.int64),
            labels=torch.empty(shape, dtype=torch.int64),
            loss_mask=torch.empty(shape, dtype=torch.float32),
        )
        for _ in range(batch.num_micro_batches(groups.dp.size()))
    ]


def _forward_step(model: nn.Module, batch: Batch, token_weights: Tensor) -> Tensor:
    return model(batch.tokens, labels=batch.labels, token_weights=token_weights)
