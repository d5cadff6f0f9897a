"""There and back, bit for bit, in bounded memory; and what is refused."""

import json
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_untied.checkpoint import global_tensor, read_model_config
from megatron_untied.checkpoint.global_tensor import TensorReader
from megatron_untied.hf import Export, Import
from megatron_untied.hf.folder import INDEX, SafetensorsFolder
from tests.support.hf_conversion import convert, convert_back
from tests.support.hf_models import FAMILIES, save_model


def tensors(folder):
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype, name
        assert torch.equal(found[name], x), name


def edit(folder, change):
    """Rewrite a folder's one file of tensors."""
    held = tensors(folder)
    change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model("llama2", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(tmp_path, llama):
    """A copy to spoil."""
    return shutil.copytree(llama, tmp_path / "hf")


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_equal_bit_for_bit(tmp_path, monkeypatch, family):
    # Blocks that end inside of heads, and shards that end between the tensors of a layer.
    monkeypatch.setattr(global_tensor, "BLOCK_ELEMENTS", 333)
    source = save_model(family, tmp_path / "hf", shard_size="100KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    back = convert_back(convert(source, tmp_path / "save"), tmp_path / "back", None, 70_000)
    assert len(list(back.glob("*.safetensors"))) > 1
    assert_same(tensors(back), tensors(source))
    config, before = (json.loads((f / "config.json").read_text()) for f in (back, source))
    assert config["architectures"] == before["architectures"]


def test_dtypes_are_kept_or_changed(tmp_path):
    source = save_model("qwen3", tmp_path / "hf", dtype=torch.bfloat16)
    expected = tensors(source)
    kept = convert(source, tmp_path / "kept")
    assert_same(tensors(convert_back(kept, tmp_path / "back")), expected)
    widened = convert(source, tmp_path / "widened", torch.float32)
    wide = tensors(convert_back(widened, tmp_path / "wide"))
    assert_same(wide, {name: x.float() for name, x in expected.items()})
    narrow = convert_back(widened, tmp_path / "narrow", torch.bfloat16)
    assert_same(tensors(narrow), expected)
    assert json.loads((narrow / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_few_tensors_may_be_wider_than_the_rest(tmp_path, folder):
    def narrow_all_but_norms(held):
        held |= {name: x.bfloat16() for name, x in held.items() if "norm" not in name}

    edit(folder, narrow_all_but_norms)
    back = convert_back(convert(folder, tmp_path / "save"), tmp_path / "back")
    assert_same(tensors(back), tensors(folder))
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_rejects_two_dtypes_that_become_one_tensor(folder):
    q, k = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qk")
    edit(folder, lambda held: held.update({k: held[k].bfloat16()}))
    message = f"{q} is torch.float32 and {k} torch.bfloat16, but they become one tensor; give --dt"
    with pytest.raises(ValueError, match=message):
        Import.open(folder)
    Import.open(folder, torch.float32)


@pytest.mark.parametrize("stale", ["a.safetensors", "z.safetensors"])
def test_a_stale_copy_of_a_tensor_is_not_converted(tmp_path, folder, stale):
    name, expected = "model.layers.0.self_attn.q_proj.weight", tensors(folder)
    others = {key: x for key, x in expected.items() if key != name}
    save_file(others | {name: torch.zeros_like(expected[name])}, folder / stale)
    (folder / "model.safetensors").rename(folder / "m.safetensors")
    weight_map = dict.fromkeys(expected, stale) | {name: "m.safetensors"}
    in_order = dict(sorted(weight_map.items(), key=lambda item: item[1]))
    (folder / INDEX).write_text(json.dumps({"weight_map": in_order}))
    back = convert_back(convert(folder, tmp_path / "save"), tmp_path / "back")
    assert_same(tensors(back), expected)


def test_one_block_is_alive_at_a_time(tmp_path, monkeypatch, llama):
    monkeypatch.setattr(global_tensor, "BLOCK_ELEMENTS", 500)
    blocks, most_alive, rows, read = [], [], SafetensorsFolder.rows, TensorReader.read

    def count(block):
        blocks.append(weakref.ref(block))
        most_alive.append(sum(one() is not None for one in blocks))
        assert block.numel() <= 500
        return block

    def count_targets(reader, wanted):
        (tensor,) = wanted.values()
        count(next(iter(tensor.slices.values()))._base)
        read(reader, wanted)

    monkeypatch.setattr(SafetensorsFolder, "rows", lambda *where: count(rows(*where)))
    monkeypatch.setattr(TensorReader, "read", count_targets)
    save = convert(llama, tmp_path / "save")
    assert len(blocks) > 100
    assert max(most_alive) == 1
    blocks.clear(), most_alive.clear()
    convert_back(save, tmp_path / "back")
    assert len(blocks) > 100
    assert max(most_alive) <= 2  # the last one is let go when the next is made


def test_progress_adds_up_to_what_is_written(tmp_path, llama):
    done = []
    source = Import.open(llama, torch.bfloat16)
    source.write(tmp_path / "save", done.append)
    written = sum(x.nbytes // 2 for x in tensors(llama).values())
    assert sum(done) == source.num_bytes == written
    done.clear()
    export = Export.open(tmp_path / "save")
    export.write(tmp_path / "back", done.append, max_shard_bytes=10**9)
    assert sum(done) == export.num_bytes == written


def test_the_checkpoint_carries_its_architecture_and_small_files(tmp_path, folder):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("not a tokenizer")
    save = convert(folder, tmp_path / "save")
    assert read_model_config(save) == Import.open(folder).model
    kept = sorted(path.name for path in (save / "tokenizer").iterdir())
    assert kept == ["config.json", "generation_config.json", "tokenizer.json"]
    back = convert_back(save, tmp_path / "back")
    assert (back / "tokenizer.json").read_text() == "{}"
    assert json.loads((back / "config.json").read_text())["eos_token_id"] == 2


def test_old_rotary_buffers_and_a_second_copy_of_tied_embeddings_are_left_out(tmp_path):
    source = save_model("llama3.2-tied", tmp_path / "hf")
    expected = tensors(source)

    def add(held):
        held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()

    edit(source, add)
    back = convert_back(convert(source, tmp_path / "save"), tmp_path / "back")
    assert_same(tensors(back), expected)
    edit(source, lambda held: held["lm_head.weight"][-1, -1].add_(1))
    with pytest.raises(ValueError, match="config.json ties the embeddings .* lm_head.weight is th"):
        Import.open(source)


def test_rejects_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="llama is no folder; download the model"):
        Import.open(tmp_path / "llama")


def test_rejects_a_folder_without_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json is missing: .* no Hugging Face model folder"):
        Import.open(folder)


def test_rejects_config_that_is_not_json(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        Import.open(folder)


def test_rejects_tensors_that_do_not_fit_the_config(folder):
    norm = "model.norm.weight"
    edit(folder, lambda held: held.update({norm: torch.ones(33), "extra": torch.ones(2)}))
    message = r"not in the model: extra; of another shape: model.norm.weight \[33\] instead of \[3"
    with pytest.raises(ValueError, match=message):
        Import.open(folder)


def test_rejects_to_write_over_something(tmp_path, llama):
    save = convert(llama, tmp_path / "save")
    with pytest.raises(ValueError, match="save holds checkpoints already; give another --save"):
        convert(llama, save)
    with pytest.raises(ValueError, match="exists and is not empty; give another"):
        convert_back(save, llama)
    convert_back(save, tmp_path / "back")


def test_an_interrupted_conversion_leaves_no_result(tmp_path, llama):
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Import.open(llama).write(tmp_path / "save", interrupt)
    assert not any((tmp_path / "save").glob("iter_*"))
    with pytest.raises(ValueError, match="--load .*save has no checkpoint; check the path"):
        Export.open(tmp_path / "save")
    convert(llama, tmp_path / "save")
    with pytest.raises(KeyboardInterrupt):
        Export.open(tmp_path / "save").write(tmp_path / "back", interrupt, max_shard_bytes=10**9)
    assert not (tmp_path / "back").exists()
    convert_back(tmp_path / "save", tmp_path / "back")
    assert not (tmp_path / "back.incomplete").exists()


def test_rejects_a_checkpoint_of_another_model(tmp_path, llama):
    save = convert(llama, tmp_path / "save")
    path = save / "iter_0000000" / "run_config.json"
    config = json.loads(path.read_text())
    config["model"]["num_layers"] = 3
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="decoder.layers.2.input_layernorm.weight is missing"):
        Export.open(save)
