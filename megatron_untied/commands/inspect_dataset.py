"""Look at chats as --sft trains on them: which tokens have a loss, lengths, packing, padding.

    python tools/inspect_dataset.py --data-path chats.jsonl --tokenizer-model FOLDER \
        --seq-length 8192 --long-samples drop --histogram lengths.png

Trained tokens are colored on a terminal, and between brackets elsewhere. The flags are those of
training, and what is tokenized here is cached: training with the same chats and tokenizer finds it.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import get_args

import matplotlib
import numpy as np

matplotlib.use("Agg")  # before pyplot: nodes have no display

from matplotlib import pyplot
from rich.console import Console
from rich.text import Text

from megatron_untied.cli.flag_values import tokens
from megatron_untied.commands import documentation
from megatron_untied.config.data import DataConfig, LongSamples, LossOn
from megatron_untied.data.chat_datasets import (
    PackedChats,
    TokenizedChats,
    build_chat_datasets,
    tokenize_chats,
)
from megatron_untied.data.tokenizers import build_tokenizer

PERCENTILES = (50, 90, 99, 100)
OPEN, CLOSE = "\u27e6", "\u27e7"  # double brackets, which text rarely has


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool; ends with one line and exit code 1 for what the user can mend."""
    args = parse_arguments(arguments)
    try:
        inspect(args)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags of training, and ours."""
    parser = argparse.ArgumentParser(
        description=documentation(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-path", nargs="+", required=True, help="files and folders of chats")
    parser.add_argument("--tokenizer-model", required=True, help="a Hugging Face folder")
    parser.add_argument("--seq-length", type=tokens, required=True, help="tokens of a sample")
    parser.add_argument("--loss-on", choices=get_args(LossOn), default="completion")
    parser.add_argument("--long-samples", choices=get_args(LongSamples), default="error")
    parser.add_argument("--split", default="969,30,1", help="the first share is for training")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--data-cache-path", help="folder for tokens (DATA_PATH.cache)")
    parser.add_argument("--num-workers", type=int, default=2, help="tokenizer processes")
    parser.add_argument("--samples", type=int, default=3, help="chats to print")
    parser.add_argument("--histogram", metavar="PNG", help="draw lengths and attention work")
    return parser.parse_args(arguments)


def inspect(args: argparse.Namespace) -> None:
    """Tokenize and pack as training does, and print what comes of it."""
    data = DataConfig(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=args.tokenizer_model,
        data_path=tuple(args.data_path),
        data_cache_path=args.data_cache_path,
        split=args.split,
        num_workers=args.num_workers,
        sft=True,
        loss_on=args.loss_on,
        long_samples=args.long_samples,
    )
    tokenizer = build_tokenizer(
        data.tokenizer_type, model=data.tokenizer_model, parse_special_tokens=True
    )
    console, chats = Console(), tokenize_chats(data, tokenizer)
    for number in range(min(args.samples, len(chats))):
        ids, trained = chats.chat(number)
        # Only labels have a loss, so the first token has none.
        count = int(trained[1:].sum())
        console.print(f"-- chat {number + 1}: {len(ids):,} tokens, {count:,} trained")
        text = colored(tokenizer._tokenizer.tokenizer.decode, ids, trained, console.is_terminal)
        console.print(text, soft_wrap=True)
    lengths = np.percentile(chats.lengths, PERCENTILES).astype(int)
    shares = ", ".join(f"{p}%: {n:,}" for p, n in zip(PERCENTILES, lengths, strict=True))
    # Before packing, which may end with an error about these lengths.
    console.print(f"tokens of a chat: {shares}", highlight=False)
    datasets, description = build_chat_datasets(
        data, tokenizer, seq_length=args.seq_length, num_samples=(1, 0, 0), seed=args.seed
    )
    console.print(description, highlight=False, soft_wrap=True)
    if args.histogram:
        draw(chats, datasets[0], args.seq_length).savefig(args.histogram, dpi=150)
        console.print(f"wrote {args.histogram}", highlight=False, soft_wrap=True)


def colored(decode, ids: np.ndarray, trained: np.ndarray, in_color: bool) -> Text:
    """The text of ``ids``, in which trained tokens are green, or between brackets."""
    text, position = Text(), 0
    for is_trained, run in groupby(trained.tolist()):
        stop = position + len(list(run))
        # An escape sequence in a chat would reach the terminal.
        part = decode(ids[position:stop].tolist()).replace("\x1b", "\u241b")
        if is_trained and not in_color:
            part = f"{OPEN}{part}{CLOSE}"
        text.append(part, style="green" if is_trained else "dim")
        position = stop
    return text


def draw(chats: TokenizedChats, samples: PackedChats, seq_length: int):
    """A figure of the lengths of all chats, and of the attention work of the packed samples."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    longest = max(int(chats.lengths.max()), seq_length)
    left.hist(chats.lengths, bins=np.geomspace(chats.lengths.min(), longest + 1, 41))
    left.axvline(seq_length, color="gray", linestyle="--", label=f"--seq-length {seq_length}")
    left.set(xscale="log", xlabel="tokens of a chat", ylabel="chats")
    left.legend()
    padding = 1 - samples.num_tokens.sum() / (len(samples) * seq_length)
    right.hist(samples.attention_work / samples.attention_work.mean(), bins=40)
    right.set(xlabel="attention work / mean", ylabel="samples", title=f"{padding:.1%} padding")
    return figure
