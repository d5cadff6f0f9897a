"""How long a step takes by a roofline: work over achieved rates, and what nothing hides.

Attention and matrix products run one after the other. Exchanges hide behind attention if they
overlap with it; copies to the host and gathers of weights hide behind all of a layer, but for tiles
of the attention output. Disks are written beside all of a forward and read beside all of a
backward. Only what is left over counts. The estimate ranks settings, and shows when a step takes
hours.
"""

from dataclasses import dataclass

from megatron_untied import flops
from megatron_untied.planner.geometry import Geometry
from megatron_untied.planner.kernels import attention_units
from megatron_untied.planner.machine import Machine
from megatron_untied.planner.weights import ShardedWeights

_GIGA = 1e9
_CHUNK_LATENCY = 2e-4
"""Seconds per chunk: latencies of its collectives and of some twenty kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one step, by category, and of one layer's parts."""

    attention: float
    """One layer's attention kernels, forward and backward."""
    by_category: dict[str, float]
    seconds: float
    tokens_per_second_per_gpu: float
    """As training logs it."""

    @classmethod
    def of(
        cls, geometry: Geometry, machine: Machine, on_disk: tuple[int, int] = (0, 0)
    ) -> "StepTime":
        """By the rates of ``machine``'s GPUs and links.

        ``on_disk``: bytes that one rank writes to disks and reads from them per micro-batch.
        """
        geo = geometry
        layers = geo.num_layers * geo.num_micro_batches
        attention, linear, loss = _compute_seconds(geo, machine)
        exchange = _exchange_seconds(geo, machine)
        exposed_exchange = exchange
        if geo.schedule.overlap:  # the first chunk and the last one have nothing to hide behind
            ends = exchange / len(geo.schedule.chunks)
            exposed_exchange = ends + max(0.0, exchange - ends - attention)
        # Every pass over the chunks starts each of them: it reads and normalizes the layer's input.
        passes = 2 + geo.recomputed
        traffic = 3 * geo.residual_bytes * geo.is_streamed
        chunk_start = traffic / (machine.gpu.memory_gb_per_second * _GIGA) + _CHUNK_LATENCY
        starts = passes * len(geo.schedule.chunks) * chunk_start
        host_copies, exposed_copies = _host_copy_seconds(geo, machine)
        gathers, optimizer = _sharding_seconds(geo, machine)
        layer_sums, loss_sums = _gradient_sum_seconds(geo, machine)
        backward = (attention + linear) * (1 - _forward_share(geo))
        disk_rate = machine.disk_gb_per_second * _GIGA * len(geo.config.memory.activation_disk)
        written, read = (
            bytes_ * machine.gpus_per_node / disk_rate if bytes_ else 0.0 for bytes_ in on_disk
        )
        beside_write = (attention + linear - backward) * geo.num_layers
        disk = max(0.0, written - beside_write) + max(0.0, read - backward * geo.num_layers)
        seconds = {
            "attention": layers * attention,
            "linear layers": layers * linear,
            "loss": geo.num_micro_batches * loss,
            "sums of weight gradients": layers * layer_sums + geo.num_micro_batches * loss_sums,
            "exchanges, not hidden": layers * exposed_exchange,
            "starting chunks": layers * starts,
            "host copies of tiles": layers * exposed_copies,
            "host copies, not hidden": layers * max(0.0, host_copies - attention - linear),
            "disks, not hidden": geo.num_micro_batches * disk,
            "gathers of weights, not hidden": layers * max(0.0, gathers - attention - linear),
            "optimizer": optimizer,
        }
        by_category = {category: value for category, value in seconds.items() if value}
        total = sum(by_category.values())
        return cls(
            attention=attention,
            by_category=by_category,
            seconds=total,
            tokens_per_second_per_gpu=geo.config.batch.tokens / total / geo.world_size,
        )


def _compute_seconds(geo: Geometry, machine: Machine) -> tuple[float, float, float]:
    """One layer's attention, one layer's matrix products, and the loss of a micro-batch."""
    gpu, memory, model = machine.gpu, geo.config.memory, geo.config.model
    # Without bf16 the tensor cores run in TF32 or not at all: about an eighth of the peak.
    peak = gpu.bf16_tflops * 1e12 * (1.0 if geo.itemsize == 2 else 0.125)

    seq_length = geo.config.batch.seq_length
    attention_flops = flops.attention_flops(model, seq_length=seq_length)
    # The rank with the most heads has more than an even share, and the others wait for it.
    imbalance = -(-geo.h // geo.num_ulysses) * geo.num_ulysses / geo.h
    attention_flops *= geo.b / (geo.num_tensor * geo.num_context) * imbalance
    units = attention_units(gpu.attention_fractions[geo.kernel.kind.name], 1 + geo.recomputed)
    attention = attention_flops * units / peak

    qkv = geo.m * (geo.h + 2 * geo.g) * geo.d
    others = geo.m * (geo.h * geo.d + (3 if model.swiglu else 2) * geo.f)
    if geo.is_streamed:
        # QKV is projected again for each backward; the MLP is recomputed under autograd, and once
        # more in the layers of a group whose inputs are not kept.
        inputs = 1 - 1 / memory.recompute_num_layers
        products = qkv * (5 + geo.recomputed) + others * (4 + inputs)
    else:
        products = 3 * (qkv + others)
    linear = 2 * geo.n * geo.b * products / (peak * gpu.matmul_fraction)

    # Logits and both of their gradients, 2 FLOPs for each of 3 products.
    loss = 6 * geo.n * geo.b * geo.m * geo.v / (peak * gpu.matmul_fraction)
    return attention, linear, loss


def _exchange_seconds(geo: Geometry, machine: Machine) -> float:
    """One layer's exchanges, all-to-all and ring."""
    loads = sum(len(heads.kv_to_load) for chunk in geo.schedule.chunks for heads in chunk)
    forwards = 1 + geo.recomputed
    # Forward: q, k, v there and o back. Backward: q, o, dO there and dQ back; k, v and dK, dV.
    heads = forwards * (2 * geo.h + 2 * loads) + 4 * geo.h + 4 * loads
    token_bytes = geo.n * geo.b * geo.d * geo.itemsize
    ulysses = heads * token_bytes * (1 - 1 / geo.num_ulysses)
    # A causal ring passes half of the keys and values on in forward; in backward the same and
    # their gradients.
    ring = (forwards + 2) * 2 * loads * token_bytes * (geo.num_ring - 1) * 0.75
    seconds = ulysses / _link_rate(machine, geo.num_ulysses * geo.num_tensor)
    return seconds + (ring / _link_rate(machine, geo.num_context * geo.num_tensor) if ring else 0.0)


def _host_copy_seconds(geo: Geometry, machine: Machine) -> tuple[float, float]:
    """An average layer's copies in the busier direction, which is to the device.

    Those beside compute, and those that compute waits for: the attention output of a tile is read
    when the tile is computed, in forward and in backward, and so are the gradients of a parked one.
    """
    if not geo.is_streamed:
        return 0.0, 0.0
    memory, chunks = geo.config.memory, len(geo.schedule.chunks)
    reads = (4 + chunks) * geo.residual_bytes  # each chunk is projected from the input
    outputs = 2 * geo.output_bytes
    on_host = memory.cpu_offloading_num_layers / geo.num_layers
    moved, waited_for = on_host * reads, on_host * outputs
    if memory.park_during_attention:
        moved = reads * (1 + chunks / (4 + chunks)) + 2 * geo.residual_bytes
        waited_for = 2 * outputs
    rate = machine.gpu.pcie_gb_per_second * _GIGA
    return moved / rate, waited_for / rate


def _forward_share(geo: Geometry) -> float:
    """Of a layer's time."""
    return 1 / flops.attention_units(geo.config.memory, geo.num_layers)


def _gradient_sum_seconds(geo: Geometry, machine: Machine) -> tuple[float, float]:
    """One average layer's, and those of the output matrix in one micro-batch.

    A tile's gradients are written and read in the model's dtype, and added to fp32 sums, which are
    read and written; a chunk of the loss adds its product to the sums at once.
    """
    units, rate = ShardedWeights.of(geo).units, machine.gpu.memory_gb_per_second * _GIGA
    num_chunks = -(-geo.residual_tokens // geo.loss_tokens)
    output = units.embedding if units.is_tied else units.output
    in_loss = (8 * output.trained_numel * num_chunks if num_chunks > 1 else 0) / rate
    if not geo.is_streamed or geo.num_tiles == 1:
        return 0.0, in_loss
    trained = sum(layer.whole.trained_numel for layer in units.layers) / geo.num_layers
    return (2 * geo.itemsize + 8) * trained * geo.num_tiles / rate, in_loss


def _sharding_seconds(geo: Geometry, machine: Machine) -> tuple[float, float]:
    """One layer's gathers of weights and reduction of its gradient, and the optimizer's step."""
    weights, gpu = ShardedWeights.of(geo), machine.gpu
    numel, link_rate = weights.units.numel, _link_rate(machine, geo.world_size)
    gathers, reduced = 0.0, 0.0
    if weights.is_full:
        # Weights are gathered for forward and again for backward; gradients are reduced in fp32,
        # layer by layer, during backward.
        received = weights.units.layer.numel * (1 - 1 / geo.num_sharding)
        trained = weights.units.trained_numel / numel
        gathers = received * (2 * geo.itemsize + 4 * trained) / link_rate
    elif geo.num_sharding > 1:
        reduced = 6.0 * weights.units.trained_numel  # whole gradients, after the backward
    is_sharded = weights.is_full or geo.config.optimization.use_distributed_optimizer
    rows = weights.units.trained_numel / (geo.num_sharding if is_sharded else 1)
    rate = gpu.pcie_gb_per_second if weights.is_on_host else gpu.memory_gb_per_second
    # 28 bytes per element: weight, both moments read and written, gradient read.
    return gathers, 28 * rows / (rate * _GIGA) + reduced / link_rate


def _link_rate(machine: Machine, num_ranks: int) -> float:
    """Bytes per second from one GPU to the others of a group of neighboring ranks."""
    gpu = machine.gpu
    is_in_node = num_ranks <= machine.gpus_per_node
    return _GIGA * (gpu.nvlink_gb_per_second if is_in_node else gpu.network_gb_per_second)
