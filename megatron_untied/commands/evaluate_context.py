r"""Measure how much a model reads of its context: losses by position, needles, copies.

    python tools/evaluate_context.py --output runs/context --load checkpoints \
        --use-checkpoint-args --seq-length 8192 --data-path data/books_text_document \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model checkpoints/tokenizer

For a long context on several GPUs torchrun starts it, as it starts training, with the same layout:
--bf16 --seq-length 1048576 --context-parallel-size 8 --use-torch-fsdp2
--recompute-granularity full --loss-chunk-size 2048.

Takes the flags of the run that trained the model, in any layout; those of the optimizer have no
effect. Four tasks, of which --tasks chooses:

documents: loss by position over long held-out documents (the validation share of --split), and the
    same where a token sees the --window-tokens before it alone, up to twice as many.
passkey: a key and its value in a text that ends with the key. Is the value the argmax?
needles: one of these at every depth, asked one after the other.
copy: random tokens twice. The second half can be copied; the first half can't be predicted, so a
    loss below log(vocabulary) there shows a mask that lets later tokens through.

Writes context.json and a picture for each task into --output. Needles are sentences in held-out
documents; with NullTokenizer random tokens, without --data-path among random tokens.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib
import numpy as np

matplotlib.use("Agg")  # before pyplot: nodes have no display

import torch.distributed as dist
from matplotlib import pyplot
from rich.console import Console

from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.cli.flag_values import count, integer, tokens
from megatron_untied.cli.planner_flags import complete
from megatron_untied.commands import parser_beside_training
from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.sequence import SequenceLayout
from megatron_untied.data.context_samples import (
    CITIES,
    COPY_PARTS,
    ContextSample,
    ContextSamples,
    HeldOutDocuments,
)
from megatron_untied.data.tokenizers import build_tokenizer
from megatron_untied.model import build_run_model
from megatron_untied.planner.report import print_line, print_table
from megatron_untied.sharding.interface import ModelProvider
from megatron_untied.training.context_evaluation import (
    AnswerScores,
    PositionLosses,
    losses_by_position,
    scores_of_answers,
    set_up_evaluation,
)
from megatron_untied.training.errors import print_error_once
from megatron_untied.training.initialize import Launch, errors_in_one_line, read_launch

Task = Literal["documents", "passkey", "needles", "copy"]
TASKS: tuple[str, ...] = get_args(Task)
COPY_ROWS = [f"{part + 1} of {COPY_PARTS}" for part in range(COPY_PARTS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextRequest:
    """The run whose model is evaluated, and what is asked of it."""

    config: RunConfig
    output: Path
    tasks: tuple[Task, ...]
    num_documents: int
    window: int
    lengths: tuple[int, ...]
    num_depths: int
    num_trials: int


def parse_request(argv: Sequence[str], world_size: int) -> ContextRequest:
    """From this tool's flags and those of training.

    Raises:
        ValueError: as ``parse_arguments``, or for lengths that do not fit.
    """
    parser = parser_beside_training(__doc__, "--output FOLDER")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="(all that the data allow)")
    parser.add_argument("--num-documents", type=count, default=8, help="long documents (8)")
    parser.add_argument(
        "--window-tokens", type=tokens, help="near context (an eighth of --seq-length)"
    )
    parser.add_argument(
        "--lengths", type=tokens, nargs="+", help="of needles and copies (down to an eighth)"
    )
    parser.add_argument(
        "--depths", type=integer(1, len(CITIES)), default=5, help="places of a needle (5)"
    )
    parser.add_argument("--trials", type=count, default=4, help="samples of each kind (4)")
    own, training = parser.parse_known_args(argv)
    config = parse_arguments(complete(training), world_size=world_size)
    if config.checkpoint.load is None:
        raise ValueError("--load is missing: the folder of checkpoints whose model is evaluated")
    s, has_documents = config.batch.seq_length, bool(config.data.data_path)
    step = math.lcm(
        SequenceLayout.of(config.parallel).divisor,
        config.parallel.context_parallel_size
        * (config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1),
    )
    lengths = own.lengths or sorted({s // n // step * step for n in (8, 4, 2, 1)} - {0})
    for length in lengths:
        if length > s or length % step or length < 4 * COPY_PARTS:
            raise ValueError(
                f"--lengths {length} must be {4 * COPY_PARTS} to --seq-length {s} tokens and a "
                f"multiple of {step}; give for example {max(s // 2 // step, 1) * step}"
            )
    window = own.window_tokens or max(s // 8, 1)
    if not 2 * window < s:
        raise ValueError(
            f"--window-tokens {window} leaves no far context: a token sees up to twice as many, "
            f"and --seq-length is {s}; give at most {(s - 1) // 2}"
        )
    tasks = tuple(own.tasks or TASKS[not has_documents :])
    if "documents" in tasks and not has_documents:
        raise ValueError("--tasks documents reads held-out documents; give --data-path")
    return ContextRequest(
        config=config,
        output=own.output,
        tasks=tasks,
        num_documents=own.num_documents,
        window=window,
        lengths=tuple(lengths),
        num_depths=own.depths,
        num_trials=own.trials,
    )


def evaluate(
    request: ContextRequest, launch: Launch, provider: ModelProvider = build_run_model
) -> dict[Task, PositionLosses | AnswerScores]:
    """Do the tasks of ``request``; collective over all ranks.

    Rank 0 prints each result, and writes the files at the end. ``provider`` builds the bare model.

    Returns:
        The results, the same on every rank.
    """
    config, data, s = request.config, request.config.data, request.config.batch.seq_length
    with errors_in_one_line():
        tokenizer = build_tokenizer(
            data.tokenizer_type, model=data.tokenizer_model, vocab_size=data.vocab_size
        )
        held_out = HeldOutDocuments(data, tokenizer) if data.data_path else None
        samples = ContextSamples(
            tokenizer=tokenizer,
            documents=held_out,
            lengths=request.lengths,
            num_depths=request.num_depths,
            num_trials=request.num_trials,
            seed=config.seed,
        )
        # Before the model, which may take minutes to load.
        places = held_out.long(s)[: request.num_documents] if "documents" in request.tasks else []
        for task in set(request.tasks) & {"passkey", "needles"}:
            samples.check(task)
    evaluated, heartbeat = set_up_evaluation(config, launch, request.output, provider)
    console, results = Console(highlight=False), {}
    with heartbeat, errors_in_one_line():
        for task in request.tasks:
            if task == "documents":
                documents = (
                    ContextSample.of(held_out.tokens(place, s + 1), s=s) for place in places
                )
                results[task] = losses_by_position(
                    evaluated, documents, seq_length=s, window=request.window
                )
            else:
                results[task] = scores_of_answers(
                    evaluated,
                    samples.copies() if task == "copy" else samples.needles(task),
                    rows=COPY_ROWS if task == "copy" else [f"{x:.0%}" for x in samples.depths],
                    lengths=list(request.lengths),
                    vocab_size=samples.vocab_size,
                )
            if launch.rank == 0:
                print_result(console, task, results[task])
        if launch.rank == 0:
            write_results(request, results)
            print_line(console, f"wrote context.json and pictures into {request.output}")
    return results


def print_result(console: Console, task: Task, found: PositionLosses | AnswerScores) -> None:
    """Print the table of a task and the line that follows from it."""
    if isinstance(found, PositionLosses):
        full, near = found.full.mean(0), found.near.mean(0)
        rows = {
            f"{first:,}": [f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}"]
            for first, a, b in zip(found.edges, full, near, strict=False)
        }
        title = f"loss by position, nats per token, mean of {len(found.full)} documents"
        print_table(console, title, "from", ["all context", "near context", "gain"], rows)
        print_line(console, found.describe())
        return
    title, label, cells = shown(task, found)
    rows = {name: [f"{x:.1%}" for x in row] for name, row in zip(found.rows, cells, strict=True)}
    print_table(console, title, label, [f"{n:,} tokens" for n in found.lengths], rows)
    if found.random_nats is not None:
        print_line(console, found.verdict())


def shown(task: Task, found: AnswerScores) -> tuple[str, str, np.ndarray]:
    """Title, label of the rows, and cells of a grid."""
    if task == "copy":
        return "copy: tokens that are right", "part of the copy", found.right
    return f"{task}: values that are right", "depth", found.exact


def write_results(
    request: ContextRequest, results: dict[Task, PositionLosses | AnswerScores]
) -> None:
    """Write ``context.json`` and a picture of each task."""
    report: dict[str, Any] = {
        "checkpoint": request.config.checkpoint.load,
        "seq_length": request.config.batch.seq_length,
    }
    for task, found in results.items():
        report[task] = {
            name: np.round(value, 6).tolist() if isinstance(value, np.ndarray) else value
            for name, value in asdict(found).items()
        }
        figure = draw(task, found)
        figure.savefig(request.output / f"{task}.png", dpi=150)
        pyplot.close(figure)
    (request.output / "context.json").write_text(json.dumps(report, indent=1) + "\n")


def draw(task: Task, found: PositionLosses | AnswerScores):
    """A figure of one task: curves of losses, or a heat map."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    if isinstance(found, PositionLosses):
        for losses, label in (
            (found.full, "all context"),
            (found.near, f"the {found.window:,} to {2 * found.window - 1:,} tokens before"),
        ):
            axes.stairs(losses.mean(0), found.edges, baseline=None, label=label)
        axes.set(xscale="symlog", xlabel="position", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
        return figure
    title, label, cells = shown(task, found)
    axes.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for (row, column), value in np.ndenumerate(cells):
        axes.text(column, row, f"{value:.0%}", ha="center", va="center")
    axes.set_xticks(range(len(found.lengths)), [f"{n:,}" for n in found.lengths])
    axes.set_yticks(range(len(found.rows)), found.rows)
    axes.set(xlabel="tokens", ylabel=label, title=title)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """One rank of an evaluation; torchrun starts as many as there are."""
    launch = read_launch()
    with print_error_once(launch):
        with errors_in_one_line():
            request = parse_request(sys.argv[1:] if argv is None else argv, launch.world_size)
        evaluate(request, launch)
    dist.destroy_process_group()
