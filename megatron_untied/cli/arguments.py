"""Parsing of the command line: flags in, one ``RunConfig`` out.

The order: refuse flags that are not supported, parse, fill in a preset, check which flags need
others, apply defaults, build the parts of the configuration, validate them against each other. No
other module of the trainer sees a flag. The planner parses its training flags here too.
"""

import argparse
import difflib
import importlib.util
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from typing_extensions import override

from megatron_untied.checkpoint.compatibility import require_same_structure
from megatron_untied.checkpoint.run_config import read_model_config
from megatron_untied.cli.derived import (
    derived_sizes,
    model_vocab_size,
    replace_scaling,
    rotary_config,
    tokenizer_vocab_size,
)
from megatron_untied.cli.flags import (
    A_YEAR_IN_MINUTES,
    FLAGS,
    NOT_YET,
    OTHER_SPELLINGS,
    SWITCHES,
)
from megatron_untied.cli.stages import in_stages, with_lengths
from megatron_untied.cli.validate import validate
from megatron_untied.config import (
    AdaptationConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    Precision,
    RotaryConfig,
)
from megatron_untied.config.checkpoint import CheckpointConfig
from megatron_untied.config.data import DataConfig, check_split
from megatron_untied.config.flag_names import flag_of, value_name
from megatron_untied.config.parameters import LORA_TARGETS
from megatron_untied.config.run import (
    BatchConfig,
    DistributedConfig,
    EvaluationConfig,
    LoggingConfig,
    LoopConfig,
    OptimizationConfig,
    ProfilingConfig,
    RunConfig,
    ScheduleConfig,
)
from megatron_untied.flops import slow_step_seconds
from megatron_untied.planner.automatic import SAVED, has_open_sizes
from megatron_untied.planner.geometry import by_sizes
from megatron_untied.platform import device
from megatron_untied.presets import read_preset

Values = Mapping[str, Any]
Config = TypeVar("Config")

HELP = """\
Pretrain a GPT-style model with sequences sharded over context-parallel ranks.

    torchrun --standalone --nproc-per-node 2 pretrain_gpt.py --context-parallel-size 2 ...

Flags have Megatron's spelling. Lengths are in tokens: 1048576, or 1Mi, 1024Ki."""

REQUIRED_FLAGS = {
    "num_query_groups": "group_query_attention",
    "rope_scaling_factor": "use_rope_scaling",
    "yarn_mscale": "yarn_mscale_all_dim",
    "yarn_mscale_all_dim": "yarn_mscale",
    "dataloader_inter_document_masking": "reset_position_ids",
    "document_boundaries": "reset_position_ids",
    "loss_on": "sft",
    "long_samples": "sft",
    "loss_weighting": "sft",
    "lora_alpha": "lora_rank",
    "lora_targets": "lora_rank",
    "pretrained_checkpoint": "lora_rank",
    "attention_output_layers": "recompute_granularity",
    "recompute_method": "recompute_granularity",
    "recompute_num_layers": "recompute_granularity",
    "sequence_tile_size": "recompute_granularity",
    "cpu_offloading_num_layers": "recompute_granularity",
    "activation_disk": "cpu_offloading_num_layers",
    "activation_disk_gib": "activation_disk",
    "activation_disk_checksums": "activation_disk",
    "park_during_attention": "recompute_granularity",
    "verify_recompute": "recompute_granularity",
    "profile_step_start": "profile",
    "profile_step_end": "profile",
    "profile_ranks": "profile",
    "use_pytorch_profiler": "profile",
    "save_interval": "save",
    "save_retain_interval": "save",
    "most_recent_k": "save",
    "save_on_signal_now": "exit_signal_handler",
    "save_into_existing": "save",
    "exit_on_failed_save": "save",
    "async_save": "save",
    "ckpt_step": "load",
    "finetune": "load",
    "exit_on_missing_checkpoint": "load",
    "override_opt_param_scheduler": "load",
    "use_checkpoint_opt_param_scheduler": "load",
    "reset_data_position": "load",
}
"""Flags that have no effect without another flag, and that other flag; alone they are refused."""


def parse_arguments(
    argv: Sequence[str], *, world_size: int, leaves_sizes: bool = False
) -> RunConfig:
    """Parse and check the flags of a run.

    Reads the tokenizer for the size of its vocabulary and, with --use-checkpoint-args, the
    architecture in the checkpoint.

    Args:
        argv: the command line, without the program's name.
        world_size: number of ranks.
        leaves_sizes: keep "auto" for tile, chunk of the loss and overlap, for plans of other
            lengths.

    Raises:
        ValueError: an unknown or unsupported flag, an invalid value, or values that contradict each
            other; the message has the remedy.
    """
    given = with_preset(parse_flags(argv))  # a preset's flags are checked as if given
    _require_partners(given)
    values = with_lengths(given, defaults() | given)
    # Before building any part, whose arithmetic needs these.
    _require(values, "seq_length", "micro_batch_size", "train_iters", "lr", "tokenizer_type")
    check_split(values["split"])
    if values["sft"]:  # chats in a sample do not see each other
        values |= {"reset_position_ids": True, "dataloader_inter_document_masking": True}
    data = _take(
        DataConfig,
        values,
        data_path=tuple(values["data_path"]),
        vocab_size=tokenizer_vocab_size(values),
    )
    sizes = values["hierarchical_context_parallel_sizes"]  # a list, which is not hashable
    parallel = _take(
        ParallelConfig, values, hierarchical_context_parallel_sizes=sizes and tuple(sizes)
    )
    model = _model(given, values, data)  # reads the tokenizer, and perhaps a checkpoint
    memory = _memory(given, values, model)
    batch = _batch(values, parallel, world_size)
    config = RunConfig(
        model=model,
        parallel=parallel,
        memory=memory,
        precision=_take(Precision, values),
        data=data,
        batch=batch,
        optimization=_take(OptimizationConfig, values),
        schedule=_take(
            ScheduleConfig,
            values,
            lr_decay_iters=values["lr_decay_iters"] or values["train_iters"],
        ),
        checkpoint=_take(CheckpointConfig, values),
        evaluation=_take(EvaluationConfig, values),
        loop=_take(LoopConfig, values),
        logging=_logging(values),
        distributed=DistributedConfig(backend="gloo"),  # replaced below: it depends on the stages
        profiling=_take(ProfilingConfig, values, profile_ranks=tuple(values["profile_ranks"])),
        adaptation=_adaptation(values),
        attention_backend=values["attention_backend"],
        transformer_impl=values["transformer_impl"],
        seed=values["seed"],
    )
    if texts := values["seq_length_schedule"]:
        keep = values["keep_batch_tokens"]
        config = in_stages(config, given, texts, keep_batch_tokens=keep, parse=parse_flags)
    config = replace(config, distributed=_distributed(values, longest_timeout(config, world_size)))
    validate(config, world_size)  # all remaining problems at once, one per line
    # What the planner is to choose it chooses together, for the memory of the machine.
    if leaves_sizes or has_open_sizes(config):
        return config
    stages = (config.in_stage(number) for number in range(len(config.stages) or 1))
    sized = by_sizes(max(stages, key=lambda each: each.batch.seq_length))  # the same in all of them
    return replace(config, memory=sized.memory, parallel=sized.parallel)


def _require_partners(given: Values) -> None:
    """Refuse flags that have no effect without another one, which is absent."""
    opened = {name for _, name in SAVED} if given.get("recompute_granularity") == "auto" else set()
    for name, other in REQUIRED_FLAGS.items():
        if name in given and other not in given.keys() | opened:
            raise ValueError(f"{flag_of(name)} has no effect without {flag_of(other)}; give both")
    if "use_checkpoint_args" in given and not given.keys() & {"load", "pretrained_checkpoint"}:
        raise ValueError("--use-checkpoint-args has no effect without --load; give both")


def _adaptation(values: Values) -> AdaptationConfig:
    return _take(
        AdaptationConfig,
        values,
        freeze=tuple(values["freeze"]),
        lora_targets=tuple(t for t in LORA_TARGETS if t in values["lora_targets"]),
    )


def parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    """Parse the flags that were given.

    Returns:
        Values by name, such as ``seq_length``; flags that were not given are absent.

    Raises:
        ValueError: an unknown or unsupported flag, or an invalid value.
    """
    # Megatron accepts two spellings of some flags; argparse knows one.
    argv = [OTHER_SPELLINGS.get(token, token) for token in argv]
    # Before parsing: an unsupported value of a known flag has its own reason.
    for token, following in itertools.pairwise([*argv, ""]):
        name, _, value = token.partition("=")
        for refused in (name, f"{name} {value or following}"):
            if refused in NOT_YET:
                raise ValueError(f"{refused} is not supported: {NOT_YET[refused]}")
    # Not parse_args, whose message about unknown flags has no suggestion.
    given, unknown = parser().parse_known_args(_with_negative_values(argv))
    if unknown:
        raise ValueError(_unknown(unknown, argv))
    return vars(given)


def with_preset(given: Values) -> dict[str, Any]:
    """``given``, completed with the flags of the preset that ``--model`` names, if it does."""
    if "model" not in given:
        return dict(given)
    if "use_checkpoint_args" in given:
        raise ValueError(
            f"--model {given['model']} and --use-checkpoint-args both set the architecture; "
            "give one of them"
        )
    return replace_scaling(parse_flags(read_preset(given["model"]).argv), given)


def defaults() -> dict[str, Any]:
    """Default of each flag, by name of its value."""
    flags = (flag for group in FLAGS.values() for flag in group)
    return {options.get("dest", value_name(name)): options["default"] for name, options in flags}


def parser() -> argparse.ArgumentParser:
    """A parser of ``FLAGS`` whose namespace has only the flags that were given."""
    built = FlagParser(
        usage="%(prog)s FLAGS",
        allow_abbrev=False,  # --save must not be taken for --save-interval
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for title, flags in FLAGS.items():
        group = built.add_argument_group(title)
        for name, options in flags:
            text, default = options.get("help", ""), options["default"]
            if default is not None and not isinstance(default, bool) and default != ():
                shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
                text = f"{text} (default: {shown})"
            # Suppressed, so that a flag that is given can be told from its default.
            group.add_argument(name, **options | {"default": argparse.SUPPRESS, "help": text})
    return built


class FlagParser(argparse.ArgumentParser):
    """A parser that raises ``ValueError`` instead of printing its usage and exiting.

    Every rank parses the same flags, and only one of them is to print the message.
    """

    @override
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _model(given: Values, values: Values, data: DataConfig) -> ModelConfig:
    if values["use_checkpoint_args"]:
        # Only flags that were given may change it, so `given` counts here, not `values`.
        folder = values["pretrained_checkpoint"] or values["load"]
        step = None if values["pretrained_checkpoint"] else values["ckpt_step"]
        stored = read_model_config(folder, step)
        rotary = rotary_config(given, stored.rotary)
        # --vocab-size is that of the tokenizer; the model may have more rows.
        others = {"rotary": rotary, "vocab_size": stored.vocab_size}
        model = replace(stored, **_shared(ModelConfig, given) | others)
        require_same_structure(Path(folder), stored, model, use_checkpoint_args=True)
        stored_rows = stored.vocab_size
    else:
        _require(values, "num_layers", "hidden_size", "num_attention_heads")
        rotary = rotary_config(given, RotaryConfig())
        model = _take(ModelConfig, values, **derived_sizes(values) | {"rotary": rotary})
        stored_rows = None
    return replace(model, vocab_size=model_vocab_size(values, data, stored_rows))


def _memory(given: Values, values: Values, model: ModelConfig) -> MemoryConfig:
    opened = {}
    if values["recompute_granularity"] == "auto":  # and what is not given of its settings
        opened = {name: "auto" for _, name in SAVED if name not in given}
    offloaded = opened.get("cpu_offloading_num_layers", values["cpu_offloading_num_layers"])
    opened["cpu_offloading_num_layers"] = model.num_layers if offloaded == "all" else offloaded
    # The flag's default counts with disks only.
    has_limit = values["activation_disk"] and values["activation_disk_gib"] != "all"
    opened["activation_disk_gib"] = values["activation_disk_gib"] if has_limit else None
    return _take(MemoryConfig, values, **opened)


def _batch(values: Values, parallel: ParallelConfig, world_size: int) -> BatchConfig:
    model_ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    # With too few ranks the data-parallel size would be 0: validate() reports that.
    one_pass = values["micro_batch_size"] * max(1, world_size // model_ranks)
    return _take(BatchConfig, values, global_batch_size=values["global_batch_size"] or one_pass)


def _logging(values: Values) -> LoggingConfig:
    # Checked here because the sink opens after the model is built, minutes later.
    project = values["wandb_project"]
    if project and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"--wandb-project {project} needs the package wandb, which is not installed; "
            "run pip install wandb, or leave out the flag"
        )
    return _take(LoggingConfig, values)


def longest_timeout(config: RunConfig, world_size: int) -> float:
    """Default timeout of a collective: the time of a step on slow devices, at least 10 minutes.

    A rank may wait for another for a whole step, of the slowest stage, but not longer.
    """
    seconds = max(
        slow_step_seconds(
            config.model,
            config.memory,
            seq_length=batch.seq_length,
            num_samples=batch.global_batch_size,
            world_size=world_size,
            flops_per_second=device.slow_flops_per_second(),
        )
        for batch, _ in config.batches(0, config.loop.train_iters)
    )
    return max(10.0, float(math.ceil(seconds / 60)))


def _distributed(values: Values, timeout: float) -> DistributedConfig:
    backend = values["distributed_backend"]
    if backend != "gloo":  # whether there are usable GPUs does not matter to gloo
        backend = device.default_backend()
    if values["distributed_backend"] == "nccl" != backend:
        raise ValueError(
            "--distributed-backend nccl needs GPUs, and this machine has none; use gloo"
        )
    given = values["distributed_timeout_minutes"]
    if given is not None and not 0 < given <= A_YEAR_IN_MINUTES:
        raise ValueError(
            f"--distributed-timeout-minutes {given} is not above 0 and at most "
            f"{A_YEAR_IN_MINUTES}, a year; use {timeout:.0f}, enough for this step"
        )
    enable_ft_package = values["enable_ft_package"]
    if enable_ft_package and importlib.util.find_spec("nvidia_resiliency_ext") is None:
        raise ValueError(
            "--enable-ft-package needs the package nvidia-resiliency-ext, which is not installed; "
            "run pip install nvidia-resiliency-ext and start the run with its ft_launcher, or "
            "leave out the flag and use torchrun --max-restarts"
        )
    return DistributedConfig(
        backend=backend,
        timeout_minutes=given or timeout,
        enable_ft_package=enable_ft_package,
    )


def _with_negative_values(argv: Sequence[str]) -> list[str]:
    """Join ``--flag -1,0`` to ``--flag=-1,0``; argparse would take -1,0 for a flag."""
    joined: list[str] = []
    for token in argv:
        if re.match(r"-\d", token) and joined and joined[-1].startswith("--"):
            joined[-1] += f"={token}"
        else:
            joined.append(token)
    return joined


def _unknown(tokens: Sequence[str], argv: Sequence[str]) -> str:
    known = [name for group in FLAGS.values() for name, _ in group] + list(NOT_YET)
    names = [token.partition("=")[0] for token in tokens if token.startswith("--")]
    # No flag is unknown, so a value is left over.
    if not names:
        for before, token in itertools.pairwise(argv):
            if token == tokens[0] and before in SWITCHES:
                return f"{before} takes no value; remove {token!r}"
        return f"{tokens[0]!r} does not belong to a flag; remove it"
    close = difflib.get_close_matches(names[0], known, n=1)
    return f"unknown flag {names[0]}" + (f"; did you mean {close[0]}?" if close else "")


def _require(values: Values, *names: str) -> None:
    missing = [flag_of(name) for name in names if values[name] is None]
    if missing:
        raise ValueError(f"missing {' '.join(missing)}; required")


def _take(config: type[Config], values: Values, **others: Any) -> Config:
    """Build a ``config`` from the values that have the names of its fields, and ``others``."""
    return config(**_shared(config, values) | others)


def _shared(config: type, values: Values) -> dict[str, Any]:
    names = {field.name for field in fields(config)}
    return {name: value for name, value in values.items() if name in names}
