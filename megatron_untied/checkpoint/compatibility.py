"""Checks that a checkpoint fits this run, made before any state is overwritten.

Its files must be complete and hold the run's tensors (:class:`TensorFiles`), its architecture must
be the run's (:func:`require_same_structure`), and so must its schedule
(:func:`require_same_schedule`, :func:`resume_schedule`).
"""

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_untied.checkpoint.checksums import Checksums
from megatron_untied.checkpoint.directory import damaged, require_content
from megatron_untied.checkpoint.index import INDEX, read_index
from megatron_untied.checkpoint.state import NOT_IN_STATE
from megatron_untied.config import ModelConfig
from megatron_untied.config.flag_names import flag_of
from megatron_untied.config.problems import first_few

STRUCTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "swiglu",
    "normalization",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "norm_epsilon",
    "rotary.percent",
)
"""Fields of ModelConfig that determine the meaning of a checkpoint's weights. Equal shapes do not
suffice: 8 heads of width 16 and 4 heads of width 32 have the same."""

CHANGEABLE = (
    "max_position_embeddings",
    "window_size",
    "rotary.base",
    "rotary.scaling",
    "rotary.scaling_factor",
    "rotary.original_max_positions",
    "rotary.low_freq_factor",
    "rotary.high_freq_factor",
    "rotary.beta_fast",
    "rotary.beta_slow",
    "rotary.attention_factor",
    "rotary.truncate",
)
"""Fields that change the function too, but that are changed to continue at a longer context."""

SCALING_FIELDS = {
    "none": (),
    "linear": ("scaling_factor",),
    "llama3": ("scaling_factor", "original_max_positions", "low_freq_factor", "high_freq_factor"),
    "yarn": ("scaling_factor", "original_max_positions", "beta_fast", "beta_slow",
             "attention_factor", "truncate"),
}  # fmt: skip
"""Fields of RotaryConfig that each kind of scaling reads; the others have no effect."""

MAX_LISTED = 3


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """Names and shapes of a checkpoint's tensors, known without reading the tensors."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, folder: Path) -> "TensorFiles":
        """Read the index of a checkpoint.

        Raises:
            ValueError: the index or one of the files is missing, cut off or a Git LFS pointer, or
                the index has changed since it was saved or does not hold together.
        """
        if checksums := Checksums.read(folder):
            checksums.require_small_file(INDEX)
        index = read_index(folder)
        # One stat per file, instead of reading terabytes: enough to find a copy that was cut short.
        ends: dict[str, int] = {}
        for stored in index.storage_data.values():
            end = stored.offset + stored.length
            ends[stored.relative_path] = max(end, ends.get(stored.relative_path, 0))
        broken = []
        for name, end in sorted(ends.items()):
            path = folder / name
            size = path.stat().st_size if path.is_file() else 0
            if 0 < size < end:
                require_content(path)  # a Git LFS pointer gets its own message
            if size < end:
                broken.append(f"{name} has {size} of {end} bytes")
        if broken:
            raise ValueError(damaged(folder, first_few(broken, MAX_LISTED, "; ")))
        shapes = {name: tuple(tensor.size) for name, tensor in index.state_dict_metadata.items()}
        return cls(folder, shapes)

    def require(self, expected: Mapping[str, tuple[int, ...]], *, allow_more: str | None) -> None:
        """Check that the files hold the tensors of a run, with its shapes, and no others.

        Args:
            expected: global shapes by name.
            allow_more: prefix of names that may be in the files without being expected.

        Raises:
            ValueError: with the first few that differ and both shapes.
        """
        more = {n for n in self.shapes if not (allow_more and n.startswith(allow_more))}
        problems = [f"{name} is missing" for name in expected if name not in self.shapes]
        problems += [f"{name} is unknown here" for name in sorted(more - expected.keys())]
        problems += [
            f"{name} is {list(self.shapes[name])}, here {list(shape)}"
            for name, shape in expected.items()
            if self.shapes.get(name, shape) != shape
        ]
        if problems:
            listed = first_few(problems, MAX_LISTED, "; ")
            raise ValueError(f"{self.folder} does not fit this model: {listed}")


def require_same_structure(
    folder: Path, stored: ModelConfig, here: ModelConfig, *, use_checkpoint_args: bool = False
) -> None:
    """Check that the checkpoint has this run's architecture.

    Raises:
        ValueError: with the settings that differ and both values.
    """
    if differing := list(_differing(STRUCTURE, stored, here)):
        advice = "Give its settings, or --use-checkpoint-args to take them from it."
        if use_checkpoint_args:
            advice = "Leave these flags out: --use-checkpoint-args takes them from it."
        raise ValueError(f"{folder} is of another model: {'; '.join(differing)}. {advice}")


def changed_settings(stored: ModelConfig, here: ModelConfig) -> list[str]:
    """Settings that make another function of the same weights, which may be intended: both values.

    A smaller maximum of positions does not count: it changes no output.
    """
    kinds = stored.rotary.scaling, here.rotary.scaling
    # A dict, for an ordered set: both kinds may read the same field.
    scaling = dict.fromkeys(f"rotary.{name}" for kind in kinds for name in SCALING_FIELDS[kind])
    fields = ["window_size", "rotary.base", "rotary.scaling", *scaling]
    if here.max_position_embeddings > stored.max_position_embeddings:
        fields.append("max_position_embeddings")
    return list(_differing(fields, stored, here))


def _differing(fields: Iterable[str], stored: ModelConfig, here: ModelConfig) -> Iterator[str]:
    for field in fields:
        before, now = (operator.attrgetter(field)(model) for model in (stored, here))
        if before == now:
            continue
        if field == "window_size":  # as the flag counts: without the query itself
            before, now = ("unlimited" if n is None else f"{n - 1},0" for n in (before, now))
        yield f"{flag_of(f'model.{field}')}: {before}, here {now}"


def schedule_state(scheduler: OptimizerParamScheduler) -> dict[str, Any]:
    """Every setting of a schedule, and its position; steps are samples.

    With ``NOT_IN_STATE``: two schedules that differ in those alone must not compare equal.
    """
    return scheduler.state_dict() | {name: getattr(scheduler, name) for name in NOT_IN_STATE}


def require_same_schedule(
    folder: Path, stored: Mapping[str, Any], scheduler: OptimizerParamScheduler
) -> None:
    """Check that learning rate and weight decay continue their schedule.

    Settings that no later value depends on may differ: a warmup that is over, and the length of a
    constant schedule, so that a run can be extended.

    Raises:
        ValueError: with the settings that differ, both values and the flags that choose.
    """
    here = schedule_state(scheduler)
    # What no later learning rate depends on; first of all the position itself.
    unread = {"num_steps"}
    styles = {stored["lr_decay_style"], here["lr_decay_style"]}
    warm = stored["num_steps"] > max(stored["lr_warmup_steps"], here["lr_warmup_steps"])
    if warm:
        unread.add("init_lr")  # where the warmup began
    if styles == {"constant"}:
        unread |= {"lr_decay_steps", "min_lr"} | ({"lr_warmup_steps"} if warm else set())
    if "WSD" not in styles:
        unread |= {"wsd_decay_steps", "lr_wsd_decay_style"}
    # A setting that only one side has comes with another version of megatron-core.
    names = [name for name in stored if name in here and name not in unread]
    differing = [f"{n} {stored[n]}, here {here[n]}" for n in names if stored[n] != here[n]]
    if differing:
        raise ValueError(
            f"{folder} has another schedule (steps are samples): {'; '.join(differing)}. Give it "
            "the same --lr, --min-lr, --lr-warmup-iters, --lr-decay-iters (--train-iters, unless "
            "given), --weight-decay and --global-batch-size; or --override-opt_param-scheduler "
            "for the new schedule, --use-checkpoint-opt_param-scheduler for the old one, both "
            "with Adam's moments; or --no-load-optim to start the optimizer anew."
        )


def resume_schedule(
    scheduler: OptimizerParamScheduler, stored: Mapping[str, Any], *, take_settings: bool
) -> None:
    """Continue at the position of ``stored``, with its settings or with those of this run."""
    if take_settings:
        for name in (stored.keys() & schedule_state(scheduler).keys()) - {"num_steps"}:
            setattr(scheduler, name, stored[name])
        for group in scheduler.optimizer.param_groups:
            # Megatron-core's parameter groups have copies, which override the schedule's own.
            group |= {name: stored[name] for name in ("max_lr", "min_lr") if name in group}
    # Not load_state_dict: it adds the position to num_steps, and it leaves out NOT_IN_STATE.
    scheduler.num_steps = stored["num_steps"]
    scheduler.step(0)  # sets the learning rate and weight decay of this position
