"""One training step of the same small Llama in each system that ``peers.py`` compares.

    python -m benchmarks.peer_systems SYSTEM SHAPE FOLDER RANKS RANK

runs as one rank: a step for each line of stdin, answered by a line of JSON.

All but this project run transformers' Llama under its gradient checkpointing. They replace its
attention, and DeepSpeed also its MLP and its loss. A system's packages are imported when it is
built, so one that is missing or does not run on this machine fails alone.
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

aten = torch.ops.aten
LossOf = Callable[[Tensor, Tensor], Tensor]
"""tokens, labels int64 [1, n] of this rank -> this rank's part of the mean loss, fp32 []."""

Measured = dict[str, Any]
"""Of one system at one length: "loss", "memory_mib", "wall" and "cpu", or "error"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The model and the sequence; every system gets the same."""

    seq_length: int
    num_layers: int = 4
    hidden_size: int = 512
    ffn_hidden_size: int = 1536
    num_attention_heads: int = 8
    num_query_groups: int = 2
    vocab_size: int = 4096
    tile_size: int = 2048
    """Tokens per tile: ours, and the least that DeepSpeed's tiled MLP and loss take at a time."""

    def llama(self) -> "LlamaForCausalLM":
        """Transformers' model with the weights that all systems start from, fp32."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            num_hidden_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_query_groups,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.seq_length,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
        return LlamaForCausalLM(config)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Tokens and labels of the whole sequence, int64 [1, s] each."""
        generator = torch.Generator().manual_seed(1)
        text = torch.randint(self.vocab_size, (1, self.seq_length + 1), generator=generator)
        return text[:, :-1], text[:, 1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A system on this rank."""

    parameters: list[nn.Parameter]
    loss: LossOf
    shard: Callable[[Tensor], Tensor]
    """[1, s] -> this rank's [1, n]."""


def ours(shape: Shape, granularity: str, heads_per_chunk: int | str | None = None) -> System:
    """This project: streamed layers; ``heads_per_chunk`` None is one query head per rank."""
    from megatron_untied import platform  # noqa: F401, I001  before megatron.core
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_untied.config import MemoryConfig, ModelConfig, ParallelConfig, Precision
    from megatron_untied.hf.names import hf_layouts
    from megatron_untied.model import build_model
    from megatron_untied.sharding.tensor_slice import TensorSlice

    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    model_parallel_cuda_manual_seed(1)
    llama = shape.llama()
    config = ModelConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.hidden_size // shape.num_attention_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.seq_length,
        norm_epsilon=llama.config.rms_norm_eps,
    )
    memory = MemoryConfig(
        recompute_granularity=granularity,
        sequence_tile_size=shape.tile_size,
        loss_chunk_size=shape.tile_size,
    )
    parallel = ParallelConfig(context_parallel_size=size, heads_per_chunk=heads_per_chunk or size)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = build_model(config, parallel, memory, Precision(), groups)
    own, theirs = dict(model.named_parameters()), llama.state_dict()
    with torch.no_grad():
        for name, layout in hf_layouts(config).items():
            for part in layout.global_slices(theirs[name]):
                place = TensorSlice(part.offsets, tuple(part.tensor.shape))
                place.view(own[layout.name]).copy_(part.tensor)
    layout = model.attention_context.layout

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        weights = torch.full(tokens.shape, 1.0 / shape.seq_length)
        return model(tokens=tokens, labels=labels, token_weights=weights)

    return System(parameters=list(own.values()), loss=loss, shard=layout.shard)


def transformers(shape: Shape) -> System:
    """Transformers with gradient checkpointing; the whole sequence on one rank."""
    return _checkpointed(shape, shape.llama(), torch.arange(shape.seq_length), nn.Identity())


def yunchang(shape: Shape) -> System:
    """Yunchang's Ulysses attention around torch's kernel.

    The kernels of yunchang's own list need a GPU; ``attn_fn`` is where a module keeps its choice.
    """
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    ulysses = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_MATH)

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, **_
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    ulysses.attn_fn = kernel
    llama = _with_attention(shape, lambda q, k, v: ulysses(q, k, v, causal=True))
    return _checkpointed(shape, llama, *_consecutive(shape))


def torch_ring(shape: Shape) -> System:
    """The ring of torch's context parallelism, balanced, with torch's kernel for CPUs.

    The public entry point has no entry for the CPU kernel, so the ring is called below it.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    rank, size = dist.get_rank(), dist.get_world_size()
    both = dist.group.WORLD, 2

    class RingAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            forward = aten._scaled_dot_product_flash_attention_for_cpu
            out, lse = ring._templated_ring_attention(*both, forward, q, k, v, is_causal=True)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, d_out: Tensor):
            q, k, v, out, lse = ctx.saved_tensors

            def backward(query, key, value, grad_out, out, logsumexp, is_causal):
                return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad_out, query, key, value, out, logsumexp, 0.0, is_causal
                )

            return ring._templated_ring_attention_backward(
                *both, backward, d_out, "grad_out", q, k, v, out, lse, is_causal=True
            )

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # As torch's own entry does on a CPU, key-value heads are repeated for the kernel.
        repeats = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
        return RingAttention.apply(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    pieces = torch.arange(shape.seq_length).chunk(2 * size)
    positions = torch.cat([pieces[rank], pieces[-1 - rank]])
    llama = _with_attention(shape, attention)
    return _checkpointed(shape, llama, positions, lambda x: x[:, positions])


def alst(shape: Shape) -> System:
    """DeepSpeed's ALST: Ulysses attention, tiled MLP and tiled loss."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    deepspeed.init_distributed(dist_backend="gloo")
    llama, size = shape.llama(), dist.get_world_size()
    ulysses_sp.UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=llama,
        core_attn_implementation="sdpa",
        sequence_parallel_size=size,
        micro_batch_size=1,
        seq_length=shape.seq_length,
        seq_length_is_variable=False,
    )
    positions, shard = _consecutive(shape)
    n = shape.seq_length // size
    # The tiles of DeepSpeed's own integration: as many tokens as the model is wide.
    mlp_tiles = math.ceil(n / max(shape.hidden_size, shape.tile_size))
    loss_tiles = math.ceil(n / shape.tile_size)

    def tile(mlp: nn.Module, x: Tensor) -> Tensor:
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

    for layer in llama.model.layers:
        parameters = list(layer.mlp.parameters())
        layer.mlp.forward = lambda x, mlp=layer.mlp, parameters=parameters: (
            ulysses_sp.TiledMLP.apply(tile, mlp, x, mlp_tiles, parameters)
        )

    def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
        head = llama.lm_head
        return ulysses_sp.TiledFusedLogitsLoss.apply(
            lambda head, x, y: F.cross_entropy(head(x), y, reduction="sum") / shape.seq_length,
            head, hidden, labels, None, loss_tiles, [head.weight], "sum",
        )  # fmt: skip

    return _checkpointed(shape, llama, positions, shard, loss_of)


SYSTEMS: dict[str, Callable[[Shape], System]] = {
    "ours, selective": lambda shape: ours(shape, "selective"),
    "ours, selective, one exchange": lambda shape: ours(shape, "selective", "all"),
    "ours, full": lambda shape: ours(shape, "full"),
    "DeepSpeed ALST": alst,
    "yunchang Ulysses": yunchang,
    "torch context parallel": torch_ring,
    "transformers, one rank": transformers,
}
ONE_RANK = ("transformers, one rank",)
"""Run on one rank with the threads of all."""


def _consecutive(shape: Shape) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Positions of this rank's tokens [n], and its part of [1, s]: ranks hold them in order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return torch.arange(shape.seq_length).chunk(size)[rank], lambda x: x.chunk(size, 1)[rank]


def _with_attention(
    shape: Shape, attention: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> "LlamaForCausalLM":
    """Transformers' Llama with ``attention`` of q [1, n, h, d] and k, v [1, n, g, d]."""
    from transformers import AttentionInterface

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask, **unused):
        return attention(*(x.transpose(1, 2) for x in (q, k, v))), None

    AttentionInterface.register("compared", attend)
    llama = shape.llama()
    llama.set_attn_implementation("compared")
    return llama


def _checkpointed(
    shape: Shape,
    llama: "LlamaForCausalLM",
    positions: Tensor,
    shard: Callable[[Tensor], Tensor],
    loss_of: LossOf | None = None,
) -> System:
    """``positions`` int64 [n]; ``loss_of`` hidden states [1, n, m] and labels, None from logits."""
    llama.gradient_checkpointing_enable({"use_reentrant": False})
    llama.train()

    def from_logits(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = llama.lm_head(hidden)[0]  # [n, v]
        return F.cross_entropy(logits, labels[0], reduction="sum") / shape.seq_length

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = llama.model(input_ids=tokens, position_ids=positions[None]).last_hidden_state
        return (loss_of or from_logits)(hidden, labels)

    return System(parameters=list(llama.parameters()), loss=loss, shard=shard)


def _step(system: System, shape: Shape) -> Callable[[], float]:
    """A training step; returns the loss over all ranks."""
    optimizer = torch.optim.AdamW(system.parameters, lr=1e-3)
    tokens, labels = map(system.shard, shape.batch())

    def step() -> float:
        loss = system.loss(tokens, labels)
        loss.backward()
        for parameter in system.parameters:
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item()

    return step


def _measured(step: Callable[[], float]) -> Measured:
    """One step on this rank: loss, seconds, and the memory that it needed beyond what was there."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, cpu = _status_mib("VmRSS"), resource.getrusage(resource.RUSAGE_SELF)
    dist.barrier()
    start = time.perf_counter()
    loss = step()
    dist.barrier()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
    memory = _status_mib("VmHWM") - before
    return {"loss": loss, "wall": wall, "cpu": used, "memory_mib": memory}


def _status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    """Serve until stdin ends."""
    name, fields, folder, size, rank = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    store = dist.FileStore(f"{folder}/store", int(size))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(size))
    shape = Shape(**json.loads(fields))
    step = _step(SYSTEMS[name](shape), shape)
    print(json.dumps("ready"), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(_measured(step)), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
