"""Write a tiny model of Llama 3.1's kind, text and chats, to rehearse the guides in docs with.

    python tools/tiny_llama.py --folder rehearsal

The folder gets Llama-3.1-8B, a Hugging Face folder with random weights and a tokenizer of its own;
books.jsonl, sources of Python's standard library; chats.jsonl, questions about its functions; and
links to this repository's programs. There the commands of docs/extend_llama_to_1m.md and of
docs/fine_tune_on_chats.md work as they stand.
"""

import argparse
import ast
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("tools", "examples", "pretrain_gpt.py")
MODEL, TEXT, CHATS = "Llama-3.1-8B", "books.jsonl", "chats.jsonl"
NUM_DOCUMENTS, NUM_CHATS, VOCAB_SIZE, END = 100, 300, 1000, "<|end_of_text|>"
SPECIAL = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""Llama 3's without tools."""


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
    print(f"{folder}: {MODEL}, {TEXT}, {CHATS}, and links to {', '.join(PROGRAMS)}")


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
    chats = islice((chat for text in texts for chat in chats_of(text)), NUM_CHATS)
    (folder / CHATS).write_text("".join(json.dumps({"messages": x}) + "\n" for x in chats))
    write_tokenizer(folder / MODEL, texts)
    write_model(folder / MODEL)
    for name in PROGRAMS:
        os.symlink(ROOT / name, folder / name)


def chats_of(source: str) -> Iterator[list[dict[str, str]]]:
    """A chat about each documented function: what it is for, and its code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            yield [
                {"role": "user", "content": f"What does {node.name} do?"},
                {"role": "assistant", "content": ast.get_docstring(node)},
                {"role": "user", "content": "Show me the code."},
                {"role": "assistant", "content": ast.get_source_segment(source, node)},
            ]


def write_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    """Byte-level BPE, as Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, *SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)


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
