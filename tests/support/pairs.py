"""Few cases that hold every pair of values of several factors, and the flags of common factors."""

import itertools
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

Case = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]


def product(
    factors: Mapping[str, Sequence[Any]], is_valid: Callable[[Case], bool]
) -> list[dict[str, int]]:
    """Every valid combination, as indices into the factors' values."""
    combinations = itertools.product(*(range(len(values)) for values in factors.values()))
    indexed = (dict(zip(factors, each, strict=True)) for each in combinations)
    return [each for each in indexed if is_valid(values_of(each, factors))]


def all_pairs(
    factors: Mapping[str, Sequence[Any]], is_valid: Callable[[Case], bool], *, tries: int = 60
) -> list[Case]:
    """Valid combinations that together hold every pair that any valid combination has.

    Greedy: of some random combinations the one with most pairs that are still missing.
    """
    valid, draw = product(factors, is_valid), random.Random(0)
    missing = set(itertools.chain.from_iterable(map(pairs_of, valid)))
    cases = []
    while missing:
        wanted = draw.choice(sorted(missing))
        holding = [each for each in valid if wanted in pairs_of(each)]
        some = draw.sample(holding, min(tries, len(holding)))
        best = max(some, key=lambda each: len(missing.intersection(pairs_of(each))))
        missing.difference_update(pairs_of(best))
        cases.append(values_of(best, factors))
    return cases


def mostly_slow(cases: Sequence[Case], every: int = 4) -> list:
    """Parameters of a test: ordinary are some of the cases, and the others are marked slow."""
    slow = pytest.mark.slow
    return [
        pytest.param(case, marks=[slow] if number % every else [])
        for number, case in enumerate(cases)
    ]


def pairs_of(indices: Mapping[str, int]) -> list[Pair]:
    """The pairs of values in one combination."""
    return list(itertools.combinations(sorted(indices.items()), 2))


def values_of(indices: Mapping[str, int], factors: Mapping[str, Sequence[Any]]) -> Case:
    """The values themselves."""
    return {name: factors[name][index] for name, index in indices.items()}


def memory_flags(case: Case) -> dict[str, Any]:
    """Flags of the factors recompute, kept, host_layers, disk, park, tile, sharding and tensor."""
    flags = {
        "tensor_model_parallel_size": case["tensor"],
        "sequence_parallel": case["tensor"] > 1 or None,
        "sequence_tile_size": case["tile"],
        "park_during_attention": case["park"] or None,
    }
    if case["recompute"]:
        kind, every = case["recompute"]
        flags |= {"recompute_granularity": kind, "recompute_method": "uniform"}
        flags["attention_output_layers"] = case.get("kept")
        flags |= {"recompute_num_layers": every, "cpu_offloading_num_layers": case["host_layers"]}
        # Its files have no names: nothing is left there.
        flags["activation_disk"] = tempfile.gettempdir() if case["disk"] else None
    if case["sharding"]:
        flags[case["sharding"]] = True
    return flags
