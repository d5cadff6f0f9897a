r"""Print what is in token files: documents, tokens, unigram entropy, document lengths.

    python tools/dataset_statistics.py data/corpus_text_document --json
    python tools/dataset_statistics.py data/corpus_text_document --seq-length 131072 \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model checkpoints/tokenizer

The unigram entropy, in nats per token, is what the loss must fall below before a model can be said
to have learned anything from context. With --seq-length, and other flags of training, the training
samples are read as training reads them: tokens/s of one data-parallel rank's loader.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence

from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.cli.flag_values import count
from megatron_untied.cli.planner_flags import complete
from megatron_untied.commands import documentation
from megatron_untied.config.run import RunConfig
from megatron_untied.data.datasets import build_datasets
from megatron_untied.data.indexed_files import (
    DatasetStatistics,
    dataset_statistics,
    open_indexed_files,
)
from megatron_untied.data.loader import micro_batches
from megatron_untied.data.tokenizers import build_tokenizer

ANY_MODEL = ["--num-layers", "1", "--hidden-size", "128", "--num-attention-heads", "1"]
"""Samples do not depend on it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSpeed:
    """How fast the training samples of one data-parallel rank are read."""

    seq_length: int
    num_workers: int
    first_seconds: float
    """Until the first micro-batch, with building or reading the sample indices."""
    tokens_per_second: float
    """Of the micro-batches after it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool; ends with one line and exit code 1 for what the user can mend."""
    parser = argparse.ArgumentParser(
        description=documentation(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefix", help="path of the .bin and .idx files without the ending")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument(
        "--micro-batches", type=count, default=32, help="read to measure the loader (32)"
    )
    args, training = parser.parse_known_args(arguments)
    try:
        statistics, speed = dataset_statistics(open_indexed_files(args.prefix)), None
        if training:
            flags = ["--data-path", args.prefix, *training]
            if not {"--model", "--use-checkpoint-args", "--num-layers"} & set(training):
                flags += ANY_MODEL
            speed = loader_speed(parse_arguments(complete(flags), world_size=1), args.micro_batches)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    if args.json:
        found = dataclasses.asdict(statistics)
        print(json.dumps(found | ({"loader": dataclasses.asdict(speed)} if speed else {})))
        return
    print(describe(statistics))
    if speed:
        print(
            f"loader           {speed.tokens_per_second:,.0f} tokens/s: samples of "
            f"{speed.seq_length:,} by {speed.num_workers} workers, the first after "
            f"{speed.first_seconds:.1f} s"
        )


def loader_speed(config: RunConfig, num_micro_batches: int) -> LoaderSpeed:
    """Read so many micro-batches, and one before them, as the first data-parallel rank does."""
    data, batch, began = config.data, config.batch, time.perf_counter()
    tokenizer = build_tokenizer(
        data.tokenizer_type, model=data.tokenizer_model, vocab_size=data.vocab_size
    )
    num_samples = (num_micro_batches + 1) * batch.micro_batch_size
    datasets = build_datasets(
        data,
        tokenizer,
        seq_length=batch.seq_length,
        num_samples=(num_samples, 0, 0),
        seed=config.seed,
    )
    batches = micro_batches(
        datasets.train,
        consumed_samples=0,
        micro_batch_size=batch.micro_batch_size,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=data.num_workers,
    )
    next(batches)
    first = time.perf_counter()
    for _ in range(num_micro_batches):
        next(batches)
    tokens = num_micro_batches * batch.micro_batch_size * batch.seq_length
    return LoaderSpeed(
        seq_length=batch.seq_length,
        num_workers=data.num_workers,
        first_seconds=first - began,
        tokens_per_second=tokens / (time.perf_counter() - first),
    )


def describe(statistics: DatasetStatistics) -> str:
    """The statistics as lines for a reader."""
    lengths = ", ".join(f"{p}%: {n:,}" for p, n in statistics.document_tokens.items())
    return (
        f"documents        {statistics.num_documents:,}\n"
        f"tokens           {statistics.num_tokens:,}\n"
        f"distinct tokens  {statistics.num_distinct_tokens:,}\n"
        f"unigram entropy  {statistics.unigram_entropy:.4f} nats per token\n"
        f"document tokens  {lengths}"
    )
