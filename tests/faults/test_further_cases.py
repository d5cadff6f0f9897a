"""Files, typos and clusters as they come: nothing is wrong in silence, and each message helps.

Cases of the kinds that other tests cover one by one, made up by someone who did not write the code.
"""

import bz2
import io
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_untied.checkpoint.directory import TRACKER, find_checkpoint, iteration_folder
from megatron_untied.commands import convert, plan, preprocess, train_tokenizer
from megatron_untied.data.indexed_files import open_indexed_files
from megatron_untied.data.indexed_writer import IndexedWriter
from megatron_untied.training.initialize import UserError, read_launch

LINES = "".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(5)).encode()
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "50"]
EOD = "<|endoftext|>"


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    """A folder of a byte-level tokenizer of 257 tokens."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(EOD, special=True, normalized=False)])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOD}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def change(file: Path, **values) -> None:
    """Set fields of a JSON file; a dict changes the one that is there."""
    content = json.loads(file.read_text())
    for name, value in values.items():
        merged = content[name] | value if isinstance(value, dict) and content[name] else value
        content[name] = merged
    file.write_text(json.dumps(content))


def tokenized(tokenizer: Path, out: Path, *arguments: str | Path) -> list[np.ndarray]:
    """The documents that the tool makes."""
    model = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer]
    preprocess.main(list(map(str, [*model, "--output-prefix", out, *arguments])))
    made = IndexedDataset(f"{out}_text_document")
    return [made[n].copy() for n in range(len(made))]


def refused(tokenizer: Path, out: Path, *arguments: str | Path) -> str:
    """The one line with which the tool ends."""
    with pytest.raises(SystemExit) as ended:
        tokenized(tokenizer, out, *arguments)
    assert not Path(f"{out}_text_document.idx").exists()
    assert "\n" not in str(ended.value.code)
    return str(ended.value.code)


# Input of preprocessing


@pytest.mark.parametrize("name", ["a.JSONL", "a.Json", "a.NDJSON"])
def test_lines_of_json_are_known_by_any_spelling_of_the_ending(tokenizer, tmp_path, name):
    (tmp_path / name).write_bytes(LINES)
    assert len(tokenized(tokenizer, tmp_path / "out", "--input", tmp_path / name)) == 5


@pytest.mark.parametrize("name", ["part-00000", "a.jsonl.txt", "a.jsonl.bak"])
def test_lines_of_json_under_another_name_are_not_one_document(tokenizer, tmp_path, name):
    (tmp_path / name).write_bytes(LINES)
    said = refused(tokenizer, tmp_path / "out", "--input", tmp_path / name)
    assert f"{tmp_path / name}: the content is lines of JSON: rename it to end in .jsonl" in said


def test_prose_that_shows_json_is_a_document(tokenizer, tmp_path):
    (tmp_path / "a.md").write_text('Write {"text": "a"} on each line.\n{"text": "b"}\n')
    (tmp_path / "b.map").write_text('{"version": 3, "mappings": "text"}\n')
    inputs = [tmp_path / "a.md", tmp_path / "b.map"]
    assert len(tokenized(tokenizer, tmp_path / "out", "--input", *inputs)) == 2


def zipped(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jsonl", content)
    return file.getvalue()


@pytest.mark.parametrize(
    ("ending", "compress"), [(".bz2", bz2.compress), (".xz", lzma.compress), (".zip", zipped)]
)
def test_an_archive_is_not_mended_into_text(tokenizer, tmp_path, ending, compress):
    file = tmp_path / f"a.jsonl{ending}"
    file.write_bytes(compress(LINES))
    said = refused(tokenizer, tmp_path / "out", "--input", file)
    assert f"the content is that of a {ending} file: decompress it" in said
    said = refused(tokenizer, tmp_path / "out", "--on-bad-line", "replace", "--input", file)
    assert "no document has a token" in said


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "a.jsonl.gz"])
def test_an_lfs_pointer_is_no_document(tokenizer, tmp_path, name):
    (tmp_path / name).write_bytes(LFS_POINTER)
    said = refused(tokenizer, tmp_path / "out", "--input", tmp_path / name)
    assert f"{tmp_path / name} is a Git LFS pointer" in said


def test_the_damaged_part_of_a_parquet_file_is_a_bad_line(tokenizer, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    rows = pa.table({"text": [f"text {n} " * 50 for n in range(3000)]})
    pq.write_table(rows, file, row_group_size=500, compression="snappy")
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = b"\xff" * 400
    file.write_bytes(content)
    said = refused(tokenizer, tmp_path / "out", "--input", file)
    assert re.search(rf"{file}:\d+: the data is damaged or cut short .* the rest of the file", said)
    flags = ["--on-bad-line", "skip", "--input", file]
    assert 500 <= len(tokenized(tokenizer, tmp_path / "skipped", *flags)) < 3000


def test_token_files_of_an_earlier_run_are_no_documents(tokenizer, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(LINES)
    assert len(tokenized(tokenizer, folder / "out", "--input", folder)) == 5
    with pytest.raises(SystemExit, match=r"holds token files .*out_text_document.idx.*\*.jsonl"):
        tokenized(tokenizer, folder / "out", "--on-bad-line", "skip", "--input", folder)
    assert len(open_indexed_files(f"{folder / 'out'}_text_document").lengths) == 5


def test_a_link_without_its_target_is_not_left_out(tokenizer, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").symlink_to(tmp_path / "blobs/7")
    (folder / "b.jsonl").write_bytes(LINES)
    said = refused(tokenizer, tmp_path / "out", "--input", folder)
    assert f"{folder / 'a.jsonl'} is a link to {tmp_path / 'blobs/7'}, which is not there" in said


def test_an_output_that_cannot_be_made_names_its_flag(tokenizer, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    out = tmp_path / "a.jsonl/out"
    with pytest.raises(SystemExit, match=f"--output-prefix {out.parent}: .* can be written to"):
        tokenized(tokenizer, out, "--input", tmp_path / "a.jsonl")
    flags = [
        "--input",
        str(tmp_path / "a.jsonl"),
        "--vocab-size",
        "300",
        "--model-prefix",
        str(out),
    ]
    with pytest.raises(SystemExit, match=f"--model-prefix {out.parent}: .* can be written to"):
        train_tokenizer.main(flags)


def test_sigterm_keeps_the_finished_part(tmp_path):
    file, marker = tmp_path / "a.jsonl", tmp_path / "started"
    numbers = " ".join(["7"] * 20_000)
    file.write_text(f'{{"text": "{numbers}"}}\n' * 50)
    code = (
        "import sys; from megatron_untied.commands import preprocess as p\n"
        "add = p.IndexedWriter.add\n"
        "def told(self, ids):\n"
        "    add(self, ids)\n"
        # The first one is finished. Not open(): Python drops what a signal's handler raises while
        # a file that nobody closed is freed, and the signal comes at that moment.
        "    if self.num_documents == 2: p.Path(sys.argv[1]).touch()\n"
        f"p.IndexedWriter.add = told; p.main({NULL!r} + ['--output-prefix', 'out', '--input', "
        "'a.jsonl', 'slow.jsonl'])"
    )
    (tmp_path / "slow.jsonl").write_text(f'{{"text": "{numbers}"}}\n' * 3000)
    process = subprocess.Popen(
        [sys.executable, "-c", code, marker],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    while not marker.exists():
        assert process.poll() is None, process.stderr.read()
    os.killpg(process.pid, signal.SIGTERM)  # as a batch system does, with its workers
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "terminated" in errors
    assert "Traceback" not in errors
    assert "--resume goes on from there" in errors
    kept = open_indexed_files(str(tmp_path / "out_text_document.incomplete"))
    assert 1 <= len(kept.lengths) < 3050


# Tokenizers


def test_truncation_and_padding_of_a_tokenizer_do_not_reach_documents(tokenizer, tmp_path):
    file = tokenizer / "tokenizer.json"
    shorten = {"direction": "Right", "max_length": 128, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 9000}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    change(file, truncation=shorten, padding=pad)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "hello 123 " * 200}) + "\n")
    (ids,) = tokenized(tokenizer, tmp_path / "out", "--input", tmp_path / "a.jsonl")
    assert len(ids) == 2000


def test_a_tokenizer_with_dropout_is_refused(tokenizer, tmp_path):
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    merged = {"vocab": vocabulary | {"he": 257}, "merges": [["h", "e"]], "dropout": 0.3}
    change(tokenizer / "tokenizer.json", model=merged)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    said = refused(tokenizer, tmp_path / "out", "--input", tmp_path / "a.jsonl")
    assert "tokenizer.json has a dropout of 0.3" in said


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tokenizer.model"])
def test_an_lfs_pointer_is_no_tokenizer(tokenizer, tmp_path, name):
    (tokenizer / name).write_bytes(LFS_POINTER)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    said = refused(tokenizer, tmp_path / "out", "--input", tmp_path / "a.jsonl")
    assert f"{tokenizer / name} is a Git LFS pointer" in said


def test_an_end_of_document_that_is_no_special_token_stays_text(tokenizer, tmp_path):
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    content["added_tokens"][0]["special"] = False
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": f"a {EOD} b"}) + "\n")
    (ids,) = tokenized(tokenizer, tmp_path / "out", "--append-eod", "--input", tmp_path / "a.jsonl")
    assert list(ids == 256) == [False] * (len(ids) - 1) + [True]


# Token files and checkpoints


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_an_lfs_pointer_is_no_token_file(tmp_path, ending):
    writer = IndexedWriter(str(tmp_path / "a"), np.uint16)
    writer.add(np.arange(20, dtype=np.uint16))
    writer.finish()
    writer.publish()
    (tmp_path / f"a{ending}").write_bytes(LFS_POINTER)
    with pytest.raises(ValueError, match=f"a{ending} is a Git LFS pointer.*git lfs pull"):
        open_indexed_files(str(tmp_path / "a"))


def test_a_checkpoint_in_place_of_the_folder_of_all_is_not_random_weights(tmp_path):
    folder = iteration_folder(tmp_path, 20)
    folder.mkdir()
    with pytest.raises(ValueError, match=f"is one checkpoint; .*{tmp_path}, with --ckpt-step 20"):
        find_checkpoint(folder)
    tracker = tmp_path / TRACKER
    tracker.write_text("20\n")
    assert find_checkpoint(tmp_path) == folder
    with pytest.raises(ValueError, match=f"{tracker} is a file; give the folder"):
        find_checkpoint(tracker)


# Hugging Face folders


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A small Llama."""
    folder = tmp_path_factory.mktemp("hf") / "llama"
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    config = AutoConfig.for_model("llama", **sizes, **heads, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def imported(folder: Path, *flags: str) -> str:
    """What the import ends with; '' if it succeeds."""
    save = folder.with_name(f"{folder.name}-imported")
    command = ["hf-to-megatron", "--hf-path", str(folder), "--save", str(save), *flags]
    try:
        convert.main(command)
    except SystemExit as ended:
        assert not (save / TRACKER).exists()
        return str(ended.code)
    return ""


def variant(published: Path, tmp_path: Path, **fields: object) -> Path:
    folder = tmp_path / "variant"
    shutil.copytree(published, folder)
    change(folder / "config.json", **fields)
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_imported(published, tmp_path, value):
    folder = variant(published, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "model.norm.weight holds NaN or infinity" in imported(folder)


def test_weights_too_large_for_a_dtype_are_not_infinite_in_it(published, tmp_path):
    folder = variant(published, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = 1e5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "holds NaN or infinity as torch.float16" in imported(folder, "--dtype", "fp16")
    assert imported(folder, "--dtype", "bf16") == ""


def test_a_model_type_that_contradicts_the_architecture_is_named(published, tmp_path):
    said = imported(variant(published, tmp_path, model_type="mistral"))
    assert "architectures are ['LlamaForCausalLM'], and model_type 'mistral' is Mistral" in said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", "2"),
        ("hidden_size", 16.0),
        ("vocab_size", [60]),
        ("rms_norm_eps", "1e-5"),
        ("tie_word_embeddings", "false"),
        ("rope_parameters", {"rope_theta": "10000"}),
    ],
)
def test_a_field_of_another_type_is_named(published, tmp_path, field, value):
    said = imported(variant(published, tmp_path, **{field: value}))
    assert re.search("(rope_theta|" + field + r") is .*, not of type \w+; correct it", said)


def test_a_folder_of_links_whose_blobs_are_elsewhere(published, tmp_path):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for file in published.iterdir():
        (folder / file.name).symlink_to(file)
    assert imported(folder) == ""
    weights = folder / "model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / "blobs/1")
    shutil.rmtree(tmp_path / "snapshot-imported")
    assert f"{weights} is a link to {tmp_path / 'blobs/1'}, which is not there" in imported(folder)


def test_weights_are_not_exported_as_infinite(published, tmp_path):
    folder = variant(published, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = torch.finfo(torch.float16).max * 2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert imported(folder) == ""
    out = tmp_path / "out"
    command = ["megatron-to-hf", "--load", f"{folder}-imported", "--hf-path", str(out)]
    with pytest.raises(SystemExit, match="holds NaN or infinity as torch.float16"):
        convert.main([*command, "--dtype", "fp16"])
    assert not out.exists()


# Clusters and planning


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK not set"),  # Kubeflow: of a node
        ({"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK 5, WORLD_SIZE 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "a"}, "MASTER_PORT a"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "70000"}, "70000"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": ""}, "ADDR not set"),
        ({"RANK": "zero", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "RANK zero"),
    ],
)
def test_an_environment_that_gives_no_rank_is_refused_at_once(monkeypatch, variables, said):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    usual = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in (usual | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"gives this process no rank: .*{said}.*torchrun"):
        read_launch()


PLANNED = [
    *("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 1024".split()),
    "--gpus-per-node",
    "1",
]


@pytest.mark.parametrize("flags", [[], ["--max-context"], ["--recompute-granularity", "full"]])
def test_a_head_wider_than_the_kernel_is_one_line(flags, capsys):
    assert plan.main([*PLANNED, "--kv-channels", "512", *flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--kv-channels 512" in said
    assert "up to 256 channels" in said


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_a_file_of_the_planner_that_cannot_be_written_names_its_flag(flag, tmp_path, capsys):
    path = tmp_path / "none/plan.png"
    assert plan.main([*PLANNED, flag, str(path)]) == 2
    assert f"error: {flag} {path} cannot be written" in capsys.readouterr().err
