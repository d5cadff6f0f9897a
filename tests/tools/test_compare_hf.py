"""The loss of a folder by transformers and by us: equal for what is right, not for what is not."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2TokenizerFast

from megatron_untied.commands import compare_hf
from tests.support.hf_models import save_model


def compare(folder, *flags: str) -> int:
    return compare_hf.main([str(folder), "--num-tokens", "32", *flags])


@pytest.mark.parametrize("family", ["llama3-wide-heads", "mistral", "qwen2.5", "qwen3"])
def test_agrees_for_every_family(tmp_path, capsys, family):
    assert compare(save_model(family, tmp_path)) == 0
    said = capsys.readouterr().out
    assert "agrees: " in said
    most, tolerated = map(float, re.search(r"agrees: (\S+) of at most (\S+) on 32", said).groups())
    assert most <= tolerated < 1e-3


def test_shares_tokens_between_ranks(tmp_path, capsys):
    assert compare(save_model("llama2", tmp_path), "--context-parallel-size", "2") == 0
    assert "on 32 tokens" in capsys.readouterr().out


def test_a_difference_is_found(tmp_path, capsys, monkeypatch):
    """Weights that transformers does not see: as an importer that misplaces a tensor would do."""
    folder = save_model("llama2", tmp_path)
    by_transformers = compare_hf.by_transformers

    def then_change(*arguments):
        answer = by_transformers(*arguments)
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        name = "model.layers.1.self_attn.k_proj.weight"
        tensors[name][:2] = tensors[name][:2].flip(0)
        save_file(tensors, file, metadata={"format": "pt"})
        return answer

    monkeypatch.setattr(compare_hf, "by_transformers", then_change)
    assert compare(folder) == 1
    assert "DIFFERS: " in capsys.readouterr().out


def test_compares_on_text_by_the_folders_tokenizer(tmp_path, capsys):
    folder, text = save_model("qwen2-tied", tmp_path / "hf"), tmp_path / "text.txt"
    vocabulary = {byte: number for number, byte in enumerate(sorted(ByteLevel.alphabet()))}
    end = {"<|endoftext|>": 256}
    Qwen2TokenizerFast(vocab=vocabulary | end, merges=[]).save_pretrained(folder)
    text.write_text("a text of more than thirty-two bytes")
    assert compare(folder, "--text-file", str(text)) == 0
    assert "on 32 tokens" in capsys.readouterr().out
    text.write_text("too short")
    assert compare(folder, "--text-file", str(text)) == 2
    assert "has 9 tokens, and 33 are needed" in capsys.readouterr().err


def test_nan_is_a_difference():
    losses = compare_hf.Losses(by_token=torch.tensor([1.0, float("nan")]), mean=float("nan"))
    whole = compare_hf.Losses(by_token=torch.ones(2), mean=1.0)
    assert compare_hf.report(whole, losses, 1.0, 1.0) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--context-parallel-size", "3"], "--num-tokens 32 does not divide over --context-par"),
        (["--text-file", "no/such/file"], "no/such/file"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, flags, message):
    folder = save_model("llama2", tmp_path)
    capsys.readouterr()
    assert compare(folder, *flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_folder_that_is_none(tmp_path, capsys):
    assert compare(tmp_path / "absent") == 2
    assert "is no folder" in capsys.readouterr().err


def test_an_architecture_that_does_not_exist_here(tmp_path, capsys):
    folder = save_model("llama2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPTJForCausalLM"]}))
    assert compare(folder) == 2
    assert "GPTJForCausalLM is none of" in capsys.readouterr().err
