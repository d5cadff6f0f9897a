"""Parsers of the values of single flags.

Each error is one line with the value, the constraint and, where there is one, a valid value.
"""

import argparse
import difflib
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from megatron_untied.presets import preset_names

LARGEST = 2**31 - 1
"""Largest integer, unless a flag has another limit: products of two still fit in 64 bits."""


def text(value: str) -> str:
    """Parse text that is not empty: an unset shell variable must not disable a flag."""
    if not value.strip():
        raise argparse.ArgumentTypeError(f"{value!r} is empty; give a value or leave out the flag")
    return value


def integer(minimum: int, maximum: int = LARGEST) -> Callable[[str], int]:
    """A parser of integers from ``minimum`` to ``maximum``."""
    return _number(int, minimum, maximum)


def real(minimum: float, maximum: float) -> Callable[[str], float]:
    """A parser of numbers from ``minimum`` to ``maximum``."""
    return _number(float, minimum, maximum)


def _number(kind: type, minimum: float, maximum: float) -> Callable[[str], Any]:
    noun = "an integer" if kind is int else "a number"

    def parse(value: str) -> Any:
        try:
            number = kind(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{value!r} is not {noun}") from None
        if not number >= minimum:  # negated, so that nan is refused too
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}, the smallest value")
        if number > maximum:
            raise argparse.ArgumentTypeError(f"{value} is above {maximum}, the largest value")
        return number

    return parse


def tokens(value: str) -> int:
    """Parse a number of tokens: 1048576, or 1Mi, 1024Ki.

    128K and 1M are refused: some read them as powers of 1000, others as powers of 1024.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG])(i?)", value.strip(), re.IGNORECASE)
    if match is None:
        return count(value)
    digits, unit, binary = match[1], match[2].upper(), match[3]
    exponent = "KMG".index(unit) + 1
    # Exact fractions: 1.1Ki is not a whole number of tokens and must not be rounded silently.
    power_of_two, power_of_ten = (Fraction(digits) * base**exponent for base in (1024, 1000))
    if not binary:
        raise argparse.ArgumentTypeError(
            f"{value!r} is ambiguous; give {digits}{unit}i for {int(power_of_two)} tokens, or "
            f"{int(power_of_ten)}"
        )
    if power_of_two.denominator != 1:
        raise argparse.ArgumentTypeError(
            f"{value!r} is not a whole number of tokens; use {int(power_of_two)}"
        )
    return count(str(power_of_two))


def folders(value: str) -> tuple[str, ...]:
    """Parse DIR[,DIR...]."""
    found = tuple(folder.strip() for folder in value.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{value!r} has an empty folder; give DIR or DIR,DIR")
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{value!r} has a folder twice; give each disk once")
    return found


def all_or(number: Callable[[str], Any], *words: str) -> Callable[[str], Any]:
    """A parser of one of ``words``, or of what ``number`` parses."""

    def parse(value: str) -> Any:
        if value in words:
            return value
        try:
            return number(value)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}; or give {' or '.join(words)}") from None

    return parse


def preset(value: str) -> str:
    """Parse the name of a published architecture."""
    names = preset_names()
    if value in names:
        return value
    close = difflib.get_close_matches(value.lower(), names, n=1)  # all names are lower case
    hint = f"; did you mean {close[0]}?" if close else ""
    raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(names)}{hint}")


def window(value: str) -> int | None:
    """Parse Megatron's LEFT,RIGHT: numbers of tokens before and after a query that it attends to.

    RIGHT must be 0, as attention is causal.

    Returns:
        Tokens that a query attends to, including itself; None for LEFT -1, no limit.
    """
    left, _, right = value.strip("()").partition(",")
    if right.strip() != "0":
        raise argparse.ArgumentTypeError(
            f"{value!r} is not LEFT,0: a query attends to LEFT tokens before it, none after it"
        )
    # -1 is Megatron's word for no limit, and no number of tokens.
    has_unit = left.strip()[-1:].isalpha() and left.strip()[:1].isdigit()
    return (tokens(left) if has_unit else integer(-1, LARGEST - 1)(left)) + 1 or None


count, index, amount = integer(1), integer(0), real(0.0, 1e15)
