"""Write token files of random spans that repeat: nothing can be predicted but from the context.

    python tools/build_copy_corpus.py --output-prefix data/copy --num-documents 2000 \
        --document-tokens 8192 --vocab-size 512

A document is one random span, repeated until it is full, so from its second period on the best loss
is 0 and the loss without context is log(vocabulary). The lengths of spans are spread evenly on a
log scale, in the files from short to long in turn, so that any share of --split has all of them.
Train with --tokenizer-type NullTokenizer and the same --vocab-size.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_untied.checkpoint.directory import make_writable
from megatron_untied.cli.flag_values import count, index, tokens
from megatron_untied.data.indexed_writer import IndexedWriter


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool; ends with one line and exit code 1 for what the user can mend."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-prefix", required=True, help="path of the files, no ending")
    parser.add_argument("--num-documents", type=count, required=True)
    parser.add_argument("--document-tokens", type=tokens, required=True)
    parser.add_argument("--vocab-size", type=count, required=True, help="different tokens")
    parser.add_argument("--min-distance", type=tokens, default=16, help="shortest span (16)")
    parser.add_argument("--max-distance", type=tokens, help="longest span (half a document)")
    parser.add_argument("--seed", type=index, default=1, help="of the tokens (1)")
    args = parser.parse_args(arguments)
    longest = args.max_distance or args.document_tokens // 2
    try:
        if not args.min_distance <= longest < args.document_tokens:
            raise ValueError(
                f"spans of {args.min_distance} to {longest} tokens in documents of "
                f"{args.document_tokens}: --min-distance must be at most --max-distance, and that "
                "below --document-tokens, or nothing repeats"
            )
        make_writable(Path(args.output_prefix).parent, "--output-prefix")
        writer = IndexedWriter(
            args.output_prefix, np.uint16 if args.vocab_size < 1 << 16 else np.int32
        )
        for document in documents(args, longest):
            writer.add(document)
        writer.finish()
        writer.publish()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(
        f"{args.output_prefix}: {args.num_documents:,} documents, spans of up to {longest:,} tokens"
    )


def documents(args: argparse.Namespace, longest: int) -> Iterator[np.ndarray]:
    """The documents, int64 [document_tokens] each."""
    rng = np.random.default_rng(args.seed)
    spans = np.geomspace(args.min_distance, longest, min(args.num_documents, 10)).astype(int)
    for number in range(args.num_documents):
        span = rng.integers(0, args.vocab_size, spans[number % len(spans)])
        yield np.resize(span, args.document_tokens)  # repeats it


if __name__ == "__main__":
    main()
