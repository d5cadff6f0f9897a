"""How long a step takes by a roofline: work over achieved rates, and what nothing hides.

Attention and matrix products run one after the other. Exchanges hide behind attention if they
overlap with it, copies to the host behind all of a layer, gathers of weights likewise; only what
is left over counts. It says which setting is faster, and when a step becomes hours.
"""

from dataclasses import dataclass
from functools import cached_property

from megatron_untied.flops import attention_flops
from megatron_untied.planner.geometry import Geometry
from megatron_untied.planner.machine import Machine
from megatron_untied.planner.weights import ShardedWeights

_GIGA = 1e9
_STARTING_SECONDS = 2e-4
"""Of a chunk: latencies of its collectives and of some twenty kernels."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by what takes them."""

    geometry: Geometry
    machine: Machine

    def by_cause(self) -> dict[str, float]:
        """Seconds by cause."""
        layers = self.geometry.num_layers * self.geometry.num_micro_batches
        seconds = {
            "attention": layers * self.attention,
            "linear layers": layers * self.linear,
            "loss": self.geometry.num_micro_batches * self.loss,
            "exchanges, not hidden": layers * self.exchange_exposed,
            "starting chunks": layers * self.starting_chunks,
            "host copies, not hidden": layers * self._exposed(self.host_copies),
            "gathers of weights, not hidden": layers * self._exposed(self.gathers),
            "optimizer": self.optimizer,
        }
        return {cause: value for cause, value in seconds.items() if value}

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.by_cause().values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """As training logs it."""
        return self.geometry.config.batch.tokens / self.seconds / self.geometry.world_size

    @cached_property
    def attention(self) -> float:
        """One layer's, forward and backward: 2 products forward, 5 backward."""
        geo, gpu = self.geometry, self.machine.gpu
        flops = attention_flops(geo.config.model, seq_length=geo.config.batch.seq_length)
        flops *= geo.b / (geo.t * geo.p) * self._imbalance
        forwards = 2 if self._memory.recompute_granularity == "full" else 1
        units = forwards / gpu.attention_forward_fraction + 2.5 / gpu.attention_backward_fraction
        return flops * units / self._peak

    @cached_property
    def linear(self) -> float:
        """One layer's matrix products; streamed ones project, run and differentiate again."""
        geo, memory = self.geometry, self._memory
        qkv = geo.m * (geo.h + 2 * geo.g) * geo.d
        others = geo.m * (geo.h * geo.d + (3 if geo.config.model.swiglu else 2) * geo.f)
        if memory.recompute_granularity is None:
            units = 3 * (qkv + others)
        else:
            rebuilt = 1 - 1 / memory.recompute_num_layers
            attends_again = memory.recompute_granularity == "full"
            units = qkv * (5 + attends_again) + others * (4 + rebuilt)
        return 2 * geo.n * geo.b * units / (self._peak * self.machine.gpu.matmul_fraction)

    @property
    def loss(self) -> float:
        """Logits and both their gradients."""
        geo = self.geometry
        flops = 6 * geo.n * geo.b * geo.m * geo.v
        return flops / (self._peak * self.machine.gpu.matmul_fraction)

    @cached_property
    def exchange(self) -> float:
        """One layer's exchanges, all-to-all and ring."""
        geo = self.geometry
        loads = sum(len(each.kv_to_load) for chunk in geo.schedule.chunks for each in chunk)
        forwards = 2 if self._memory.recompute_granularity == "full" else 1
        heads = forwards * (2 * geo.h + 2 * loads) + 4 * geo.h + 4 * loads
        token_bytes = geo.n * geo.b * geo.d * geo.itemsize
        ulysses = heads * token_bytes * (1 - 1 / geo.num_ulysses)
        # Half of what is borrowed in forward; the same and its gradients in backward.
        ring = (forwards + 2) * 2 * loads * token_bytes * (geo.num_ring - 1) * 0.75
        seconds = ulysses / self._rate(geo.num_ulysses * geo.t)
        return seconds + (ring / self._rate(geo.p * geo.t) if ring else 0.0)

    @property
    def exchange_exposed(self) -> float:
        """What of it attention does not hide: the first and last chunk's, or all of it."""
        if not self.geometry.schedule.overlap:
            return self.exchange
        ends = self.exchange / len(self.geometry.schedule.chunks)
        return ends + max(0.0, self.exchange - ends - self.attention)

    @property
    def starting_chunks(self) -> float:
        """What each chunk costs again: the input is read and normalized, kernels are started."""
        passes = 3 if self._memory.recompute_granularity == "full" else 2
        streamed = self._memory.recompute_granularity is not None
        traffic = 3 * self.geometry.residual_bytes * streamed
        seconds = traffic / (self.machine.gpu.memory_gb_per_second * _GIGA) + _STARTING_SECONDS
        return passes * len(self.geometry.schedule.chunks) * seconds

    @cached_property
    def host_copies(self) -> float:
        """What an average layer moves in the busier direction, to the device."""
        geo = self.geometry
        if self._memory.recompute_granularity is None:
            return 0.0
        chunks = len(geo.schedule.chunks)
        reads = (4 + chunks) * geo.residual_bytes  # each chunk is projected from the input
        outputs = 2 * geo.output_bytes
        on_host = self._memory.cpu_offloading_num_layers / geo.num_layers
        moved = on_host * (reads + outputs)
        if self._memory.park_during_attention:
            moved = reads * (1 + chunks / (4 + chunks)) + 2 * outputs + 2 * geo.residual_bytes
        return moved / (self.machine.gpu.pcie_gb_per_second * _GIGA)

    @cached_property
    def gathers(self) -> float:
        """A layer's weights for forward and backward, and its gradient."""
        weights = ShardedWeights(self.geometry)
        if not weights.is_full:
            return 0.0
        numel = weights.units.layer.numel * (1 - 1 / self.geometry.num_sharding)
        return numel * (2 * self.geometry.itemsize + 4) / self._rate(self.geometry.world_size)

    @property
    def optimizer(self) -> float:
        """Reads and writes of weights, gradients and moments; and whole gradients' reduction."""
        weights, geo, gpu = ShardedWeights(self.geometry), self.geometry, self.machine.gpu
        shared = weights.is_full or geo.config.optimization.use_distributed_optimizer
        rows = weights.units.numel / (geo.num_sharding if shared else 1)
        rate = gpu.pcie_gb_per_second if weights.is_on_host else gpu.memory_gb_per_second
        reduced = 0.0 if weights.is_full or geo.num_sharding == 1 else 6.0 * weights.units.numel
        return 28 * rows / (rate * _GIGA) + reduced / self._rate(geo.world_size)

    @property
    def _memory(self):
        return self.geometry.config.memory

    @property
    def _peak(self) -> float:
        """FLOP/s; without bf16 about an eighth of it."""
        scale = 1.0 if self.geometry.itemsize == 2 else 0.125
        return self.machine.gpu.bf16_tflops * 1e12 * scale

    @property
    def _imbalance(self) -> float:
        """By how much the rank with most heads has more than an even share."""
        geo = self.geometry
        return -(-geo.h // geo.num_ulysses) * geo.num_ulysses / geo.h

    def _exposed(self, seconds: float) -> float:
        return max(0.0, seconds - self.attention - self.linear)

    def _rate(self, num_ranks: int) -> float:
        """Bytes a second to the others of a group of neighboring ranks."""
        gpu, within = self.machine.gpu, num_ranks <= self.machine.gpus_per_node
        return _GIGA * (gpu.nvlink_gb_per_second if within else gpu.network_gb_per_second)
