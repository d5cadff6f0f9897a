"""What cannot be in an architecture, whether flags, a checkpoint or a config.json describe it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields

from megatron_untied.config import ModelConfig

Name = Callable[[str], str]

MIN_NORM_EPSILON = 1e-12
"""Of fp32: with less, a row of zeros is divided by zero."""


def first_few(items: Iterable[str], limit: int, separator: str = ", ") -> str:
    """The first ``limit`` items for a message, and how many more there are."""
    listed = list(items)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return separator.join(listed[:limit]) + more


def flag_name(field: str) -> str:
    """The flag of a field of ModelConfig or RotaryConfig."""
    return "--" + field.replace("_", "-")


def model_problems(model: ModelConfig, name: Name = flag_name) -> Iterator[str]:
    """Everything that cannot be in ``model``, with a value that works.

    Args:
        model: the architecture.
        name: what the user calls a field of ModelConfig.
    """
    sizes = {f.name: getattr(model, f.name) for f in fields(model) if f.type in (int, "int")}
    wrong = [field for field, size in sizes.items() if size < 1]
    for field in wrong:
        yield f"{name(field)} {sizes[field]} is below 1, the smallest that works"
    if model.window_size is not None and model.window_size < 1:
        yield f"{name('window_size')} lets a query see {model.window_size} tokens; 1 is itself"
    if not MIN_NORM_EPSILON <= model.norm_epsilon < 1:  # this way round refuses nan too
        yield (
            f"{name('norm_epsilon')} {model.norm_epsilon} is not between {MIN_NORM_EPSILON} and 1; "
            "1e-5 works"
        )
    if not 0 <= model.init_method_std < float("inf"):
        yield f"{name('init_method_std')} {model.init_method_std} is no deviation; 0.02 works"
    if wrong:
        return
    h, g = model.num_attention_heads, model.num_query_groups
    if h % g:
        groups = next(n for n in range(min(h, g), 0, -1) if h % n == 0)
        yield (
            f"{name('num_attention_heads')} {h} is not a multiple of {name('num_query_groups')} "
            f"{g}; {groups} groups work"
        )
    yield from _rotary(model, name)


def _rotary(model: ModelConfig, name: Name) -> Iterator[str]:
    rotary, d = model.rotary, model.kv_channels
    percent = f"{name('rotary_percent')} {rotary.percent}"
    if not 0 < rotary.percent <= 1:
        yield f"{percent} is outside (0, 1]; 1.0 rotates whole heads"
    elif rotary.percent == 1 and d % 2:
        yield f"{name('kv_channels')} {d} is odd, and rotation goes by pairs; {d + 1} works"
    elif int(d * rotary.percent) % 2 or not int(d * rotary.percent):
        yield (
            f"{percent} rotates {int(d * rotary.percent)} of {d} channels of a head; "
            "rotation goes by pairs, so an even number works"
        )
    if not rotary.base > 1:
        yield f"{name('rotary_base')} {rotary.base} must be above 1, such as 10000"
