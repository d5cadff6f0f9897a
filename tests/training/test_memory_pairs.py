"""Whatever a step keeps, recomputes, moves or shards: the same losses and gradient norms.

A generated design has every pair of values of the memory features. Some of its cases are ordinary
tests, the others and the full product are slow.
"""

import pytest

from megatron_untied.training.metrics import read_metrics
from tests.support.pairs import all_pairs, memory_flags, mostly_slow, product, values_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import train

LAYERS = 4
ITERATIONS = 3  # the third follows from two updates
FACTORS = {
    "recompute": [None, *((kind, k) for kind in ("full", "selective") for k in (1, 2, 3))],
    "kept": [None, 0, 1, 3],
    "host_layers": [0, 2, LAYERS],
    "disk": [False, True],
    "park": [False, True],
    "tile": [None, 24, 7],
    "loss_chunk": [1, 13, None],
    "sharding": [None, "use_distributed_optimizer", "use_torch_fsdp2"],
    "context": [1, 2, 4],
    "tensor": [1, 2],
    "heads": ["all", "fewest"],
}


def is_valid(case: dict) -> bool:
    """At most four ranks; without recomputation nothing is offloaded, parked or tiled.

    Only ``selective`` keeps attention outputs.
    """
    plain = case["host_layers"] == 0 and not case["park"] and case["tile"] is None
    if case["disk"] and case["host_layers"] < LAYERS:  # of fewer, none are on the disk
        return False
    if case["kept"] is not None and (case["recompute"] or "f")[0] != "selective":
        return False
    return case["context"] * case["tensor"] <= 4 and (case["recompute"] is not None or plain)


def flags_of(case: dict) -> dict:
    return {
        "num_layers": LAYERS,
        "train_iters": ITERATIONS,
        "context_parallel_size": case["context"],
        "cp_heads_per_chunk": "all" if case["heads"] == "all" else case["context"],
        "loss_chunk_size": case["loss_chunk"],
        **memory_flags(case),
    }


def curve(folder, case: dict | None, **changes) -> list[dict]:
    """Metrics of three iterations on as many ranks as the case needs; two where it shards."""
    flags = {"num_layers": LAYERS, "train_iters": ITERATIONS} if case is None else flags_of(case)
    ranks = 1 if case is None else case["context"] * case["tensor"]
    if case and case["sharding"]:
        ranks = max(ranks, 2)
    path = folder / "metrics.jsonl"
    run_on_ranks(train, ranks, path, **flags, **changes)
    return read_metrics(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return curve(tmp_path_factory.mktemp("plain"), None)


@pytest.fixture(scope="module")
def plain_bf16(tmp_path_factory):
    return curve(tmp_path_factory.mktemp("plain"), None, bf16=True)


def assert_same(got: list[dict], expected: list[dict], loss: float, norm: float) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=loss)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=norm)


def name(case: dict) -> str:
    return "-".join(str(value) for value in case.values()).replace(" ", "")


CASES = all_pairs(FACTORS, is_valid)


def test_the_design_holds_every_pair():
    held = {(f, str(c[f]), g, str(c[g])) for c in CASES for f in c for g in c}
    for combination in product(FACTORS, is_valid):
        case = values_of(combination, FACTORS)
        assert held >= {(f, str(case[f]), g, str(case[g])) for f in case for g in case}


@pytest.mark.parametrize("case", mostly_slow(CASES), ids=name)
def test_every_pair_of_features_trains_alike(case, plain, tmp_path):
    # The order of sums differs; Adam turns that into whole steps where a gradient is nearly zero.
    assert_same(curve(tmp_path, case), plain, loss=1e-6, norm=1e-5)


@pytest.mark.parametrize("case", mostly_slow(CASES[:6]), ids=name)
def test_bf16_trains_alike_within_its_rounding(case, plain_bf16, tmp_path):
    # Activations carry 8 bits, and tiles, chunks and ranks round at other places.
    assert_same(curve(tmp_path, case, bf16=True), plain_bf16, loss=1e-3, norm=2e-2)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("recompute", FACTORS["recompute"], ids=str)
def test_the_full_product_trains_alike(recompute, plain, tmp_path):
    factors = FACTORS | {"recompute": [recompute]}
    for combination in product(factors, is_valid):
        assert_same(curve(tmp_path, values_of(combination, factors)), plain, loss=1e-6, norm=1e-5)
