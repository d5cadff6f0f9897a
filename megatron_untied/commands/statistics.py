"""Print what is in token files: documents, tokens, unigram entropy, document lengths.

    python tools/dataset_statistics.py data/corpus_text_document --json

The unigram entropy, in nats per token, is what the loss must fall below before a model can be said
to have learned anything from context.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from megatron_untied.commands import documentation
from megatron_untied.data.indexed_files import (
    DatasetStatistics,
    dataset_statistics,
    open_indexed_files,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool; ends with one line and exit code 1 for what the user can mend."""
    parser = argparse.ArgumentParser(
        description=documentation(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefix", help="path of the .bin and .idx files without the ending")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    args = parser.parse_args(arguments)
    try:
        statistics = dataset_statistics(open_indexed_files(args.prefix))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps(dataclasses.asdict(statistics)) if args.json else describe(statistics))


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
