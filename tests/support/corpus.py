"""Tiny texts, tokenizers and token files for the tests of data and tools."""

import json
from pathlib import Path

import numpy as np

from megatron_untied.commands.train_tokenizer import train_tokenizer
from megatron_untied.data.indexed_writer import IndexedWriter

NASTY_TEXTS = (
    "  a\t b\r\n\n\n   c  ",
    "\n",
    " ",
    "def f(x):\n    if x:\n\treturn  {'é': '😀'}\n",
    "\ufeffmark, zero width \u200b, nbsp \u00a0, line \u2028, form feed \x0c",
    "<s> </s> <unk> <0x0A>",
    "e\u0301 is not é, ﬁ is not fi, Ａ is not A",
    "\x00\x1b[0m\U0010ffff",
)


def train_small_tokenizer(folder: Path) -> Path:
    """A SentencePiece model of 400 tokens, of which 256 are bytes."""
    lines = Path(train_tokenizer.__code__.co_filename).read_text(encoding="utf-8").splitlines()
    path = folder / "tokenizer.model"
    path.write_bytes(train_tokenizer(lines, vocab_size=400))
    return path


def write_jsonl(path: Path, texts, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_token_files(prefix: Path, documents, dtype=np.uint16) -> str:
    """Token files of ``documents``, sequences of ids."""
    writer = IndexedWriter(str(prefix), dtype)
    for ids in documents:
        writer.add(np.array(ids, dtype=dtype))
    writer.finish()
    writer.publish()
    return str(prefix)


def random_documents(num_documents: int, *, vocab_size: int, eod: int, seed: int = 0) -> list:
    """Documents of 1 to 40 tokens, each ended by ``eod``."""
    rng = np.random.default_rng(seed)
    return [
        [*rng.integers(0, vocab_size, rng.integers(0, 40)).tolist(), eod]
        for _ in range(num_documents)
    ]
