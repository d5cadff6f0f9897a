"""One training step of one rank, run on tensors without memory, and what it allocates.

Everything of the step is the real code: model, loss, sharding and optimizer. Attention kernels and
collectives are fakes that only allocate what the real ones do.
"""

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.kernels.flash_attention import FlashAttention3
from megatron_untied.context_parallel.kernels.registry import KERNELS
from megatron_untied.context_parallel.kernels.traced import SCRATCH, TracedKernel
from megatron_untied.gpt_model import ChunkedLossGPTModel
from megatron_untied.model import Runtime, build_model
from megatron_untied.phases import MemoryCategory, Phase, allocating
from megatron_untied.planner.geometry import by_sizes
from megatron_untied.platform.device import current_device
from megatron_untied.sharding.shards import Shard
from megatron_untied.step_progress import StepProgress
from megatron_untied.streaming.host_arena import HostArena
from megatron_untied.tracing.fake_collectives import (
    call_with_borrowed_memory,
    equal_ranks,
    fsdp_categories,
    optimizer_step,
)
from megatron_untied.tracing.fake_tensor_cache import FakeTensorCache
from megatron_untied.tracing.live_bytes import LiveBytes, Peak
from megatron_untied.training.context_evaluation import EvaluatedModel
from megatron_untied.training.initialize import make_groups
from megatron_untied.training.state import TrainState, build_train_state
from megatron_untied.training.step import Batch, forward_backward


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace:
    """What a step takes per rank. Bytes are those of tensors; see :mod:`.live_bytes`."""

    peak_by_phase: dict[str, Peak]
    """By :class:`.phases.Phase`."""
    peak_phase: str
    timeline: list[tuple[str, int]]
    """The phases in the order of the step, one as often as it occurs: its name and peak."""
    model_state_bytes: int
    """Alive on the device between steps."""
    host_bytes: int
    """Of the host arena of layers, and of an optimizer on the host."""
    disk_bytes: int
    """Of saved activations on the disks."""
    disk_written_bytes: int
    """To the disks in the step."""
    attention_forward_calls_per_layer: float
    """Forward kernels of a layer's attention in a step over those in its forward: 1 if kept."""
    attention_flops: int
    """Of the kernels of all layers, forward and backward; a multiply and an add are two."""
    exchange_bytes_per_layer: int
    """Bytes that attention sends in a forward and backward, those to this rank included."""

    @property
    def peak(self) -> Peak:
        """The highest peak of the step."""
        return self.peak_by_phase[self.peak_phase]


class StepTracer:
    """One step of a rank's share of a run, on fake or on real tensors, with its counters."""

    def __init__(self, config: RunConfig, *, fake: bool = True):
        """``fake=False``: on real tensors, to check the numbers of a trace."""
        self.config = config = by_sizes(config)
        # A trace has no GPU to choose for: a family of kernels is traced as FlashAttention-3.
        kinds = [kind for kind in KERNELS[config.attention_backend] if kind in SCRATCH]
        self.kernel = TracedKernel(kinds[0] if len(kinds) == 1 else FlashAttention3)
        self.progress = StepProgress()
        self.calls_in_forward = 0
        if fake:
            self.mode, self.arena = FakeTensorMode(), HostArena.for_tracing(config.memory)
            self.live = LiveBytes(self.progress, FakeTensorCache(self.mode))
        else:
            self.mode, self.live = (
                contextlib.nullcontext(),
                LiveBytes(self.progress, call_with_borrowed_memory),
            )
            self.arena = HostArena.for_device(current_device(), config.memory)

    def run(self, groups: ProcessGroupCollection) -> StepTrace:
        """Build the train state and do one step."""
        with self.mode, self.live, fsdp_categories():
            offload = self.config.optimization.optimizer_cpu_offload
            # All that is made here is then the host's: in a trace both are the CPU.
            uncounted = self.live.paused() if offload else contextlib.nullcontext()
            with allocating(MemoryCategory.STATES), uncounted:
                train_state = build_train_state(
                    self._build_model, self.config, groups, self.progress
                )
                # Of a step that is not the first: megatron-core makes moments at the end of that.
                shards = list(train_state.checkpoint_state.shards.shards(with_moments=True))
            if offload:
                self._keep_on_host(train_state, shards)
            del shards  # they hold views, which would keep memory alive
            model_state_bytes = self.live.num_bytes
            batch = self.config.batch
            shape = batch.micro_batch_size, batch.seq_length // groups.cp.size()  # [b, s/p]
            with allocating(MemoryCategory.INPUTS):
                batches = [
                    Batch(
                        tokens=torch.zeros(shape, dtype=torch.int64),
                        labels=torch.zeros(shape, dtype=torch.int64),
                        loss_mask=torch.ones(shape, dtype=torch.float32),
                    )
                    for _ in range(batch.num_micro_batches(groups.dp.size()))
                ]
            train_state.sharding.zero_grad()
            # Every token is valid, so their number needs no all-reduce and no value from a tensor.
            forward_backward(train_state, batches, batch.tokens, self._forward_step)
            with self.progress.phase(Phase.OPTIMIZER):
                optimizer_step(train_state.sharding)
        return self._result(train_state.model, model_state_bytes)

    def run_evaluation(self, groups: ProcessGroupCollection) -> Peak:
        """Score one micro-batch by a model without an optimizer; returns the peak of that."""
        with self.mode, self.live, fsdp_categories(), torch.no_grad():
            with allocating(MemoryCategory.STATES):
                model = EvaluatedModel.build(
                    self._build_model, self.config, groups, self.progress
                ).model
            batch = self.config.batch
            shape = batch.micro_batch_size, batch.seq_length // groups.cp.size()  # [b, s/p]
            with allocating(MemoryCategory.INPUTS):
                tokens, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
            model(tokens, labels=labels)
        # Megatron-core's layers draw a whole matrix in fp32 when they are built.
        peaks = [peak for phase, peak in self.live.peaks.items() if phase != Phase.SETUP]
        return max(peaks, key=lambda peak: peak.num_bytes)

    def _build_model(
        self, config: RunConfig, groups: ProcessGroupCollection, progress: StepProgress
    ) -> ChunkedLossGPTModel:
        return build_model(
            config.model,
            config.parallel,
            config.memory,
            config.precision,
            groups,
            runtime=Runtime(kernel=self.kernel, arena=self.arena, progress=progress),
            adaptation=config.adaptation,
        )

    def _keep_on_host(self, train_state: TrainState, shards: list[Shard]) -> None:
        """Count weights' rows, moments and gradients as the host's."""
        for shard in shards:
            for tensor in (shard.value, *shard.moments.values()):
                self.live.move_to_host(tensor)
        for state in train_state.sharding.adam.state.values():
            self.live.move_to_host(state["step"])
        for parameter in filter(lambda p: p.requires_grad, train_state.model.parameters()):
            parameter.register_post_accumulate_grad_hook(
                lambda p: self.live.move_to_host(p.grad.to_local())
            )

    def _forward_step(self, model: nn.Module, batch: Batch, token_weights: Tensor) -> Tensor:
        # Counted apart from the whole step: the rest are calls of recomputation.
        before = self.kernel.counter.forward_calls
        loss = model(batch.tokens, labels=batch.labels, token_weights=token_weights)
        self.calls_in_forward += self.kernel.counter.forward_calls - before
        return loss

    def _result(self, model: nn.Module, model_state_bytes: int) -> StepTrace:
        counter, disk = self.kernel.counter, self.arena.disk
        attention = [module for module in model.modules() if hasattr(module, "ulysses")]
        sent_bytes = sum(module.ulysses.exchange.counter.sent_bytes for module in attention)
        ring = attention[0].context.ring  # one for all layers
        if ring is not None:
            sent_bytes += ring.counter.sent_bytes
        return StepTrace(
            peak_by_phase=self.live.peaks,
            peak_phase=max(self.live.peaks, key=lambda name: self.live.peaks[name].num_bytes),
            timeline=self.live.timeline,
            model_state_bytes=model_state_bytes,
            host_bytes=self.arena.reserved_bytes + self.live.host_bytes,
            disk_bytes=disk.reserved_bytes if disk else 0,
            disk_written_bytes=disk.written_bytes if disk else 0,
            attention_forward_calls_per_layer=counter.forward_calls / self.calls_in_forward,
            attention_flops=counter.flops,
            exchange_bytes_per_layer=sent_bytes // self.config.model.num_layers,
        )


def trace_step(
    config: RunConfig, *, world_size: int, rank: int = 0, evaluates: bool = False
) -> StepTrace | Peak:
    """Run the step that ``config`` describes as ``rank`` of ``world_size``, without memory.

    If it ``evaluates``, a forward without an optimizer, of which only the peak is returned.

    Makes and destroys the process groups of this process. Trace once per process: megatron-core
    keeps some tensors in module state, and a second trace would miss their allocation.
    """
    # torch's "fake" backend: collectives do nothing and return at once.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        groups = make_groups(config.parallel, config.distributed)
        with equal_ranks():
            tracer = StepTracer(config)
            return tracer.run_evaluation(groups) if evaluates else tracer.run(groups)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
