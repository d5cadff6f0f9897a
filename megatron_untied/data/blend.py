"""Parses ``--data-path`` and ``--split``."""

import math
import re
from dataclasses import dataclass

SPLIT_NAMES = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class Blend:
    """Token files, and the proportions in which several are mixed."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    """Shares of the samples; None reads each file once, mixed in proportion to its length."""


def parse_blend(data_path: tuple[str, ...]) -> Blend:
    """The blend that ``PREFIX [PREFIX ...]`` or ``WEIGHT PREFIX [WEIGHT PREFIX ...]`` names.

    Raises:
        ValueError: where weights and prefixes do not alternate, or a weight is not positive.
    """
    numbers = [_number(word) for word in data_path]
    if all(number is None for number in numbers):
        return Blend(prefixes=data_path, weights=None)
    for position, (word, number) in enumerate(zip(data_path, numbers, strict=True)):
        if position % 2 == 0 and not (number and 0 < number < math.inf):  # refuses nan too
            raise ValueError(
                f"--data-path: {word!r} stands where a weight is expected and is not a positive "
                "number; write --data-path 0.7 PREFIX 0.3 PREFIX, or prefixes alone"
            )
        if position % 2 == 1 and number is not None:
            raise ValueError(f"--data-path: {word!r} stands where a prefix is expected")
    if len(data_path) % 2:
        raise ValueError(f"--data-path: no prefix follows the last weight, {data_path[-1]}")
    prefixes = data_path[1::2]
    # A single file is the whole blend, whatever its weight.
    return Blend(prefixes=prefixes, weights=tuple(numbers[::2]) if len(prefixes) > 1 else None)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def check_split(split: str) -> None:
    """Check that megatron-core can parse ``split``: it ignores the parts that it cannot.

    Raises:
        ValueError: if it is not one to three plain numbers of which one is positive.
    """
    shares = split.split(",")
    plain = all(re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", share) for share in shares)
    if not plain or len(shares) > len(SPLIT_NAMES) or not any(map(float, shares)):
        raise ValueError(
            f"--split {split!r} is not up to three shares (training, validation, test); "
            "write for example --split 98,2,0"
        )
