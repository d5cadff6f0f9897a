"""No file that a user points at is executed, and no name in one leads out of its folder."""

import ast
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_untied.checkpoint.compatibility import TensorFiles
from megatron_untied.checkpoint.global_tensor import GlobalTensor, TensorReader, write_tensors
from megatron_untied.checkpoint.index import INDEX, read_index
from megatron_untied.checkpoint.random_state import read_random_state
from megatron_untied.checkpoint.run_config import read_provenance
from megatron_untied.data.chats import chat_files
from megatron_untied.data.index_cache import cached_arrays
from megatron_untied.data.tokenizers import build_tokenizer
from megatron_untied.hf.config import model_config_from_hf
from megatron_untied.hf.folder import SafetensorsFolder, read_config
from megatron_untied.sharding.parameter_layout import GlobalSlice
from tests.support.chats import write_tokenizer
from tests.support.hf_models import save_model

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    *(ROOT / "megatron_untied").rglob("*.py"),
    *(ROOT / "tools").rglob("*.py"),
    *(ROOT / "benchmarks").rglob("*.py"),
    ROOT / "pretrain_gpt.py",
]
FORBIDDEN = {
    *("eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads"),
    *("dill.load", "joblib.load", "yaml.load", "shelve.open", "torch.jit.load", "torch.package"),
    *("dcp.FileSystemReader", "dcp.load_state_dict", "shutil.unpack_archive"),
}
ALLOWED = {
    # What ranks of one run tell each other through their store, which they trust.
    "megatron_untied/training/rendezvous.py": {"pickle.loads"},
}
METHODS = ("extractall", "read_pickle", "load_dataset", "load_from_disk")


def calls() -> list[tuple[str, ast.Call]]:
    """Every call in the sources, with its file."""
    found = []
    for path in SOURCES:
        nodes = ast.walk(ast.parse(path.read_text()))
        name = str(path.relative_to(ROOT))
        found += [(name, node) for node in nodes if isinstance(node, ast.Call)]
    return found


def keywords(call: ast.Call) -> dict[str, str]:
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg}


def test_nothing_in_the_sources_unpickles_a_file():
    loads = 0
    for file, call in calls():
        name, given, where = ast.unparse(call.func), keywords(call), f"{file}:{call.lineno}"
        assert name not in FORBIDDEN - ALLOWED.get(file, set()), where
        assert name.rpartition(".")[2] not in METHODS, where
        assert given.get("trust_remote_code", "False") == "False", where
        if name == "torch.load":
            loads += 1
            assert given.get("weights_only") == "True", where
        if name.endswith(("np.load", "numpy.load")):
            loads += 1
            assert given.get("allow_pickle", "False") == "False", where
        if name.startswith("AutoModel") and name.endswith("from_pretrained"):
            loads += 1
            assert given["trust_remote_code"] == "False", f"{where}: else it asks at the terminal"
            assert given["use_safetensors"] == "True", where
    assert loads >= 4, "the pattern finds what there is"


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


@pytest.fixture
def bait(tmp_path):
    """A folder that only a payload makes."""
    path = tmp_path / "executed"
    pickle.loads(pickle.dumps(Payload(path)))
    assert path.is_dir(), "the payload works"
    path.rmdir()
    yield path
    assert not path.exists(), "a payload was executed"


TENSORS = {"a": torch.arange(12.0).view(4, 3), "b": torch.ones(5)}


@pytest.fixture
def checkpoint(tmp_path):
    """The tensors of a checkpoint in a folder."""
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    parts = {n: [GlobalSlice((0,) * x.dim(), x)] for n, x in TENSORS.items()}
    write_tensors(folder, {n: GlobalTensor(TENSORS[n].shape, parts[n]) for n in TENSORS})
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    found = {name: torch.empty_like(x) for name, x in TENSORS.items()}
    parts = {n: [GlobalSlice((0,) * x.dim(), x)] for n, x in found.items()}
    TensorReader(folder).read({n: GlobalTensor(found[n].shape, parts[n]) for n in found})
    return found


def rewritten(folder: Path, change) -> None:
    """Write the index anew, changed."""
    index = read_index(folder)
    index.storage_meta = None  # it has a path, which is read as another class
    change(index)
    (folder / INDEX).write_bytes(pickle.dumps(index))


def test_an_index_is_read_as_dcp_reads_it(checkpoint):
    assert all(torch.equal(x, TENSORS[name]) for name, x in read(checkpoint).items())
    assert TensorFiles.open(checkpoint).shapes == {"a": (4, 3), "b": (5,)}
    unrestricted = pickle.loads((checkpoint / INDEX).read_bytes())
    index = read_index(checkpoint)
    assert index.storage_data == unrestricted.storage_data
    assert index.state_dict_metadata == unrestricted.state_dict_metadata


def of_bytes(index) -> None:
    """An entry whose file DCP unpickles."""
    index.state_dict_metadata["a"] = BytesStorageMetadata()


def moved(field: str, value) -> object:
    def change(index) -> None:
        key = next(key for key in index.storage_data if key.fqn == "a")
        setattr(index.storage_data[key], field, value)

    return change


def overlapping(index) -> None:
    (of_a, *_), (of_b, *_) = (
        [stored for key, stored in index.storage_data.items() if key.fqn == name] for name in "ab"
    )
    of_a.offset, of_a.relative_path = of_b.offset, of_b.relative_path


def with_a_hole(index) -> None:
    """Two slices over the same rows, and none over others: their sizes still add up."""
    first = index.state_dict_metadata["a"].chunks[0]
    key = next(key for key in index.storage_data if key.fqn == "a")
    first.sizes = torch.Size([2, 3])
    index.state_dict_metadata["a"].chunks.append(type(first)(torch.Size([1, 0]), first.sizes))
    stored = index.storage_data[key]
    half = type(stored)(stored.relative_path, stored.offset, stored.length // 2)
    rest = type(stored)(stored.relative_path, stored.offset + half.length, half.length)
    index.storage_data |= {key: half, type(key)("a", torch.Size([1, 0])): rest}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (of_bytes, "names 'torch.distributed.checkpoint.metadata.BytesStorageMetadata'"),
        (moved("relative_path", "../__0_0.distcp"), "which is not a file of the folder"),
        (moved("relative_path", "/etc/passwd"), "which is not a file of the folder"),
        (moved("offset", -1), "it places 'a' at -1"),
        (moved("length", True), "it places 'a' at"),
        (moved("transform_descriptors", ["zstd"]), "in a way that is not read here"),
        (overlapping, "two slices overlap in __0_0.distcp"),
        (with_a_hole, "'a' has 12 of 12 elements, or not each once"),
    ],
)
def test_an_index_that_does_not_hold_together_is_refused(checkpoint, change, said):
    rewritten(checkpoint, change)
    for reader in (TensorFiles.open, read):
        with pytest.raises(ValueError, match="is not a whole checkpoint") as caught:
            reader(checkpoint)
        assert said in str(caught.value)


def test_an_index_executes_nothing(checkpoint, bait):
    (checkpoint / INDEX).write_bytes(pickle.dumps(Payload(bait)))
    for reader in (TensorFiles.open, read):
        with pytest.raises(ValueError, match=r"it names 'posix\.mkdir', which no index has"):
            reader(checkpoint)


def test_other_files_execute_nothing(tmp_path, bait):
    torch.save(Payload(bait), tmp_path / "random_00000.pt")
    with pytest.raises(ValueError, match="random_00000.pt is damaged"):
        read_random_state(tmp_path, 0)
    cached_arrays(tmp_path, "k", ("a",), lambda: (np.arange(3),))
    np.save(tmp_path / "k-a.npy", np.array([Payload(bait)], object), allow_pickle=True)
    with pytest.raises(ValueError, match="k-a.npy is damaged or cannot be read"):
        cached_arrays(tmp_path, "k", ("a",), lambda: (np.arange(3),))


def test_code_beside_a_model_or_tokenizer_is_not_imported(tmp_path, bait):
    code = f"import os\nos.mkdir({str(bait)!r})\n"
    folder = save_model("llama2", tmp_path / "model")
    (folder / "code.py").write_text(code)
    config = read_config(folder) | {"auto_map": {"AutoModelForCausalLM": "code.Model"}}
    with pytest.raises(ValueError, match="fields that are not understood .*auto_map"):
        model_config_from_hf(config, "config.json")
    folder = Path(write_tokenizer(tmp_path / "tokenizer"))
    (folder / "code.py").write_text(code)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["code.Slow", "code.Fast"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert build_tokenizer("HuggingFaceTokenizer", model=str(folder)).tokenize("a b")


# Names that lead elsewhere


def test_the_id_of_a_run_is_no_path(tmp_path):
    """It is part of the name of the folder that the next checkpoint is written to."""
    (tmp_path / "run_config.json").write_text('{"provenance": {"run_id": "../../elsewhere/x"}}')
    with pytest.raises(ValueError, match="run_id '../../elsewhere/x' is no name of a run"):
        read_provenance(tmp_path)


def test_an_index_of_safetensors_names_files_of_its_folder(tmp_path):
    folder = save_model("llama2", tmp_path / "a", shard_size="20KB")
    outside = next(folder.glob("*.safetensors")).rename(tmp_path / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    for name in ("../outside.safetensors", str(outside)):
        placed = json.loads(index.read_text())
        placed["weight_map"] = dict.fromkeys(placed["weight_map"], name)
        index.write_text(json.dumps(placed))
        with pytest.raises(ValueError, match="which is not a file of its folder"):
            SafetensorsFolder(folder)


@pytest.mark.parametrize(
    "files",
    [None, "x", [], [{}], [{"filename": 1}], [{"filename": "../outside.arrow"}], [[]], ["a.arrow"]],
)
def test_a_saved_dataset_names_files_of_its_folder(tmp_path, files):
    table = pa.table({"messages": ["x"]})
    with pa.ipc.new_stream(tmp_path / "outside.arrow", table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/state.json").write_text(json.dumps({"_data_files": files}))
    with pytest.raises(ValueError, match="state.json lists no Arrow files of its folder"):
        chat_files([str(tmp_path / "saved")])
