"""Presets against what their publishers' config.json files say, and in a command line."""

import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.config import RotaryConfig
from megatron_untied.hf.config import model_config_from_hf
from megatron_untied.hf.names import hf_layouts
from megatron_untied.presets import preset_names, read_preset
from tests.hf.test_config import LLAMA3, LLAMA_31_8B, MISTRAL_7B, QWEN_3_32B, QWEN_25_7B

ROOT = Path(__file__).resolve().parents[1]
RUN = (
    "--seq-length 262144 --micro-batch-size 1 --train-iters 1 --lr 1e-5 --mock-data "
    "--tokenizer-type NullTokenizer"
).split()

# What config.json says, as far as it differs from another one of the family.
PUBLISHED = {
    "llama3-8b": LLAMA_31_8B | {"rope_scaling": None},
    "llama3.1-70b": LLAMA_31_8B
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
       "num_hidden_layers": 80},
    "llama3.2-1b": LLAMA_31_8B
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
       "tie_word_embeddings": True, "rope_scaling": LLAMA3 | {"factor": 32.0}},
    "mistral-7b": MISTRAL_7B,
    "qwen2.5-7b": QWEN_25_7B,
    "qwen3-8b": QWEN_3_32B
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
       "num_hidden_layers": 36, "max_window_layers": 36},
    "qwen3-32b": QWEN_3_32B,
}  # fmt: skip
PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
}
"""As published: what the weight files add up to."""


def model_of(*argv: str):
    return parse_arguments([*RUN, *argv], world_size=1).model


def rejects(message: str):
    return pytest.raises(ValueError, match=re.escape(message))


def test_every_preset_is_checked_here():
    assert preset_names() == sorted(PUBLISHED) == sorted(PARAMETERS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_what_its_publisher_says(name):
    published = model_config_from_hf(PUBLISHED[name], "config.json")
    assert model_of("--model", name) == replace(published, max_position_embeddings=262144)
    assert read_preset(name).source.startswith("https://")


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_has_as_many_parameters_as_published(name):
    layouts = hf_layouts(model_of("--model", name)).values()
    assert sum(math.prod(one.local_shape) for one in layouts) == PARAMETERS[name]
    assert read_preset(name).num_parameters == PARAMETERS[name]


def test_flags_that_are_given_override_the_preset():
    model = model_of("--num-layers", "3", "--model", "llama3-8b", "--rotary-base", "1e6",
                     "--num-query-groups", "4", "--vocab-size", "999")  # fmt: skip
    assert (model.num_layers, model.num_query_groups, model.vocab_size) == (3, 4, 1000)
    assert model.rotary == RotaryConfig(base=1e6)
    assert model.hidden_size == 4096


def test_a_kind_of_scaling_replaces_the_presets_whole():
    yarn = ("--position-embedding-type yarn --yarn-rotary-scaling-factor 4 "
            "--yarn-original-max-position-embeddings 131072").split()  # fmt: skip
    assert model_of("--model", "llama3.2-1b", *yarn).rotary == RotaryConfig(
        base=500000.0, scaling="yarn", scaling_factor=4.0, original_max_positions=131072
    )
    none = ("--rotary-seq-len-interpolation-factor", "1")
    assert model_of("--model", "llama3.2-1b", *none).rotary == RotaryConfig(base=500000.0)
    same = model_of("--model", "llama3.2-1b", "--use-rope-scaling").rotary
    assert same == model_of("--model", "llama3.2-1b").rotary
    stretched = model_of("--model", "llama3.2-1b", "--rope-scaling-factor", "64").rotary
    assert stretched == replace(same, scaling_factor=64.0)


def test_a_model_has_the_presets_rows_if_its_tokenizer_has_no_more(tmp_path):
    few = write_tokenizer(tmp_path / "few", num_tokens=3)
    assert model_of("--model", "mistral-7b").vocab_size == 32000
    assert model_of("--model", "mistral-7b", *few).vocab_size == 32000
    assert model_of("--model", "mistral-7b", *few, "--vocab-size", "3").vocab_size == 3
    many = write_tokenizer(tmp_path / "many", num_tokens=32001)
    with rejects("the tokenizer has 32001 tokens and --model mistral-7b 32000; give its own "
                 "tokenizer, or --vocab-size 32001 for a model with as many rows"):  # fmt: skip
        model_of("--model", "mistral-7b", *many)
    assert model_of("--model", "mistral-7b", *many, "--vocab-size", "32001").vocab_size == 32001


def write_tokenizer(folder: Path, num_tokens: int) -> list[str]:
    words = {"</s>": 0} | {f"w{number}": number for number in range(1, num_tokens)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]


def test_rejects_unknown_names():
    listed = ", ".join(preset_names())
    with rejects(f"argument --model: 'llama-3-8b' is not one of {listed}; did you mean llama3-8b?"):
        model_of("--model", "llama-3-8b")
    with rejects(f"argument --model: 'gpt' is not one of {listed}"):
        model_of("--model", "gpt")


def test_rejects_two_sources_of_the_architecture():
    with rejects(
        "--model qwen3-8b and --use-checkpoint-args both set the architecture; give one of them"
    ):
        model_of("--model", "qwen3-8b", "--use-checkpoint-args", "--load", "somewhere")


@pytest.mark.parametrize("package", ["megatron_untied.presets", "megatron_untied.planner"])
def test_an_installed_package_has_its_data(package):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"][package]
    folder = ROOT / package.replace(".", "/")
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    assert found == set(folder.glob("*.json"))
    assert found
