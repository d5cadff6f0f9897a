"""Packed documents and windows through whole models, standard and streamed, on real ranks.

A document in a packed sequence is the same as that document alone: the expected values come from
the standard model on one rank, a document at a time.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_untied.config import MemoryConfig, ParallelConfig, RotaryConfig
from megatron_untied.context_parallel.sequence import SequenceInfo, documents_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import batch, make_model, parallel_groups, tiny

LENGTHS = ((1, 3, 17, 3), (24,), (5, 1, 1, 11, 6))
"""Of the documents of each sample: a document across every shard boundary, and none."""
S = sum(LENGTHS[0])
# The same sums in another order, in fp32.
TOLERANCE = 5e-6

STANDARD = MemoryConfig()
MEMORIES = {
    "standard": STANDARD,
    "full": MemoryConfig(recompute_granularity="full", sequence_tile_size=5),
    "selective, groups on the host": MemoryConfig(
        recompute_granularity="selective",
        recompute_num_layers=2,
        cpu_offloading_num_layers=3,
        park_during_attention=True,
        sequence_tile_size=7,
    ),
    "full in groups": MemoryConfig(recompute_granularity="full", recompute_num_layers=3),
}
ULYSSES = {
    "1 rank": ParallelConfig(),
    "Ulysses 2": ParallelConfig(context_parallel_size=2, heads_per_chunk=2),
    "Ulysses 4": ParallelConfig(context_parallel_size=4, heads_per_chunk=4),
}
RINGS = {
    "ring 4": ParallelConfig(context_parallel_size=4, cp_comm_type="p2p", heads_per_chunk=3),
    "ring 2 of Ulysses 2": ParallelConfig(
        context_parallel_size=4,
        cp_comm_type="a2a+p2p",
        hierarchical_context_parallel_sizes=(2, 2),
        heads_per_chunk=2,
    ),
}
PARALLEL = ULYSSES | RINGS
TENSOR = ParallelConfig(
    context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True
)


def packed_positions() -> torch.Tensor:
    """[b, s]: positions that restart at every document."""
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS])


def sequence_of(layout) -> SequenceInfo:
    positions = packed_positions()
    return SequenceInfo(positions=layout.shard(positions), documents=documents_of(positions))


def layout_of(model):
    return model.decoder.layers[0].self_attention.context.layout


def gradients_of(model, group=None) -> dict[str, torch.Tensor]:
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=group)
    return gradients


def document_by_document(config, data):
    """Loss and gradients of the plain model, the same on every rank."""
    parallel_groups(ParallelConfig())
    model, loss = make_model(config), torch.zeros(())
    for sample, lengths in enumerate(LENGTHS):
        parts = [x[sample : sample + 1].split(lengths, 1) for x in data.values()]
        for document in zip(*parts, strict=True):
            loss = loss + model(**dict(zip(data, document, strict=True)))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return loss.detach(), gradients


def check_packed(group, parallel, names):
    config = tiny(num_layers=3, num_query_groups=2)
    data = batch(config, S, len(LENGTHS))
    expected_loss, expected = document_by_document(config, data)
    groups = parallel_groups(parallel)
    for name in names:
        model = make_model(config, parallel, MEMORIES[name], groups=groups)
        layout = layout_of(model)
        shard = {key: layout.shard(x) for key, x in data.items()}
        loss = model(**shard, sequence=sequence_of(layout))
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=groups.cp)
        torch.testing.assert_close(total, expected_loss, rtol=1e-6, atol=0)
        for parameter, gradient in gradients_of(model, groups.cp).items():
            e = expected[parameter]
            error = (gradient - e).abs().max() / e.abs().max()
            assert error < TOLERANCE, f"{name}, {parameter}: {error:.1e}"


def run_with(check, parallel, *args):
    run_on_ranks(check, parallel.context_parallel_size, parallel, *args)


@pytest.mark.parametrize("name", PARALLEL)
def test_packed_documents_are_documents_alone(name):
    run_with(check_packed, PARALLEL[name], list(MEMORIES))


def check_logits_are_those_of_one_rank(group, parallel, config):
    tokens = batch(config, S, len(LENGTHS))["tokens"]
    parallel_groups(ParallelConfig())
    plain = make_model(config)
    with torch.no_grad():
        expected = plain(tokens, sequence=sequence_of(layout_of(plain)))
    groups = parallel_groups(parallel)
    for name in ("standard", "full"):
        model = make_model(config, parallel, MEMORIES[name], groups=groups)
        layout = layout_of(model)
        with torch.no_grad():
            logits = model(layout.shard(tokens), sequence=sequence_of(layout))
        mine = expected.chunk(groups.tp.size(), -1)[groups.tp.rank()]
        torch.testing.assert_close(logits, layout.shard(mine, dim=1), rtol=1e-4, atol=1e-4)


def test_packed_documents_and_a_window_under_tensor_and_sequence_parallelism():
    run_on_ranks(
        check_logits_are_those_of_one_rank, 4, TENSOR, tiny(num_query_groups=2, window_size=3)
    )


@torch.no_grad()
def check_positions(group, parallel):
    """Twice the positions at half the frequencies are the same angles, bit for bit."""
    half = RotaryConfig(scaling="linear", scaling_factor=2.0)
    groups, tokens = parallel_groups(parallel), batch(tiny(), S, len(LENGTHS))["tokens"]
    for name in ("standard", "full"):
        plain, halved = (
            make_model(config, parallel, MEMORIES[name], groups=groups)
            for config in (tiny(), tiny(rotary=half))
        )
        shard = layout_of(plain).shard(tokens)
        own = layout_of(plain).positions(shard.shape[1]).expand_as(shard)
        restarting = layout_of(plain).shard(packed_positions())
        logits = [plain(shard), plain(shard, sequence=SequenceInfo(positions=restarting))]
        assert not torch.equal(*logits)
        for positions, expected in zip((own, restarting), logits, strict=True):
            found = halved(shard, sequence=SequenceInfo(positions=2 * positions))
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("name", PARALLEL)
def test_tokens_are_rotated_to_the_positions_given(name):
    run_with(check_positions, PARALLEL[name])


@torch.no_grad()
def check_perturbations(group, parallel, config, packed, changed, reach):
    """Changing token ``changed`` of every sample changes logits of ``reach(sample)`` alone."""
    groups = parallel_groups(parallel)
    tokens = batch(config, S, len(LENGTHS))["tokens"]
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % config.vocab_size
    for name in ("standard", "full"):
        model = make_model(config, parallel, MEMORIES[name], groups=groups)
        layout = layout_of(model)
        sequence = sequence_of(layout) if packed else None
        logits, others = (model(layout.shard(x), sequence=sequence) for x in (tokens, other))
        differs = (logits != others).any(-1)
        expected = torch.zeros(tokens.shape, dtype=torch.bool)
        for sample in range(len(LENGTHS)):
            expected[sample, list(reach(sample))] = True
        assert torch.equal(differs, layout.shard(expected)), name


def rest_of_document(sample: int, changed: int) -> range:
    stops = torch.tensor(LENGTHS[sample]).cumsum(0).tolist()
    return range(changed, next(stop for stop in stops if stop > changed))


class Reach:
    """Logits that a token may change: in its document from itself on, or in a window."""

    def __init__(self, changed: int, window: int | None = None):
        self.changed, self.window = changed, window

    def __call__(self, sample: int) -> range:
        if self.window is None:
            return rest_of_document(sample, self.changed)
        return range(self.changed, min(self.changed + self.window, S))


@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.parametrize("changed", [0, 3, 12, 23])
def test_a_token_changes_nothing_before_it_and_in_no_other_document(name, changed):
    run_with(check_perturbations, PARALLEL[name], tiny(), True, changed, Reach(changed))


@pytest.mark.parametrize("name", ULYSSES)
@pytest.mark.parametrize("window", [1, 5])
def test_a_token_reaches_as_far_as_the_window(name, window):
    config = tiny(num_layers=1, window_size=window)
    run_with(check_perturbations, ULYSSES[name], config, False, 4, Reach(4, window))
