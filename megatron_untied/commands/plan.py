r"""Say whether a run fits before it is started: memory by cause and phase, and its speed.

Takes the flags of training, and what it would run on. Exit status 0 if it fits, 1 if not (with the
flags that would make it fit), 2 for flags that cannot be.

    python tools/plan_memory.py --gpus-per-node 8 --gpu h100-80 --model llama3-8b --bf16 \
        --seq-length 1048576 --context-parallel-size 8 --use-torch-fsdp2 \
        --cp-heads-per-chunk auto --recompute-granularity auto --loss-chunk-size 8192 --max-context

How long a context fits needs no --seq-length; the answer has the command that starts it:

    python tools/plan_memory.py --model llama3-8b --bf16 --gpus-per-node 8 --max-context
"""

import json
import sys
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from rich.console import Console

from megatron_untied.cli.context_flags import context_flags, launch_command, training_flags
from megatron_untied.cli.planner_flags import Question, parse_question
from megatron_untied.commands import documentation
from megatron_untied.planner import buffer_table
from megatron_untied.planner.baselines import METHODS, Setting
from megatron_untied.planner.longest_context import LongestContext, limit_of, longest_context
from megatron_untied.planner.machine import GIB
from megatron_untied.planner.plan import Plan, longest
from megatron_untied.planner.report import as_json, print_line, print_plan
from megatron_untied.planner.search import candidates, choose, describe, is_automatic, search


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, print, answer."""
    try:
        question = parse_question(sys.argv[1:] if argv is None else argv, documentation(__doc__))
        return answer(question)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def answer(question: Question) -> int:
    """Print what was asked; the exit status.

    Raises:
        ValueError: a sequence that the attention kernel cannot index, or flags that cannot be.
    """
    only_json = question.json == "-"
    console = Console(quiet=only_json, highlight=False)
    best = find_longest(question) if question.max_context else None
    plan, chosen = plan_of(question)
    if best is not None and question.assumed_length:
        plan = best.plan
    elif chosen:
        print_line(console, describe(plan))
    if question.max_context:
        longest_found = say_longest(question, best, console)
    print_plan(plan, console)
    found = as_json(plan)
    if question.buffers:
        buffer_table.print_buffers(plan, console)
        found["buffers"] = buffer_table.as_json(plan)
    if not plan.fits:
        none_fits = question.max_context and best is None  # at any length: no need to search again
        found["would_fit_with"] = None if none_fits else suggest(plan, console)
    if question.max_context:
        found["longest"] = longest_found
    if question.compare:
        found["published_methods"] = say_methods(plan, console)
    write(question, found, plan)
    return 0 if plan.fits else 1


def plan_of(question: Question) -> tuple[Plan, bool]:
    """The plan, and whether the planner chose settings of it that fit."""
    config, machine = question.config, question.machine
    if not is_automatic(config):
        return Plan(config, machine), False
    try:
        return choose(config, machine), True
    except ValueError:  # shown all the same: what the least takes
        plans = (Plan(each, machine) for each in candidates(config, machine))
        return min(plans, key=lambda plan: plan.peak.num_bytes), False


def suggest(plan: Plan, console: Console) -> list[str] | None:
    """Print the flags with which it would fit."""
    found = search(plan)
    if found is None:
        print_line(
            console, "nothing that flags can do makes it fit: more ranks, or a shorter sequence"
        )
        return None
    flags, better = found
    print_line(console, f"would fit with {' '.join(flags)}: {describe(better).partition(' | ')[2]}")
    print_line(console, f"and then takes {better.time.seconds:,.1f} s a step")
    return flags


def find_longest(question: Question) -> LongestContext | None:
    """The longest context with the best flags."""
    configs = [question.config, *question.other_ranks]
    return longest_context([Plan(config, question.machine) for config in configs])


def say_longest(
    question: Question, best: LongestContext | None, console: Console
) -> dict[str, object]:
    """Print the longest contexts: with the flags that were given, and with the best ones."""
    # What is left to the planner is chosen anew for every length.
    plans = [Plan(each, question.machine) for each in candidates(question.config, question.machine)]
    on_device, (tokens, plan) = (
        max(((longest(each, with_host=host), each) for each in plans), key=itemgetter(0))
        for host in (False, True)
    )
    limit = limit_of(plan.at_length(tokens)) if tokens else limit_of(plan.at_length(0))
    print_line(
        console,
        f"longest context with these flags: {tokens:,} tokens, limited by {limit}; "
        f"{on_device[0]:,} if the host had no limit",
    )
    found = {"tokens": tokens, "tokens_without_host_limit": on_device[0], "limit": limit}
    if best is None:
        print_line(console, "longest context with the best flags: none fits")
        return found | {"best": None}
    flags = training_flags(question.training, best.plan.config)
    command, seconds = launch_command(flags, question.machine), best.plan.time.seconds
    print_line(
        console,
        f"longest context with the best flags: {best.tokens:,} tokens, limited by {best.limit}; "
        f"{seconds:,.1f} s a step. Start it with",
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


def say_methods(plan: Plan, console: Console) -> dict[str, float]:
    """Print what published methods would take of a GPU for the same sequence on as many ranks."""
    geometry, config = plan.geometry, plan.config
    setting = Setting(
        model=config.model,
        seq_length=config.batch.seq_length,
        num_ulysses=geometry.num_ulysses * geometry.t,
        num_ring=geometry.num_ring,
    )
    found = {name: sum(method(setting).values()) for name, method in METHODS.items()}
    for name, num_bytes in found.items():
        print_line(console, f"{name}, with full sharding: {num_bytes / GIB:.1f} GiB")
    return found


def write(question: Question, found: dict, plan: Plan) -> None:
    """The files that were asked for."""
    text = json.dumps(found, indent=2)
    if question.json == "-":
        print(text)
    elif question.json:
        Path(question.json).write_text(text + "\n")
    if question.plot:
        import matplotlib

        matplotlib.use("Agg")
        from megatron_untied.planner.plot import draw

        draw(plan).savefig(question.plot, dpi=150)
