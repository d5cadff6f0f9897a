r"""Plan a run before it is started: whether it fits, memory by category and phase, its speed.

Takes the flags of training, and those of the machine. The first line is the answer. Exit status 0
if the run fits, 1 if not (with flags that make it fit), 2 for flags that are not valid.

    python tools/plan_memory.py --gpus-per-node 8 --gpu h100-80 --model llama3-8b --bf16 \
        --seq-length 1048576 --context-parallel-size 8 --use-torch-fsdp2 \
        --cp-heads-per-chunk auto --recompute-granularity auto --loss-chunk-size 8192 --max-context

The longest context that fits needs no --seq-length; the answer has the command that starts it:

    python tools/plan_memory.py --model llama3-8b --bf16 --gpus-per-node 8 --max-context
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron_untied.cli.context_flags import context_flags, launch_command, training_flags
from megatron_untied.cli.planner_flags import PlanRequest, parse_plan_request
from megatron_untied.commands import documentation
from megatron_untied.config.run import RunConfig
from megatron_untied.planner import buffer_table
from megatron_untied.planner.automatic import (
    OPEN,
    describe,
    flags_of,
    is_automatic,
    nearest,
    ranked,
    settings,
    sizes,
)
from megatron_untied.planner.baselines import METHODS, Setting
from megatron_untied.planner.plan import Plan, fits, peak_bytes
from megatron_untied.planner.report import as_json, print_line, print_plan
from megatron_untied.planner.search import (
    LongestContext,
    describe_stage,
    limit_of,
    longest_context,
    longest_open,
    plan_stages,
    search,
    with_unlimited_host,
)
from megatron_untied.platform.device import GIB

EXAMPLE = "--model llama3-8b --bf16 --gpus-per-node 8 --max-context"


def main(argv: Sequence[str] | None = None) -> int:
    """Plan and print; the exit status."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if not words:
            raise ValueError(
                "no flags: give those of the run and of the machine, "
                f"such as {EXAMPLE}; --help lists them"
            )
        return answer(parse_plan_request(words, documentation(__doc__)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def answer(request: PlanRequest) -> int:
    """Print what was requested; the exit status.

    Raises:
        ValueError: a sequence that the attention kernel cannot index, or flags that are not valid.
    """
    only_json = request.json == "-"
    # Programs read stdout, so nothing but the JSON may be there.
    console = Console(quiet=only_json, highlight=False)
    stages = plan_stages(request.config, request.machine) if request.config.stages else []
    if stages:
        for number, plan in enumerate(stages):
            answered = "fits" if fits(plan) else "does not fit"
            print_line(console, f"{answered}: {describe_stage(plan, number)}")
        # The rest is about the stage that takes most, of those that do not fit if there are any.
        worst = max(stages, key=lambda plan: (not fits(plan), peak_bytes(plan)))
        request = in_stage(request, stages.index(worst), worst.config)
    best = None
    if request.max_context:
        configs = [request.config, *request.other_ranks]
        best = longest_context([Plan(config, request.machine) for config in configs])
    # A length that was only assumed has a plan too, which the longest one replaces.
    plan = plan_of(request)
    if best is not None and request.assumed_length:
        plan = best.plan
    elif is_automatic(request.config):
        print_line(console, describe(plan))
    if request.max_context:
        longest_found = report_longest(request, best, console)
    print_plan(plan, console)
    found = as_json(plan)
    if stages:
        found["stages"] = [as_json(each) for each in stages]
    if request.tune:
        found["tuned"] = report_tuned(request, console)
    if request.buffers:
        buffer_table.print_buffers(plan, console)
        found["buffers"] = buffer_table.as_json(plan)
    if not plan.fits:
        # If no length fits with any flags, another search is in vain.
        none_fits = request.max_context and best is None
        found["would_fit_with"] = None if none_fits else suggest(request, console)
    if request.max_context:
        found["longest"] = longest_found
    if request.compare:
        found["published_methods"] = report_methods(plan, console)
    write(request, found, plan)
    return 0 if plan.fits else 1


def in_stage(request: PlanRequest, stage: int, config: RunConfig) -> PlanRequest:
    """The same request for one stage of a run with several sequence lengths."""
    more = tuple((flags, other.in_stage(stage)) for flags, other in request.more_context_ranks)
    return replace(request, config=config, more_context_ranks=more)


def plan_of(request: PlanRequest) -> Plan:
    """The plan; with automatic settings that do not fit, the one that lacks least."""
    config, machine = request.config, request.machine
    if not is_automatic(config):
        return Plan(config, machine)
    found = ranked(config, machine, only_fastest=True)
    return found[0] if found else nearest(config, machine)


FAR_SLOWER = 0.9
"""Share of the tokens/s with all ranks on one sequence, below which that is suggested instead."""


def suggest(request: PlanRequest, console: Console) -> list[str] | None:
    """Print the flags with which it would fit.

    The given context-parallel size is kept if it fits and is not far slower than all ranks on one
    sequence; else the smallest size that fits, or all ranks, is among the flags.
    """
    config, machine = request.config, request.machine
    found = search(Plan(config, machine))
    ranks = machine.world_size // config.parallel.tensor_model_parallel_size
    for more_ranks, larger in request.more_context_ranks:
        if found is not None and larger.parallel.context_parallel_size < ranks:
            continue
        other = search(Plan(larger, machine))
        if other is None:
            continue
        flags, plan = other
        speed = plan.time.tokens_per_second_per_gpu
        if found is None or found[1].time.tokens_per_second_per_gpu < FAR_SLOWER * speed:
            found = [more_ranks, *flags], plan
    if found is None:
        print_line(console, "no flags make it fit: use more ranks or a shorter sequence")
        return None
    flags, plan = found
    words = " ".join(flags)
    if is_automatic(config) or "auto" in words:  # what a run with these flags will choose
        words += f" (auto: {settings(plan)})"
    print_line(console, f"would fit with {words}: {sizes(plan)}")
    time = plan.time
    print_line(
        console,
        f"and then takes {time.seconds:,.1f} s per step, "
        f"{time.tokens_per_second_per_gpu:,.1f} tokens/s/GPU",
    )
    return flags


def report_longest(
    request: PlanRequest, best: LongestContext | None, console: Console
) -> dict[str, object]:
    """Print the longest contexts: with the flags that were given, and with the best ones."""
    given = Plan(request.config, request.machine, every_layer=False)
    tokens, _ = longest_open([given])
    on_device, _ = longest_open([with_unlimited_host(given)])
    limit = limit_of([given], tokens)
    print_line(
        console,
        f"longest context with these flags: {tokens:,} tokens, limited by {limit}; "
        f"{on_device:,} if the host had no limit",
    )
    found = {"tokens": tokens, "tokens_without_host_limit": on_device, "limit": limit}
    if best is None:
        print_line(console, "longest context with the best flags: none fits")
        return found | {"best": None}
    flags = training_flags(request.training, best.plan.config)
    command, seconds = launch_command(flags, request.machine), best.plan.time.seconds
    print_line(
        console,
        f"longest context with the best flags: {best.tokens:,} tokens, limited by {best.limit}; "
        f"{seconds:,.1f} s per step. Start it with",
    )
    print_line(console, command)
    best_found = {
        "tokens": best.tokens,
        "limit": best.limit,
        "flags": context_flags(best.plan.config),
        "command": command,
        "step_seconds": seconds,
    }
    return found | {"best": best_found}


def report_tuned(request: PlanRequest, console: Console) -> list[dict[str, object]]:
    """Print the plans that fit, fastest first: one for every way to save activations."""
    plans = ranked(request.config, request.machine)
    print_line(console, f"plans that fit, fastest first: {len(plans)}")
    for plan in plans:
        print_line(
            console,
            f"{plan.time.seconds:12,.1f} s per step  {plan.peak.num_bytes / GIB:6.1f} GiB per GPU "
            f"{plan.host.total() / GIB:7.1f} GiB of host memory per rank  {settings(plan)}",
        )
    return [
        {
            "step_seconds": plan.time.seconds,
            "peak_bytes": plan.peak.num_bytes,
            "host_bytes": plan.host.total(),
            "flags": flags_of(plan.config, OPEN),
        }
        for plan in plans
    ]


def report_methods(plan: Plan, console: Console) -> dict[str, float]:
    """Print the GPU memory of published methods for the same sequence on as many ranks."""
    geometry, config = plan.geometry, plan.config
    setting = Setting(
        model=config.model,
        seq_length=config.batch.seq_length,
        # They have no tensor parallelism: all ranks exchange heads.
        num_ulysses=geometry.num_ulysses * geometry.num_tensor,
        num_ring=geometry.num_ring,
    )
    found = {name: sum(method(setting).values()) for name, method in METHODS.items()}
    for name, num_bytes in found.items():
        print_line(console, f"{name}, with full sharding: {num_bytes / GIB:.1f} GiB")
    return found


def write(request: PlanRequest, found: dict, plan: Plan) -> None:
    """Write the files that were requested; ``--json -`` is standard output."""
    text = json.dumps(found, indent=2)
    if request.json == "-":
        print(text)
    elif request.json:
        with output_named("--json", request.json):
            Path(request.json).write_text(text + "\n")
    if request.plot:
        # A second of start-up that most plans need not pay.
        import matplotlib

        matplotlib.use("Agg")  # before pyplot: nodes have no display
        from megatron_untied.planner.plot import draw

        with output_named("--plot", request.plot):
            draw(plan).savefig(request.plot, dpi=150)


@contextmanager
def output_named(flag: str, path: str) -> Iterator[None]:
    """Errors of writing ``path`` name ``flag``."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{flag} {path} cannot be written: {error.strerror or error}") from error
