"""Write a tiny model of Llama 3.1's kind, and text, to rehearse docs/extend_llama_to_1m.md with.

    python tools/tiny_llama.py --folder rehearsal

The folder gets Llama-3.1-8B, a Hugging Face folder with random weights and a tokenizer of its own;
books.jsonl, sources of Python's standard library; and links to this repository's programs, so that
the guide's commands work there as they stand.
"""

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("tools", "examples", "pretrain_gpt.py")
MODEL, TEXT = "Llama-3.1-8B", "books.jsonl"
NUM_DOCUMENTS, VOCAB_SIZE, END = 100, 1000, "<|end_of_text|>"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool; ends with one line and exit code 1 for what the user can mend."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="new, or empty")
    folder: Path = parser.parse_args(arguments).folder
    try:
        write(folder)
    except (ValueError, OSError) as error:
        sys.exit(f"tiny_llama: {error}")
    print(f"{folder}: {MODEL}, {TEXT}, and links to {', '.join(PROGRAMS)}")


def write(folder: Path) -> None:
    """Fill ``folder``.

    Raises:
        ValueError: there is something in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"--folder {folder} is not empty; give another, or remove it")
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:NUM_DOCUMENTS]
    texts = [source.read_text(encoding="utf-8") for source in sources]
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / TEXT).write_text("".join(lines))
    write_tokenizer(folder / MODEL, texts)
    write_model(folder / MODEL)
    for name in PROGRAMS:
        os.symlink(ROOT / name, folder / name)


def write_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    """Byte-level BPE, as Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)


def write_model(folder: Path) -> None:
    """Random weights, the same every time."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main()
