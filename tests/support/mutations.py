"""Files that are damaged or edited at random, and what a reader makes of each.

A file of JSON is edited as a tree half of the time, so that what is beyond its parser is met too.
"""

import contextlib
import copy
import json
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 60.0
"""A reader that takes longer for one of these small files hangs."""
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)
"""What ``errors_in_one_line`` turns into the one line of a user's mistake."""
ODD_VALUES = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e308, 1e-320,
    float("inf"), float("nan"), "", "a", "0", "../../outside", "/etc/passwd", "\ud800", "\0",
    "{{ 1 }}", "a\nb", [], {}, [[]], [None], {"": None}, {"a": {"b": [1, "x"]}},
)  # fmt: skip
ODD_NUMBERS = (0, 1, -1, 127, 128, 255, 2**15, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, -(2**63))
Files = Mapping[str, bytes]


class Fault(AssertionError):
    """A reader neither refused a file in one line nor gave the right result."""


def mutate(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """``data`` changed in one to three places, and how."""
    changes = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        kind = draw.choice(list(BYTE_CHANGES))
        at = draw.randrange(len(data) + 1)
        data = BYTE_CHANGES[kind](data, at, draw)
        changes.append(f"{kind} at {at}")
    return data, ", ".join(changes)


def _flip(data: bytes, at: int, draw: random.Random) -> bytes:
    at = min(at, max(0, len(data) - 1))
    return (
        data[:at]
        + bytes(byte ^ (1 << draw.randrange(8)) for byte in data[at : at + 1])
        + data[at + 1 :]
    )


def _number(data: bytes, at: int, draw: random.Random) -> bytes:
    width = draw.choice((1, 2, 4, 8))
    value = draw.choice(ODD_NUMBERS) % 256**width
    at -= at % width
    return data[:at] + value.to_bytes(width, "little") + data[at + width :]


BYTE_CHANGES: dict[str, Callable[[bytes, int, random.Random], bytes]] = {
    "flip": _flip,
    "number": _number,
    "byte": lambda data, at, draw: data[:at] + draw.randbytes(1) + data[at + 1 :],
    "insert": lambda data, at, draw: data[:at] + draw.randbytes(draw.randint(1, 9)) + data[at:],
    "remove": lambda data, at, draw: data[:at] + data[at + draw.randint(1, 40) :],
    "repeat": lambda data, at, draw: data[: at + draw.randint(1, 40)] + data[at:],
    "zero": lambda data, at, draw: data[:at] + bytes(len(data[at : at + 16])) + data[at + 16 :],
    "cut": lambda data, at, draw: data[:at],
    "text": lambda data, at, draw: (
        data[:at] + draw.choice((b"\n", b"{", b'"', b"\\u", b"[[", b"NaN", b"-", b"\xef\xbb\xbf"))
        + data[at:]
    ),
}  # fmt: skip


def mutate_json(text: bytes, draw: random.Random) -> tuple[bytes, str]:
    """JSON with one or two of its values replaced, removed, renamed, doubled or nested."""
    tree, changes = [json.loads(text)], []
    for _ in range(draw.choice((1, 1, 2))):
        places = list(_places(tree))
        parent, key, path = draw.choice(places)
        kind = draw.choice(("value", "value", "value", "remove", "rename", "other", "nest"))
        if kind == "remove" and parent is not tree:
            del parent[key]
        elif kind == "rename" and isinstance(parent, dict):
            parent[draw.choice(("", "a", f"{key}_", "../x"))] = parent.pop(key)
        elif kind == "other":  # of another place: the right type with a wrong value, often
            other, theirs, _ = draw.choice(places)
            parent[key] = copy.deepcopy(other[theirs])
        elif kind == "nest":
            parent[key] = [parent[key]] if draw.random() < 0.5 else {"a": parent[key]}
        else:
            parent[key] = copy.deepcopy(draw.choice(ODD_VALUES))
        changes.append(f"{kind} at {path}")
    written = json.dumps(tree[0])
    if draw.random() < 0.02:  # deeper than any parser follows
        written = "[" * 100_000 + written
    return written.encode(), ", ".join(changes)


def _places(value: Any, path: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Every place in a tree: what holds it, its key or index, and the way to it."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key, f"{path}/{key}"
        if isinstance(inner, (dict, list)):
            yield from _places(inner, f"{path}/{key}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """What became of one file of a folder."""

    name: str
    how: str
    content: bytes | None
    """None removes it."""

    def __str__(self) -> str:
        return f"{self.name}: {self.how}"

    @classmethod
    def draw(cls, files: Files, names: Sequence[str], draw: random.Random) -> "Mutation":
        """Change one of the files ``names``."""
        name = draw.choice(names)
        data, chance = files[name], draw.random()
        if chance < 0.02:
            return cls(name=name, how="removed", content=None)
        if chance < 0.04:
            other = draw.choice(sorted(files))
            return cls(name=name, how=f"replaced by {other}", content=files[other])
        if name.endswith(".jsonl") and chance < 0.6:
            lines = data.splitlines(keepends=True)
            at = draw.randrange(len(lines))
            lines[at], how = mutate_json(lines[at], draw)
            return cls(name=name, how=f"line {at}, {how}", content=b"\n".join(lines))
        if name.endswith(".json") and chance < 0.6:
            content, how = mutate_json(data, draw)
            return cls(name=name, how=how, content=content)
        content, how = mutate(data, draw)
        return cls(name=name, how=how, content=content)


def write_files(folder: Path, files: Files, mutation: Mutation | None = None) -> None:
    """Write ``files`` into ``folder``, one of them as ``mutation`` has it."""
    for name, data in files.items():
        content = mutation.content if mutation and mutation.name == name else data
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content)


@contextlib.contextmanager
def within_seconds(seconds: float) -> Iterator[None]:
    """Raise a :class:`Fault` in the body after so long; code of libraries is left to finish."""

    def on_alarm(*_: object) -> None:
        raise Fault(f"no answer within {seconds} s")

    previous = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def refusal(read: Callable[[], None], names: Sequence[str], seconds: float = SECONDS) -> str | None:
    """The one line with which ``read`` refuses its input, or None if it accepts it.

    Raises:
        Fault: it raised an error that is no user's, or that is not one line with one of ``names``.
    """
    began = time.monotonic()
    try:
        with within_seconds(seconds):
            read()
    except Fault:
        raise
    except USER_ERRORS as error:
        said = str(error)
    except SystemExit as error:
        said = str(error.code)
    except BaseException as error:  # also what Rust panics with, which is no Exception
        raise Fault(f"{type(error).__name__}: {error}") from error
    else:
        return None
    if (
        time.monotonic() - began > seconds
    ):  # the alarm may have been taken for an error of a library
        raise Fault(f"no answer within {seconds} s")
    if "\n" in said or not said.isprintable() or len(said) > 3000:
        raise Fault(f"not one printable line: {said[:3000]!r}")
    if not any(name in said for name in names):
        raise Fault(f"the line names none of {', '.join(names)}: {said}")
    return said
