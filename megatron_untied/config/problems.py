"""Checks of an architecture, for flags, checkpoints and config.json alike."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields

from megatron_untied.config import ModelConfig
from megatron_untied.config.flag_names import flag_of

Name = Callable[[str], str]
"""(field of ModelConfig or RotaryConfig) -> its name for the user."""

LARGEST_SIZE = 2**31 - 1
LARGEST_NUMBER = 2**16
"""Of layers and heads, each of which is gone through."""
MIN_NORM_EPSILON = 1e-12
"""Smallest epsilon in fp32; below it, normalizing a row of zeros divides by zero."""


def first_few(items: Iterable[str], limit: int, separator: str = ", ") -> str:
    """The first ``limit`` items for a message, and how many more there are."""
    listed = list(items)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return separator.join(listed[:limit]) + more


def in_one_line(error: object) -> str:
    """What a library says, without line breaks and characters that a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())


def model_problems(model: ModelConfig, name: Name = flag_of) -> Iterator[str]:
    """Yield one message per invalid value of ``model``, each with a value that works.

    Args:
        model: the architecture.
        name: the user's name for a field: its flag, or its key in a file.
    """
    # Annotations are strings where a module postpones their evaluation.
    sizes = {f.name: getattr(model, f.name) for f in fields(model) if f.type in (int, "int")}
    wrong = [field for field, size in sizes.items() if size < 1]
    for field in wrong:
        yield f"{name(field)} {sizes[field]} is below 1, the smallest value"
    for field, size in sizes.items():
        many = field in ("num_layers", "num_attention_heads", "num_query_groups")
        most = LARGEST_NUMBER if many else LARGEST_SIZE
        if size > most:
            wrong.append(field)
            yield f"{name(field)} {size} is above {most}, the largest value"
    if model.window_size is not None and model.window_size < 1:
        yield f"{name('window_size')} leaves a query {model.window_size} tokens; use 1 or more"
    if not MIN_NORM_EPSILON <= model.norm_epsilon < 1:  # negated, so that nan is refused too
        yield (
            f"{name('norm_epsilon')} {model.norm_epsilon} is not between {MIN_NORM_EPSILON} and 1; "
            "use 1e-5"
        )
    if not 0 <= model.init_method_std < float("inf"):
        yield f"{name('init_method_std')} {model.init_method_std} is not valid; use 0.02"
    if wrong:
        return  # the checks below divide by these sizes
    h, g = model.num_attention_heads, model.num_query_groups
    if h % g:
        groups = next(n for n in range(min(h, g), 0, -1) if h % n == 0)
        yield (
            f"{name('num_attention_heads')} {h} is not a multiple of {name('num_query_groups')} "
            f"{g}; use {groups} groups"
        )
    yield from _rotary(model, name)


def _rotary(model: ModelConfig, name: Name) -> Iterator[str]:
    rotary, d = model.rotary, model.kv_channels
    percent = f"{name('rotary_percent')} {rotary.percent}"
    if not 0 < rotary.percent <= 1:
        yield f"{percent} is outside (0, 1]; use 1.0 to rotate whole heads"
    elif rotary.percent == 1 and d % 2:
        yield f"{name('kv_channels')} {d} is odd; channels are rotated in pairs; use {d + 1}"
    # Rounded down, as megatron-core does it.
    elif int(d * rotary.percent) % 2 or not int(d * rotary.percent):
        yield (
            f"{percent} rotates {int(d * rotary.percent)} of {d} channels of a head; "
            "channels are rotated in pairs, so use a percentage that gives an even number"
        )
    if not rotary.base > 1:  # at 1 all pairs would turn alike
        yield f"{name('rotary_base')} {rotary.base} must be above 1, such as 10000"
