"""Train a SentencePiece tokenizer (BPE with byte fallback) that gives back every text exactly.

    python tools/train_tokenizer.py --input corpus.jsonl --model-prefix data/tokenizer \
        --vocab-size 4096

Nothing is normalized: runs of spaces, tabs, line ends and any script survive a round trip, which
source code needs. (One exception is SentencePiece's own: U+2581, its mark for a space, comes back
as a space.) Token 0 is unknown, which byte fallback never uses, 1 begins and 2 ends a text.
"""

import argparse
import io
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece

from megatron_untied.checkpoint.directory import make_writable
from megatron_untied.commands import documentation
from megatron_untied.data.documents import BadLines, find_files, read_documents


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool; ends with one line and exit code 1 for what the user can mend."""
    args = parse_arguments(arguments)
    try:
        path = Path(f"{args.model_prefix}.model")
        make_writable(path.parent, "--model-prefix")
        bad_lines = BadLines(args.on_bad_line)
        sentences = sample(lines(args.input, bad_lines), args.input_sentence_size, args.seed)
        model = train_tokenizer(sentences, vocab_size=args.vocab_size)
        # Renamed when complete: preprocessing must never read half a model.
        path.with_suffix(".partial").write_bytes(model)
        os.replace(path.with_suffix(".partial"), path)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    for line in bad_lines.summary():
        print(line)
    print(f"{path}: {args.vocab_size:,} tokens")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Flags named as SentencePiece's where it has one."""
    parser = argparse.ArgumentParser(
        description=documentation(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", required=True, help="as for preprocess_data.py")
    parser.add_argument("--model-prefix", required=True, help="path without .model")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument(
        "--input-sentence-size",
        type=int,
        default=1_000_000,
        help="lines to learn from, drawn at random from all (time and memory grow with them)",
    )
    parser.add_argument("--seed", type=int, default=1234, help="of that draw")
    BadLines.add_flag(parser)
    args = parser.parse_args(arguments)
    for flag in ("vocab_size", "input_sentence_size"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} {getattr(args, flag)} is not positive")
    return args


def lines(inputs: Sequence[str], bad_lines: BadLines) -> Iterator[str]:
    """Lines of all documents, with their indentation: what SentencePiece calls sentences."""
    for document in read_documents(find_files(inputs), replace=bad_lines.replace):
        if bad_lines.accepts(document):
            yield from document.texts["text"].splitlines()


def sample(sentences: Iterable[str], size: int, seed: int) -> list[str]:
    """At most ``size`` of the sentences, each as likely as any; the same for the same seed.

    SentencePiece can sample by itself, but not twice the same.
    """
    # Reservoir sampling: one pass over a corpus of any size, with ``size`` lines in memory.
    random_numbers = random.Random(seed)
    kept = []
    for index, sentence in enumerate(sentences):
        if index < size:
            kept.append(sentence)
        elif (slot := random_numbers.randrange(index + 1)) < size:
            kept[slot] = sentence
    return kept


def train_tokenizer(sentences: Sequence[str], *, vocab_size: int) -> bytes:
    """The bytes of a SentencePiece .model; the same for the same sentences.

    Raises:
        ValueError: if the text is too small for ``vocab_size``, or has more characters than that.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            # Exact round trips: no normalization, no space added, none removed, runs learned.
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,  # numbers are spelled digit by digit
            pad_id=-1,
            max_sentence_length=16384,  # bytes; longer lines are dropped, at its default above 4192
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2]  # what precedes is a place in its source
        raise ValueError(f"--vocab-size {vocab_size}: {reason}") from error
    return model.getvalue()
