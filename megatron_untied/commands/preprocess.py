"""Tokenize documents into Megatron's token files, PREFIX_text_document.bin and .idx.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model \
        --append-eod --workers 8

--input takes JSON lines with a "text" key (.jsonl, .json), Parquet with such a column (.parquet),
plain-text files (one document each), folders of them and globs; .gz and .zst are decompressed. The
order of the documents is the order of --input, sorted by path inside a folder, whatever --workers
is. With --join-folders every folder or git repository is one long document. The files get their
names when they are complete. Beside them, .provenance.json names the tokenizer; training refuses
another one.

A run that ends early keeps what it finished in PREFIX_text_document.incomplete.bin and .idx, which
are complete token files of the documents so far. --resume, with the same flags, goes on there.
"""

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from megatron_untied.checkpoint.directory import make_writable
from megatron_untied.commands import documentation
from megatron_untied.config.data import TOKENIZER_TYPES
from megatron_untied.data.documents import BadLines, Place, find_files, read_documents
from megatron_untied.data.indexed_writer import (
    INCOMPLETE,
    Counts,
    IndexedWriter,
    load_finished_part,
    remove_finished_part,
    save_finished_part,
)
from megatron_untied.data.provenance import Provenance
from megatron_untied.data.records import files_in_folder, is_text, num_bytes_of
from megatron_untied.data.tokenize_documents import (
    Advance,
    Encoder,
    encode_in_order,
)
from megatron_untied.data.tokenizers import begin_of_text, build_tokenizer, tokenizer_hash


class Terminated(KeyboardInterrupt):
    """SIGTERM, which batch systems and container engines send: ends the run as Ctrl-C does."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool; ends with one line and exit code 1 for what the user can mend."""
    args = parse_arguments(arguments)
    # Restored at the end: a program that calls main() has a handler of its own.
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        preprocess(args)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        sys.exit(f"error: {error}")
    except Terminated:  # before its base class
        print("terminated", file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt saving
    raise Terminated


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Megatron's flags and ours."""
    parser = argparse.ArgumentParser(
        description=documentation(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", required=True, help="files, folders or globs")
    parser.add_argument(
        "--join-folders",
        action="store_true",
        help="every folder of --input is one document: its text files by path, each behind a line "
        "with the path; of a git repository those that git tracks",
    )
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="one output for each")
    parser.add_argument("--output-prefix", required=True, help="path without _text_document.bin")
    parser.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    parser.add_argument("--tokenizer-model", help="a .model file or a Hugging Face folder")
    parser.add_argument("--vocab-size", type=int, help="the tokenizer must have this many tokens")
    parser.add_argument("--append-eod", action="store_true", help="end every document with one")
    parser.add_argument(
        "--prepend-bos", action="store_true", help="begin every document with the tokenizer's BOS"
    )
    parser.add_argument(
        "--parse-special-tokens",
        action="store_true",
        help="the text of a special token, such as <|endoftext|>, becomes the token; without this "
        "flag it is text as any other",
    )
    parser.add_argument(
        "--long-texts-in-one-call",
        action="store_true",
        help="texts over 16 Mi characters that the tokenizer cannot encode exactly in parts are "
        "encoded whole, which takes much memory; without this flag they are bad lines",
    )
    BadLines.add_flag(parser)
    parser.add_argument(
        "--resume", action="store_true", help="go on where a run with the same flags ended early"
    )
    parser.add_argument("--workers", type=int, default=1, help="tokenizer processes")
    args = parser.parse_args(arguments)
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: at least one process must tokenize")
    if len(set(args.json_keys)) < len(args.json_keys):
        parser.error(f"--json-keys {' '.join(args.json_keys)}: a key is named twice")
    return args


def preprocess(args: argparse.Namespace) -> None:
    """Read, tokenize, write and say what was written."""
    start = time.monotonic()
    tokenizer = build_tokenizer(
        args.tokenizer_type,
        model=args.tokenizer_model,
        vocab_size=args.vocab_size,
        parse_special_tokens=args.parse_special_tokens,
    )
    bos = begin_of_text(tokenizer)
    has_bos = bos is not None and bos != tokenizer.eod
    if args.prepend_bos and not has_bos:
        raise ValueError("--prepend-bos: the tokenizer has no BOS of its own; leave the flag out")
    if has_bos and not args.prepend_bos:
        print(f"no BOS: the tokenizer's (token {bos}) is written with --prepend-bos only")
    flags = {
        "append_eod": args.append_eod,
        "bos": bos if args.prepend_bos else None,
        "parse_special_tokens": args.parse_special_tokens,
    }
    provenance = Provenance(
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        tokenizer_hash=tokenizer_hash(tokenizer),
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        **flags,
    )
    files = find_files(args.input, join_folders=args.join_folders)
    if args.join_folders:
        describe_folders(files)
    make_writable(Path(args.output_prefix).parent, "--output-prefix")
    bad_lines = BadLines(
        args.on_bad_line, Path(f"{args.output_prefix}.bad_lines.txt"), resume=args.resume
    )
    encoder = Encoder(tokenizer, long_in_one_call=args.long_texts_in_one_call, **flags)
    writers = write(args, encoder, provenance, files, bad_lines)
    for writer in writers:
        print(
            f"{writer.prefix}: {writer.num_documents:,} documents ({writer.num_empty:,} empty ones "
            f"left out), {writer.num_tokens:,} tokens"
        )
    num_bytes, seconds = sum(map(num_bytes_of, files)), time.monotonic() - start
    print(f"{num_bytes:,} bytes in {seconds:.1f} s, {num_bytes / seconds / 1e6:.2f} MB/s")


def describe_folders(files: Sequence[Path]) -> None:
    """Say what is joined, and what is left out because it is no text.

    Raises:
        ValueError: there is no folder among the inputs.
    """
    folders = [path for path in files if path.is_dir()]
    if not folders:
        raise ValueError("--join-folders has no effect without a folder in --input; leave it out")
    inside = [file for folder in folders for file in files_in_folder(folder)]
    others = [file for file in inside if not is_text(file.read_bytes())]
    first = f", the first is {others[0]}" if others else ""
    print(
        f"{len(folders):,} folders are a document each: {len(inside) - len(others):,} text files, "
        f"{len(others):,} left out that are no UTF-8 text{first}"
    )


def write(
    args: argparse.Namespace,
    encoder: Encoder,
    provenance: Provenance,
    files: Sequence[Path],
    bad_lines: BadLines,
) -> list[IndexedWriter]:
    """Token files for each JSON key; all of them get their names, or the finished part is kept."""
    writers = {
        key: IndexedWriter(f"{args.output_prefix}_{key}_document", encoder.dtype, provenance)
        for key in args.json_keys
    }
    begin = finished = None
    try:
        if args.resume:
            begin = load_finished_part(args.output_prefix, writers, files, provenance)
            print(f"resuming after {begin}")
        documents = read_documents(files, args.json_keys, replace=bad_lines.replace, after=begin)
        num_bytes = sum(map(num_bytes_of, files))  # compressed ones, which are known
        with progress_bar(num_bytes) as advance:
            for document in encode_in_order(
                documents, encoder, num_workers=args.workers, advance=advance
            ):
                if bad_lines.accepts(document):
                    for key, ids in document.ids.items():
                        writers[key].add(ids)
                # One assignment: an interrupt leaves the place and the counts that belong to it.
                finished = document.place, [writer.counts for writer in writers.values()]
        for writer in writers.values():
            writer.finish()
        for writer in writers.values():
            writer.publish()  # none before all are complete: no mixture of old and new files
        remove_finished_part(args.output_prefix, writers)
    except BaseException:  # Ctrl-C too
        if finished:
            keep(args.output_prefix, writers, files, finished, provenance)
        raise
    finally:
        for line in bad_lines.summary():
            print(line)
        for writer in writers.values():
            writer.discard()
    return list(writers.values())


def keep(
    output_prefix: str,
    writers: Mapping[str, IndexedWriter],
    files: Sequence[Path],
    finished: tuple[Place, list[Counts]],
    provenance: Provenance,
) -> None:
    """Publish the documents up to the finished one as the finished part, and say so."""
    place, all_counts = finished
    try:
        for writer, counts in zip(writers.values(), all_counts, strict=True):
            writer.roll_back(counts)  # to the last document that every file has
        if not any(counts.num_documents for counts in all_counts):
            return
        save_finished_part(output_prefix, writers, files, place, provenance)
    except OSError as error:
        # Only a line: the error that ended the run follows, and is the one to mend.
        print(f"the finished part could not be kept: {error}", file=sys.stderr)
        return
    names = ", ".join(f"{writer.prefix}{INCOMPLETE}" for writer in writers.values())
    print(
        f"kept all documents up to {place} in {names}: the same command with --resume goes on "
        "from there",
        file=sys.stderr,
    )


@contextmanager
def progress_bar(total: int) -> Iterator[Advance]:
    """A bar on the terminal that follows the bytes which are told to it through ``total``."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("tokenizing", total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)
