"""Files of every kind that a user points at, mutated: refused in one line, or read as they are.

What is accepted is compared with what a second reader makes of the same files. ``--fault-seed``
chooses other mutations.
"""

import contextlib
import functools
import gzip
import io
import json
import random
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import sentencepiece
import torch
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDataset
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig

from megatron_untied.checkpoint import (
    CheckpointConfig,
    Progress,
    Provenance,
    load_checkpoint,
    save_checkpoint,
)
from megatron_untied.checkpoint.checksums import CHECKSUMS
from megatron_untied.checkpoint.state import tensors_of
from megatron_untied.commands import preprocess
from megatron_untied.config.data import DataConfig
from megatron_untied.data.chats import parse_chat
from megatron_untied.data.datasets import build_datasets
from megatron_untied.data.provenance import Provenance as TokenProvenance
from megatron_untied.data.tokenizers import build_tokenizer, tokenizer_hash
from megatron_untied.hf import Export, Import
from tests.support.chats import CHATS, write_chats, write_tokenizer
from tests.support.corpus import (
    NASTY_TEXTS,
    random_documents,
    train_small_tokenizer,
    write_jsonl,
    write_token_files,
)
from tests.support.hf_models import save_model
from tests.support.mutations import Fault, Files, Mutation, refusal, write_files
from tests.support.optimizer_run import Split, small_run
from tests.support.ranks import RankFailure, run_on_ranks

NULL = build_tokenizer("NullTokenizer", vocab_size=100)
TEXT = "The naïve 日本語 text, 12345 and </s> <|im_end|>\n  def f(x):\t{'é': '😀'}"


def tree(folder: Path) -> Files:
    """Every file below ``folder`` by its path there."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def same(found: Any, expected: Any) -> bool:
    """Whether both are equal, with arrays and tensors inside; nan equals itself."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(found, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, (np.ndarray, torch.Tensor)):
        return np.array_equal(np.asarray(found), np.asarray(expected))
    return found == expected


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of files: how they are made, read, and read by someone else."""

    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    """What the product makes of the files in a folder."""
    expected: Callable[[Path], Any] | None = None
    """What it has to be; None stands for what it was before the mutation."""
    mutated: Callable[[str], bool] = lambda name: True
    """Which files are mutated."""
    draws: int = 1000
    """Mutations in the slow set."""
    of_folder: bool = False
    """Whether a message may name the folder that the user gave instead of the file in it."""

    def names(self, name: str, folder: Path) -> list[str]:
        """What a message about a file has to have one of."""
        path = folder / name
        stem = path.name.split(".")[0] or path.name
        return [path.name, stem, *([str(path.parent)] if self.of_folder else [])]


# Token files


def make_tokens(folder: Path) -> None:
    documents = random_documents(20, vocab_size=100, eod=NULL.eod)
    prefix = write_token_files(folder / "data", documents)
    provenance = TokenProvenance(
        tokenizer_type="NullTokenizer",
        tokenizer_model=None,
        tokenizer_hash=tokenizer_hash(NULL),
        vocab_size=NULL.vocab_size,
        eod=NULL.eod,
        append_eod=True,
        bos=None,
        parse_special_tokens=False,
    )
    lengths = np.array(list(map(len, documents)), np.int32)
    provenance.write(f"{prefix}.provenance.json", lengths, 0)


def samples_of(prefix: Path, cache: Path) -> list[dict[str, torch.Tensor]]:
    data = DataConfig(
        tokenizer_type="NullTokenizer",
        vocab_size=100,
        data_path=(str(prefix),),
        data_cache_path=str(cache),
        split="1",
        reset_position_ids=True,
    )
    train = build_datasets(data, NULL, seq_length=16, num_samples=(12, 0, 0), seed=1).train
    return [train[number] for number in range(len(train))]


def documents_by_pointer(prefix: Path) -> list[np.ndarray]:
    """The documents as the .idx defines them, whether they follow each other or not."""
    index, data = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    magic, version, code, sequences, bounds = struct.unpack("<9sQBQQ", index[:34])
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    dtype = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[code]
    arrays = index[34:]
    assert len(arrays) == 12 * sequences + 8 * bounds
    lengths = np.frombuffer(arrays, "<i4", sequences)
    pointers = np.frombuffer(arrays, "<i8", sequences, 4 * sequences)
    ends = np.frombuffer(arrays, "<i8", bounds, 12 * sequences)
    assert (ends == np.arange(sequences + 1)).all(), "documents of other sequences"
    width = np.dtype(dtype).itemsize
    assert (lengths >= 0).all()
    assert (pointers >= 0).all()
    assert (pointers % width == 0).all()
    assert int(lengths.sum()) * width == len(data), "some tokens are in no document"
    assert int(max(lengths * width + pointers, default=0)) <= len(data)
    return [
        np.frombuffer(data, dtype, n, start) for n, start in zip(lengths, pointers, strict=True)
    ]


def expected_samples(folder: Path) -> list[dict[str, torch.Tensor]]:
    documents = documents_by_pointer(folder / "data")
    with tempfile.TemporaryDirectory() as fresh:
        prefix = write_token_files(Path(fresh) / "data", documents, documents[0].dtype.type)
        return samples_of(Path(prefix), Path(fresh) / "cache")


def make_cache(folder: Path) -> None:
    make_tokens(folder)
    samples_of(folder / "data", folder / "cache")


# Text


@functools.cache
def sentencepiece_model() -> Path:
    return train_small_tokenizer(Path(tempfile.mkdtemp()))


def make_lines(name: str, folder: Path) -> None:
    path = write_jsonl(
        folder / "text.jsonl", [f"document {n} {t}" for n, t in enumerate(NASTY_TEXTS)]
    )
    if name.endswith(".gz"):
        (folder / name).write_bytes(gzip.compress(path.read_bytes()))
    elif name.endswith(".zst"):
        import zstandard

        (folder / name).write_bytes(zstandard.compress(path.read_bytes()))
    elif name.endswith(".parquet"):
        rows = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        pa.parquet.write_table(pa.table({"text": rows}), folder / name)
    if name != path.name:
        path.unlink()


def tokenized(name: str, folder: Path) -> list[np.ndarray]:
    """The documents that the tool makes of a file; outputs are not in its folder."""
    with tempfile.TemporaryDirectory() as out:
        prefix = f"{out}/made"
        model = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model"]
        flags = ["--input", str(folder / name), "--output-prefix", prefix]
        args = preprocess.parse_arguments([*model, str(sentencepiece_model()), *flags])
        args.workers = 0  # encodes in this process
        preprocess.preprocess(args)
        made = IndexedDataset(f"{prefix}_text_document")
        return [made[n].copy() for n in range(len(made))]


def decompressed(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix == ".zst":
        import zstandard

        return (
            zstandard.ZstdDecompressor()
            .stream_reader(io.BytesIO(data), read_across_frames=True)
            .read()
        )
    return data


def expected_documents(name: str, folder: Path) -> list[np.ndarray]:
    if name.endswith(".parquet"):
        texts = pa.parquet.read_table(folder / name)["text"].to_pylist()
    else:
        lines = decompressed(folder / name).split(b"\n")
        texts = [
            json.loads(line.removeprefix(b"\xef\xbb\xbf"))["text"] for line in lines if line.strip()
        ]
    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model()))
    return [np.array(library.encode(text), np.uint16) for text in texts if text]


def lines_kind(name: str, draws: int) -> Kind:
    return Kind(
        make=functools.partial(make_lines, name),
        read=functools.partial(tokenized, name),
        expected=functools.partial(expected_documents, name),
        draws=draws,
    )


# Chats


@functools.cache
def chat_tokenizer():
    folder = write_tokenizer(Path(tempfile.mkdtemp()))
    return build_tokenizer("HuggingFaceTokenizer", model=folder, parse_special_tokens=True)


def make_chats(folder: Path) -> None:
    write_chats(folder / "chats.jsonl", [*CHATS.values(), {"prompt": "2+2=", "completion": "4"}])


def make_saved_chats(folder: Path) -> None:
    """As ``datasets.save_to_disk`` writes them."""
    (folder / "saved").mkdir()
    rows = [{"messages": CHATS["turns"]["messages"]}, {"messages": CHATS["thinking"]["messages"]}]
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(folder / "saved/data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    (folder / "saved/state.json").write_text(json.dumps(state))
    (folder / "saved/dataset_info.json").write_text(json.dumps({"features": {}}))


def tokens_of_chats(name: str, folder: Path) -> list:
    data = DataConfig(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=None,
        data_path=(str(folder / name),),
        data_cache_path=str(folder / "cache"),
        split="1",
        sft=True,
        long_samples="truncate",
        num_workers=0,
    )
    tokenizer = chat_tokenizer()
    train = build_datasets(data, tokenizer, seq_length=512, num_samples=(4, 0, 0), seed=1).train
    return [train._chats.chat(number)[0] for number in range(len(train._chats))]


def expected_chats(name: str, folder: Path) -> list:
    lines = (folder / name).read_bytes().split(b"\n")
    return rendered(line.removeprefix(b"\xef\xbb\xbf").decode() for line in lines if line.strip())


def expected_saved_chats(folder: Path) -> list:
    with (folder / "saved/data-00000-of-00001.arrow").open("rb") as file:
        table = pa.ipc.open_stream(file).read_all()
    table.validate(full=True)
    return rendered(map(json.dumps, table.to_pylist()))


def rendered(records: Iterable[str]) -> list:
    """Tokens of the chats as transformers makes them."""
    library, found = chat_tokenizer()._tokenizer.tokenizer, []
    for record in records:
        chat = parse_chat(record)
        if chat.texts:
            prompt, completion = (
                library.encode(text, add_special_tokens=False) for text in chat.texts
            )
            found.append([*prompt, *completion, chat_tokenizer().eod])
        else:
            found.append(
                library.apply_chat_template(
                    chat.messages, tools=chat.tools, return_dict=False, **chat.template_kwargs
                )
            )
    return found


# Hugging Face folders


def make_model(folder: Path) -> None:
    save_model("qwen3", folder / "model", shard_size="60KB")
    assert len(list((folder / "model").glob("*.safetensors"))) > 1


def imported_and_exported(folder: Path) -> dict:
    """In a process without ranks, as that of the tool."""
    alone = mock.patch.object(dist, "is_initialized", return_value=False)
    with tempfile.TemporaryDirectory() as out, alone:
        saved, again = Path(out) / "checkpoint", Path(out) / "again"
        Import.open(folder / "model").write(saved, lambda _: None)
        Export.open(saved, dtype=None).write(again, lambda _: None, max_shard_bytes=10**9)
        return described(again)


def described(folder: Path) -> dict:
    """Tensors and what transformers reads in config.json."""
    weights = {}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        for name, file in json.loads(index.read_text())["weight_map"].items():
            weights[name] = load_file(folder / file)[name]
    else:
        weights = load_file(folder / "model.safetensors")
    config = AutoConfig.from_pretrained(folder)
    names = (
        *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("rms_norm_eps", "tie_word_embeddings", "initializer_range", "hidden_act"),
        *("sliding_window", "attention_bias"),
    )
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "factor": 1.0}
    rope |= {k: v for k, v in config.rope_parameters.items() if v is not None}
    return {"weights": weights, "rope": rope} | {n: getattr(config, n, None) for n in names}


# Checkpoints


def made_up(state, iteration: int) -> None:
    for shard in state.shards.shards(with_moments=True):
        for name, tensor in tensors_of(shard):
            generator = torch.Generator().manual_seed(len(name) + iteration)
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


@functools.cache
def the_run():
    return small_run(Split())


def make_checkpoint(with_checksums: bool, folder: Path) -> None:
    run = the_run()
    made_up(run.state, 1)
    save_checkpoint(
        folder / "c", run.state, Progress(iteration=2, consumed_samples=8),
        provenance=Provenance(run_id="a"),
    )  # fmt: skip
    if not with_checksums:
        (folder / "c/iter_0000002" / CHECKSUMS).unlink()


def loaded(folder: Path) -> dict:
    run, path = the_run(), str(folder / "c")
    made_up(run.state, 2)
    progress = load_checkpoint(CheckpointConfig(load=path, save=path), run.state, seed=3)
    tensors = {
        name: tensor.clone()
        for shard in run.state.shards.shards(with_moments=True)
        for name, tensor in tensors_of(shard)
    }
    return {
        "tensors": tensors,
        "progress": (progress.iteration, progress.consumed_samples, progress.data_start),
        "schedule": run.state.scheduler.num_steps,
        "random": (random.random(), np.random.random(), torch.rand(2)),
    }


# Tokenizers


def make_tokenizer(folder: Path) -> None:
    write_tokenizer(folder / "tokenizer")


def ids_by_tokenizer(folder: Path) -> list[int]:
    return build_tokenizer("HuggingFaceTokenizer", model=str(folder / "tokenizer")).tokenize(TEXT)


def ids_by_file(folder: Path) -> list[int]:
    library = Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    library.encode_special_tokens = True
    return library.encode(TEXT, add_special_tokens=False).ids


def make_sentencepiece(folder: Path) -> None:
    shutil.copy(sentencepiece_model(), folder / "tokenizer.model")


def ids_by_sentencepiece(folder: Path) -> list[int]:
    model = str(folder / "tokenizer.model")
    return build_tokenizer("SentencePieceTokenizer", model=model).tokenize(TEXT)


def expected_sentencepiece(folder: Path) -> list[int]:
    model = str(folder / "tokenizer.model")
    return sentencepiece.SentencePieceProcessor(model_file=model).encode(TEXT)


KINDS = {
    "token files": Kind(make=make_tokens, read=lambda f: samples_of(f / "data", f / "cache"),
                        expected=expected_samples, draws=2500),
    "index cache": Kind(make=make_cache, read=lambda f: samples_of(f / "data", f / "cache"),
                        mutated=lambda name: name.startswith("cache/"), draws=500),
    "lines of JSON": lines_kind("text.jsonl", 1500),
    "gzip": lines_kind("text.jsonl.gz", 300),
    "zstd": lines_kind("text.jsonl.zst", 300),
    "Parquet": lines_kind("text.parquet", 300),
    "chats": Kind(make=make_chats, read=functools.partial(tokens_of_chats, "chats.jsonl"),
                  expected=functools.partial(expected_chats, "chats.jsonl"), draws=1500),
    "saved chats": Kind(make=make_saved_chats, read=functools.partial(tokens_of_chats, "saved"),
                        expected=expected_saved_chats, draws=500),
    "weights and config": Kind(make=make_model, read=imported_and_exported,
                               expected=lambda folder: described(folder / "model"),
                               mutated=lambda name: "generation" not in name, draws=1000,
                               of_folder=True),
    "checkpoint": Kind(make=functools.partial(make_checkpoint, True), read=loaded, draws=500,
                       of_folder=True),
    "checkpoint without checksums": Kind(
        make=functools.partial(make_checkpoint, False), read=loaded, draws=500, of_folder=True,
        mutated=lambda name: not name.endswith(".distcp")),  # whose bytes nothing else guards
    "tokenizer": Kind(make=make_tokenizer, read=ids_by_tokenizer, expected=ids_by_file, draws=800,
                      of_folder=True),
    "SentencePiece": Kind(make=make_sentencepiece, read=ids_by_sentencepiece,
                          expected=expected_sentencepiece, draws=300),
}  # fmt: skip


def read_mutated(group, name: str, seed: int, numbers: range, root: Path) -> Counter[str]:
    """Mutate files of a kind so often, in this process; how many were refused and accepted.

    Raises:
        Fault: with the first few mutations that were neither.
    """
    kind, folder, faults, counts = KINDS[name], root / "files", [], Counter()
    folder.mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
        kind.make(folder)
        files, before = tree(folder), kind.read(folder)
        for number in numbers:
            mutation = Mutation.draw(
                files, [*filter(kind.mutated, files)], random.Random(f"{name} {seed} {number}")
            )
            (root / "last").write_text(f"{number}: {mutation}")  # if this process crashes
            shutil.rmtree(folder)  # in the same place, which is part of some names
            write_files(folder, files, mutation)
            try:
                counts[_outcome(kind, folder, mutation, before)] += 1
            except Fault as fault:
                faults.append(f"{name}, {number} of seed {seed}, {mutation}: {fault}")
    if faults:
        raise Fault(f"{len(faults)} faults, first\n" + "\n".join(faults[:5]))
    return counts


def _outcome(kind: Kind, folder: Path, mutation: Mutation, before: Any) -> str:
    found = []
    if refusal(lambda: found.append(kind.read(folder)), kind.names(mutation.name, folder)):
        return "refused"
    try:
        expected = before if kind.expected is None else kind.expected(folder)
    except Exception as error:
        raise Fault(f"accepted, and no one else reads it: {error!r:.300}") from error
    if not same(found[0], expected):
        raise Fault(f"read as {found[0]!r:.300}, which is {expected!r:.300}")
    return "accepted"


def mutate_often(name: str, count: int, seed: int, root: Path) -> Counter[str]:
    """The same in a process of its own, which a damaged file may crash."""
    try:
        (counts,) = run_on_ranks(read_mutated, 1, name, seed, range(count), root, timeout=3000)
    except RankFailure as failure:
        last = (root / "last").read_text() if (root / "last").exists() else "none"
        raise Fault(f"{failure}\nlast mutation: {last}") from failure
    return counts


@pytest.mark.parametrize("name", KINDS)
def test_mutated_files_are_refused_or_read_as_they_are(name, fault_seed, tmp_path):
    assert mutate_often(name, 25, fault_seed, tmp_path).total() == 25


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", KINDS)
def test_many_mutated_files_are_refused_or_read_as_they_are(name, fault_seed, tmp_path):
    counts = mutate_often(name, KINDS[name].draws, fault_seed, tmp_path)
    assert min(counts["refused"], counts["accepted"]) > 0, counts


def test_there_are_ten_thousand_mutations():
    assert sum(kind.draws for kind in KINDS.values()) >= 10_000
