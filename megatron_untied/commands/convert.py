"""Convert between a Hugging Face folder and a checkpoint.

    python tools/convert_checkpoint.py hf-to-megatron --hf-path Llama-3.1-8B --save checkpoints/8b
    python tools/convert_checkpoint.py megatron-to-hf --load checkpoints/8b --hf-path out
    python tools/convert_checkpoint.py megatron-to-peft --load checkpoints/adapters --hf-path out

Llama 2, 3, 3.1, 3.2 and 3.3, Mistral, Qwen2, Qwen2.5 and dense Qwen3, from safetensors. Memory does
not grow with the model: tensors pass through a block at a time. The checkpoint fits any number of
ranks and carries its architecture and tokenizer:

    pretrain_gpt.py --load checkpoints/8b --finetune --use-checkpoint-args \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model checkpoints/8b/tokenizer ...

Dtypes are kept unless --dtype is given. Training saves fp32: a trained model goes back in the dtype
that it once came in. megatron-to-hf merges the adapters of --lora-rank, in fp32 and rounded once;
megatron-to-peft writes them by themselves, as PEFT's adapter_model.safetensors.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

import megatron_untied  # noqa: F401  (prepares megatron-core for a machine without CUDA)
from megatron_untied.checkpoint.directory import find_checkpoint
from megatron_untied.commands import documentation
from megatron_untied.hf import Export, Import
from megatron_untied.hf.adapters import Adapters
from megatron_untied.hf.importing import Advance

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool; ends with one line and exit code 1 for what the user can mend."""
    args = parse_arguments(arguments)
    try:
        args.convert(args)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags; ``convert`` is the function for the direction."""
    parser = argparse.ArgumentParser(
        description=documentation(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    directions = parser.add_subparsers(required=True, metavar="DIRECTION")
    into = directions.add_parser("hf-to-megatron", help="a checkpoint of iteration 0 in --save")
    into.set_defaults(convert=hf_to_megatron)
    into.add_argument("--hf-path", type=Path, required=True, help="folder to read")
    into.add_argument("--save", type=Path, required=True, help="folder for the checkpoint")
    back = directions.add_parser("megatron-to-hf", help="a Hugging Face folder in --hf-path")
    back.set_defaults(convert=megatron_to_hf)
    back.add_argument("--max-shard-gb", type=float, default=5.0, help="of a safetensors file")
    back.add_argument(
        "--pretrained-checkpoint", type=Path, help="weights that adapters belong to, if moved"
    )
    peft = directions.add_parser("megatron-to-peft", help="adapters in PEFT's format in --hf-path")
    peft.set_defaults(convert=megatron_to_peft)
    for direction in (back, peft):
        direction.add_argument("--load", type=Path, required=True, help="folder of checkpoints")
        direction.add_argument("--ckpt-step", type=int, help="iteration, instead of the latest")
        direction.add_argument("--hf-path", type=Path, required=True, help="folder to write")
    for direction in (into, back, peft):
        direction.add_argument("--dtype", choices=DTYPES, help="of the result (as it is, or came)")
    return parser.parse_args(arguments)


def hf_to_megatron(args: argparse.Namespace) -> None:
    """Convert a Hugging Face folder."""
    source = Import.open(args.hf_path, DTYPES.get(args.dtype))  # None keeps the dtypes
    with progress_bar("importing", source.num_bytes) as advance:
        copied = source.write(args.save, advance)
    print(f"{args.save}: {source.num_bytes:,} bytes; {describe(copied)}")


def megatron_to_hf(args: argparse.Namespace) -> None:
    """Convert a checkpoint."""
    if not args.max_shard_gb > 0:
        raise ValueError(f"--max-shard-gb {args.max_shard_gb} must be above 0, such as 5")
    source = Export.open(
        args.load, args.ckpt_step, DTYPES.get(args.dtype), args.pretrained_checkpoint
    )
    with progress_bar("exporting", source.num_bytes) as advance:
        # GB of 10^9 bytes, as in Hugging Face's max_shard_size.
        copied = source.write(args.hf_path, advance, max_shard_bytes=int(args.max_shard_gb * 10**9))
    dtype = source.config["torch_dtype"]
    print(f"{args.hf_path}: {source.num_bytes:,} bytes, {dtype}; {describe(copied)}")


def megatron_to_peft(args: argparse.Namespace) -> None:
    """Convert the adapters of a checkpoint."""
    checkpoint = find_checkpoint(args.load, args.ckpt_step)
    adapters = checkpoint and Adapters.open(checkpoint)
    if adapters is None:
        raise ValueError(f"--load {args.load} has no checkpoint with adapters; check the path")
    num_bytes = adapters.write_peft(args.hf_path, DTYPES.get(args.dtype, torch.float32))
    print(f"{args.hf_path}: {num_bytes:,} bytes; PeftModel.from_pretrained(model, folder) loads it")


def describe(copied: Sequence[str]) -> str:
    """What became of the tokenizer."""
    if not copied:
        return "no tokenizer files: there were none to copy"
    return f"copied {', '.join(copied)}"


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Advance]:
    """A bar on the terminal; yields what moves it on by so many bytes."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task(title, total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)
