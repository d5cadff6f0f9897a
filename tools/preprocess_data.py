"""Tokenize documents into Megatron's token files, PREFIX_text_document.bin and .idx.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model \
        --append-eod --workers 8

--input takes JSON lines with a "text" key (.jsonl, .json), plain-text files (one document each),
folders of them and globs. The order of the documents is the order of --input, sorted by path
inside a folder, whatever --workers is. The files get their names when they are complete.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from megatron_untied.data.config import TOKENIZER_TYPES
from megatron_untied.data.documents import find_files, read_documents
from megatron_untied.data.indexed_writer import IndexedWriter
from megatron_untied.data.tokenize_documents import EncodedDocument, Encoder, encode_in_order
from megatron_untied.data.tokenizers import build_tokenizer


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool; ends with one line and exit code 1 for what the user can mend."""
    args = parse_arguments(arguments)
    try:
        preprocess(args)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"preprocess_data: {error}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Megatron's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", required=True, help="files, folders or globs")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="one output for each")
    parser.add_argument("--output-prefix", required=True, help="path without _text_document.bin")
    parser.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    parser.add_argument("--tokenizer-model")
    parser.add_argument("--vocab-size", type=int, help="the tokenizer must have this many tokens")
    parser.add_argument("--append-eod", action="store_true", help="end every document with one")
    parser.add_argument("--workers", type=int, default=1, help="tokenizer processes")
    args = parser.parse_args(arguments)
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: at least one process must tokenize")
    return args


def preprocess(args: argparse.Namespace) -> None:
    """Read, tokenize, write and say what was written."""
    start = time.monotonic()
    tokenizer = build_tokenizer(
        args.tokenizer_type, model=args.tokenizer_model, vocab_size=args.vocab_size
    )
    encoder = Encoder(tokenizer=tokenizer, append_eod=args.append_eod)
    files = find_files(args.input)
    documents = read_documents(files, args.json_keys)
    encoded = encode_in_order(documents, encoder, num_workers=args.workers)
    num_bytes = sum(file.stat().st_size for file in files)
    prefixes = {key: f"{args.output_prefix}_{key}_document" for key in args.json_keys}
    Path(args.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    for writer in write(with_progress(encoded, num_bytes), prefixes, encoder.dtype):
        print(
            f"{writer.prefix}: {writer.num_documents:,} documents ({writer.num_empty:,} empty ones "
            f"left out), {writer.num_tokens:,} tokens as {np.dtype(encoder.dtype)}"
        )
    seconds = time.monotonic() - start
    print(f"{num_bytes:,} bytes in {seconds:.1f} s, {num_bytes / seconds / 1e6:.2f} MB/s")


def write(
    documents: Iterable[EncodedDocument], prefixes: dict[str, str], dtype: type[np.integer]
) -> list[IndexedWriter]:
    """One pair of files for each JSON key; all of them get their names, or none does."""
    writers = {key: IndexedWriter(prefix, dtype) for key, prefix in prefixes.items()}
    try:
        for document in documents:
            for key, ids in document.ids.items():
                writers[key].add(ids)
        for writer in writers.values():
            writer.finish()
        for writer in writers.values():
            writer.publish()
    finally:
        for writer in writers.values():
            writer.discard()
    return list(writers.values())


def with_progress(documents: Iterable[EncodedDocument], total: int) -> Iterator[EncodedDocument]:
    """Pass ``documents`` on while a bar on the terminal follows them through ``total`` bytes."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    num_tokens = 0
    with Progress(*columns) as progress:
        task = progress.add_task("tokenizing", total=total, tokens=0)
        for document in documents:
            num_tokens += sum(map(len, document.ids.values()))
            progress.update(task, advance=document.num_bytes, tokens=num_tokens)
            yield document


if __name__ == "__main__":
    main()
