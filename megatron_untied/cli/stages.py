"""``--seq-length-schedule``: its grammar, and the stages of a run that follow from it.

    0:8192,200:65536:rotary-base=4e6,500:1048576:rotary-base=5e7

A stage has a start, a sequence length, and settings of the rotary embedding that hold from there
on. It starts after so many iterations; with the suffix ``tok``, as in 10Gitok, at the first
iteration with so many tokens before it.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_untied.cli.derived import replace_scaling, rotary_config
from megatron_untied.cli.flag_values import index, tokens
from megatron_untied.config.run import BatchConfig, RunConfig, Stage

EXAMPLE = "0:8192,200:65536:rotary-base=4e6"
SETTINGS = (
    "position-embedding-type",
    "rotary-base",
    "rotary-seq-len-interpolation-factor",
    "use-rope-scaling",
    "rope-scaling-factor",
    "yarn-rotary-scaling-factor",
    "yarn-original-max-position-embeddings",
    "yarn-beta-fast",
    "yarn-beta-slow",
    "yarn-mscale",
    "yarn-mscale-all-dim",
)
"""Flags, without their dashes, that a stage may set."""


@dataclass(frozen=True, slots=True)
class StageText:
    """One stage as it is written."""

    start: int
    in_tokens: bool
    """Whether ``start`` counts tokens, and not iterations."""
    seq_length: int
    words: tuple[str, ...]
    """The flags that it sets."""


def schedule(value: str) -> tuple[StageText, ...]:
    """Parse START:LENGTH[:NAME=VALUE ...],START:LENGTH ..."""
    stages = []
    for text in value.split(","):
        start, _, rest = text.strip().partition(":")
        length, *settings = rest.split(":")
        if not start or not length:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not START:LENGTH; write for example {EXAMPLE}"
            )
        for setting in settings:
            if (name := setting.partition("=")[0]) not in SETTINGS:
                raise argparse.ArgumentTypeError(
                    f"{text!r} sets {name!r}; a stage can set {', '.join(SETTINGS)}"
                )
        number = start.removesuffix("tok")
        in_tokens = number != start
        # 0 is no number of tokens for `tokens`, but it is where the first stage starts.
        first = tokens(number) if in_tokens and number != "0" else index(number)
        words = tuple(f"--{setting}" for setting in settings)
        stages.append(StageText(first, in_tokens, tokens(length), words))
    return tuple(stages)


def length_weights(value: str) -> tuple[tuple[int, float], ...]:
    """Parse LENGTH:WEIGHT,LENGTH:WEIGHT ..., lengths of documents in rising order."""
    found = []
    for text in value.split(","):
        length, _, weight = text.strip().partition(":")
        try:
            number = float(weight)
        except ValueError:
            number = -1.0
        if not 0 <= number <= 1e6:  # refuses nan too
            raise argparse.ArgumentTypeError(
                f"{text!r} is not LENGTH:WEIGHT with a weight from 0 to 1e6; write for example "
                "32768:4, or 0:0.5,32768:4"
            )
        found.append((index("0") if length == "0" else tokens(length), number))
    lengths = [length for length, _ in found]
    if lengths != sorted(set(lengths)):
        raise argparse.ArgumentTypeError(f"{value!r}: the lengths must rise")
    if not any(weight for _, weight in found) and lengths[0] == 0:
        raise argparse.ArgumentTypeError(f"{value!r} leaves no document; give a weight above 0")
    return tuple(found)


def with_lengths(given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with the sequence length of the first stage, and the longest as the maximum.

    Raises:
        ValueError: flags that a schedule excludes.
    """
    texts = values["seq_length_schedule"]
    if not texts:
        if "keep_batch_tokens" in given:
            raise ValueError(
                "--keep-batch-tokens has no effect without --seq-length-schedule; give both"
            )
        return dict(values)
    for name, remedy in (
        ("seq_length", "the schedule has the length of every stage"),
        ("sft", "chats are packed for one length, give --seq-length"),
    ):
        if name in given:
            raise ValueError(
                f"--{name.replace('_', '-')} cannot be given with --seq-length-schedule: {remedy}"
            )
    longest = max(text.seq_length for text in texts)
    return values | {
        "seq_length": texts[0].seq_length,
        "max_position_embeddings": values["max_position_embeddings"] or longest,
    }


def in_stages(
    config: RunConfig,
    given: Mapping[str, Any],
    texts: Sequence[StageText],
    *,
    keep_batch_tokens: bool,
    parse: Callable[[Sequence[str]], Mapping[str, Any]],
) -> RunConfig:
    """``config`` with the stages of ``texts``, in the first of them.

    Args:
        config: the run with the length of the first stage.
        given: its flags.
        texts: the schedule.
        keep_batch_tokens: change the number of samples so that tokens per iteration stay.
        parse: parses and checks flags that are given together.

    Raises:
        ValueError: with the stage, what is wrong with it, and a value that works.
    """
    stages: list[Stage] = []
    flags, rotary, before = dict(given), config.model.rotary, config.batch
    for number, text in enumerate(texts, start=1):
        where = f"--seq-length-schedule, stage {number}:"
        first = _first_iteration(text, stages, where)
        if text.words:
            try:
                flags = replace_scaling(flags, parse(text.words))
                rotary = rotary_config(flags, rotary)
            except ValueError as error:
                raise ValueError(f"{where} {error}") from error
        batch = replace(config.batch, seq_length=text.seq_length)
        if keep_batch_tokens:
            batch = _with_tokens_of(config.batch, batch, where)
        if stages and (batch, rotary) == (before, stages[-1].rotary):
            raise ValueError(f"{where} it changes nothing; leave it out")
        if first >= config.loop.train_iters:
            raise ValueError(
                f"{where} it starts after iteration {first}, and --train-iters is "
                f"{config.loop.train_iters}; leave it out, or give a larger --train-iters"
            )
        before = batch
        stages.append(
            Stage(
                first_iteration=first,
                batch=batch,
                rotary=rotary,
                heads_per_chunk=config.parallel.heads_per_chunk,
            )
        )
    return replace(config, stages=tuple(stages)).in_stage(0)


def _first_iteration(text: StageText, stages: Sequence[Stage], where: str) -> int:
    """Iterations before a stage that follows ``stages``."""
    if not stages:
        if text.start:
            raise ValueError(f"{where} it starts at {text.start}; the first stage starts at 0")
        return 0
    last = stages[-1]
    first = text.start
    if text.in_tokens:
        batches = zip(stages[:-1], stages[1:], strict=True)
        seen = sum((b.first_iteration - a.first_iteration) * a.batch.tokens for a, b in batches)
        first = last.first_iteration + -(-(text.start - seen) // last.batch.tokens)
    if first <= last.first_iteration:
        raise ValueError(
            f"{where} it starts after iteration {max(0, first)}, not after the stage before it, "
            f"which starts after iteration {last.first_iteration}; give larger starts in order"
        )
    return first


def _with_tokens_of(first: BatchConfig, batch: BatchConfig, where: str) -> BatchConfig:
    if first.tokens % batch.seq_length:
        raise ValueError(
            f"{where} --keep-batch-tokens: {first.tokens} tokens of an iteration are no whole "
            f"number of samples of {batch.seq_length}; give a --global-batch-size of which the "
            "first stage's tokens are a multiple of every length"
        )
    return replace(batch, global_batch_size=first.tokens // batch.seq_length)


def stage_problems(
    config: RunConfig, problems: Callable[[RunConfig], Iterator[str]]
) -> Iterator[str]:
    """The ``problems`` of each stage after the first, with its number."""
    for number in range(1, len(config.stages)):
        for message in problems(config.in_stage(number)):
            yield f"--seq-length-schedule, stage {number + 1}: {message}"
