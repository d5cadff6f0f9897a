import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_untied.config import ModelConfig, RotaryConfig
from megatron_untied.hf.config import model_config_from_hf, model_config_to_hf
from megatron_untied.rope import rotary_frequencies
from tests.support.hf_models import FAMILIES

# As their publishers' config.json files say it, with transformers 4.
COMMON = {"torch_dtype": "bfloat16", "use_cache": True, "transformers_version": "4.43.0",
          "hidden_act": "silu", "initializer_range": 0.02}  # fmt: skip
LLAMA_31_8B = COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": [128001, 128008],
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
LLAMA_2_7B = COMMON | {
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"],
    "model_type": "llama", "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 4096,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
MISTRAL_7B = COMMON | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1,
    "eos_token_id": 2, "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
QWEN_25_7B = COMMON | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 131072,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN_3_32B = COMMON | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
    "hidden_size": 5120, "intermediate_size": 25600, "max_position_embeddings": 40960,
    "max_window_layers": 64, "num_attention_heads": 64, "num_hidden_layers": 64,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
PUBLISHED = {
    "llama-3.1-8b": LLAMA_31_8B, "llama-2-7b": LLAMA_2_7B, "mistral-7b": MISTRAL_7B,
    "qwen2.5-7b": QWEN_25_7B, "qwen3-32b": QWEN_3_32B,
}  # fmt: skip
LLAMA3 = LLAMA_31_8B["rope_scaling"]


def read(values, **changes):
    return model_config_from_hf(values | changes, "config.json")


def rejects(message):
    return pytest.raises(ValueError, match=re.escape(message))


def test_llama_31():
    assert read(LLAMA_31_8B) == ModelConfig(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=128256,
        max_position_embeddings=131072,
        norm_epsilon=1e-5,
        rotary=RotaryConfig(
            base=500000.0, scaling="llama3", scaling_factor=8.0, original_max_positions=8192
        ),
    )


def test_what_families_differ_in():
    llama, mistral, qwen2, qwen3 = map(read, (LLAMA_2_7B, MISTRAL_7B, QWEN_25_7B, QWEN_3_32B))
    assert (llama.num_query_groups, llama.rotary) == (32, RotaryConfig())
    assert mistral.window_size == 4096
    assert (qwen2.add_qkv_bias, qwen2.kv_channels, qwen2.window_size) == (True, 128, None)
    assert (qwen3.qk_layernorm, qwen3.kv_channels, qwen3.norm_epsilon) == (True, 128, 1e-6)
    assert [m.add_qkv_bias or m.qk_layernorm for m in (llama, mistral)] == [False, False]
    biased = read(LLAMA_2_7B, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert biased.add_bias_linear
    assert not biased.untie_embeddings_and_output_weights


def test_width_of_a_head_where_it_is_not_said():
    assert read(LLAMA_31_8B, head_dim=None).kv_channels == 128
    assert read(QWEN_3_32B, head_dim=None).kv_channels == 128  # not 5120 / 64
    with rejects("hidden_size 4095 is not a multiple of num_attention_heads 32"):
        read(LLAMA_31_8B, hidden_size=4095)


@pytest.mark.parametrize("name", PUBLISHED)
def test_both_generations_say_the_same(name, tmp_path):
    """The transformers library reads version 4's file and writes it as version 5."""
    values = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    newer = json.loads(AutoConfig.from_pretrained(tmp_path).to_json_string())
    assert "rope_parameters" in newer
    assert "rope_theta" not in newer
    assert read(newer) == read(values)


@pytest.mark.parametrize("name", PUBLISHED)
def test_there_and_back(name):
    values = PUBLISHED[name]
    back = model_config_to_hf(read(values), torch.bfloat16, values)
    assert read(back) == read(values)
    for field in ("architectures", "model_type", "torch_dtype", "bos_token_id", "eos_token_id"):
        assert back[field] == values[field]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_is_written(family, tmp_path):
    """Of every family and kind of scaling, its own reading is what it was before."""
    before = FAMILIES[family]
    model = read(json.loads(before.to_json_string()))
    written = model_config_to_hf(model, torch.float32, {"model_type": before.model_type})
    (tmp_path / "config.json").write_text(json.dumps(written))
    after = AutoConfig.from_pretrained(tmp_path)
    assert type(after) is type(before)
    assert after.dtype == torch.float32
    for name in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(after, name) == getattr(before, name)
    assert before.rope_parameters.items() <= after.rope_parameters.items()


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4},
        {"rope_type": "llama3", "type": "llama3"} | LLAMA3,
        LLAMA3 | {"low_freq_factor": 1, "high_freq_factor": 2.5},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
        {"rope_type": "yarn", "factor": 40, "mscale": 0.7, "mscale_all_dim": 1.1},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8192},
        {"rope_type": "default"},
    ],
)
def test_frequencies_are_those_of_transformers(scaling, tmp_path):
    values = LLAMA_31_8B | {"rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    model = read(values)
    frequencies, factor = rotary_frequencies(model.rotary, model.kv_channels)
    torch.testing.assert_close(frequencies.float(), theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling)
    assert read(model_config_to_hf(model, torch.bfloat16, {})).rotary == model.rotary


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "dynamic", "factor": 2.0},
         "rope_scaling: rope_type 'dynamic' is none of default, linear, llama3, yarn"),
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type 'longrope' is none of"),
        ({"rope_type": "linear", "type": "yarn"}, "rope_type is 'linear', type 'yarn'"),
        ({"rope_type": "linear"}, "rope_scaling has no factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling has no low_freq_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "finetuned": True},
         "rope_scaling has fields that are not understood and may change the model: finetuned"),
        ({"rope_type": "default", "factor": 4.0}, "understood and may change the model: factor"),
        (LLAMA3 | {"beta_fast": 32}, "not understood and may change the model: beta_fast"),
        (LLAMA3 | {"rope_theta": 1e4}, "rope_scaling.rope_theta is 10000.0, rope_theta 500000.0"),
        (LLAMA3 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"sliding_attention": {"rope_type": "default"}},
         "may change the model: sliding_attention"),
        ({"rope_type": "linear", "factor": 0.5}, "scaling_factor 0.5 must be 1 or more"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("generation", [4, 5])
def test_rejects_rope_fields_by_name(scaling, message, generation):
    name = "rope_scaling" if generation == 4 else "rope_parameters"
    with rejects(message.replace("rope_scaling", name)):
        read(LLAMA_31_8B | {"rope_scaling": None} | {name: scaling})


def test_rejects_generations_that_contradict_each_other():
    newer = {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}
    assert read(LLAMA_31_8B, **newer) == read(LLAMA_31_8B)
    newer["rope_parameters"]["factor"] = 16.0
    with rejects("rope_scaling and rope_parameters differ; keep one"):
        read(LLAMA_31_8B, **newer)


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (LLAMA_31_8B, {"logit_scale": 0.5, "foo": 1},
         "config.json has fields that are not understood and may change the model: foo = 1, "
         "logit_scale = 0.5. Remove those that do not."),
        (LLAMA_31_8B, {"auto_map": {"AutoModel": "x"}}, "may change the model: auto_map"),
        (LLAMA_31_8B, {"sliding_window": 4096}, "may change the model: sliding_window = 4096"),
        (LLAMA_31_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA_31_8B, {"original_max_position_embeddings": 4}, "original_max_position_embeddings"),
        (LLAMA_31_8B, {"hidden_act": "gelu"},
         "hidden_act is 'gelu', and only 'silu' is supported"),
        (LLAMA_31_8B, {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        (LLAMA_31_8B, {"attention_bias": True}, "attention_bias is True and mlp_bias False"),
        (LLAMA_31_8B, {"num_key_value_heads": 7},
         "num_attention_heads 32 is not a multiple of num_key_value_heads 7"),
        (LLAMA_31_8B, {"head_dim": 7}, "head_dim 7 is odd; channels are rotated in pairs; use 8"),
        (LLAMA_31_8B, {"head_dim": 0}, "head_dim 0 is below 1, the smallest value"),
        (LLAMA_31_8B, {"intermediate_size": 0}, "intermediate_size 0 is below 1"),
        (LLAMA_31_8B, {"num_attention_heads": 0, "head_dim": 128},
         "num_attention_heads 0 is below 1"),
        (MISTRAL_7B, {"num_attention_heads": 0}, "not a multiple of num_attention_heads 0"),
        (LLAMA_31_8B, {"num_hidden_layers": -1}, "num_hidden_layers -1 is below 1"),
        (LLAMA_31_8B, {"rms_norm_eps": 0.0}, "rms_norm_eps 0.0 is not between 1e-12 and 1"),
        (LLAMA_31_8B, {"vocab_size": None}, "config.json has no vocab_size; complete it"),
        (MISTRAL_7B, {"num_key_value_heads": None}, "has no num_key_value_heads"),
        (MISTRAL_7B, {"layer_types": ["sliding_attention"] * 32}, "change the model: layer_types"),
        (QWEN_25_7B, {"use_sliding_window": True, "max_window_layers": 21},
         "use_sliding_window, max_window_layers 21 and layer_types give a window to 7 of 28 "
         "layers; all or none can have one"),
        (QWEN_25_7B, {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]},
         "give a window to 1 of 28 layers"),
        (QWEN_25_7B, {"layer_types": ["sliding_attention"] * 28},
         "layer_types are 'sliding_attention' with use_sliding_window False"),
        (QWEN_25_7B, {"layer_types": ["linear_attention"] * 28}, "are 'linear_attention'"),
        (QWEN_3_32B, {"attention_bias": True}, "attention_bias is True, and only False"),
        (QWEN_3_32B, {"quantization_config": {"quant_method": "awq"}},
         "the weights are quantized (quantization_config: awq)"),
        (LLAMA_31_8B, {"architectures": ["LlamaForSequenceClassification"]},
         "LlamaForSequenceClassification is none of LlamaForCausalLM, MistralForCausalLM, "
         "Qwen2ForCausalLM, Qwen3ForCausalLM"),
        (LLAMA_31_8B, {"architectures": None, "model_type": "gpt2"},
         "model_type 'gpt2' is none of LlamaForCausalLM"),
        (QWEN_3_32B, {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
         "Qwen3MoeForCausalLM is a mixture of experts; dense models are supported: Llama"),
        (LLAMA_31_8B, {"num_hidden_layers": 2**40}, "num_hidden_layers 1099511627776 is below"),
        (LLAMA_31_8B, {"hidden_size": 2**40}, "hidden_size 1099511627776 is above 2147483647"),
        (LLAMA_31_8B, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not of type float"),
        (LLAMA_31_8B, {"rope_scaling": 5}, "config.json: rope_scaling is 5, which is no object"),
        (LLAMA_31_8B, {"architectures": "Llama"}, "or architectures 'Llama' no list"),
        (LLAMA_31_8B, {"quantization_config": ["awq"]}, "(quantization_config: unknown method)"),
        (LLAMA_31_8B, {"pad_token_id": "a"}, "config.json: pad_token_id is 'a', no token"),
        (QWEN_25_7B, {"layer_types": [[]] * 28}, "layer_types are [] with"),
        (MISTRAL_7B, {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
         "MixtralForCausalLM is a mixture of experts"),
    ],
)  # fmt: skip
def test_rejects_what_it_does_not_understand_by_name(values, changes, message):
    with rejects(message):
        read(values, **changes)


def test_a_window_of_every_layer_or_none():
    assert read(QWEN_25_7B, use_sliding_window=True, max_window_layers=0).window_size == 131072
    assert read(QWEN_25_7B, use_sliding_window=True, max_window_layers=28).window_size is None
    windowed = replace(read(QWEN_25_7B), window_size=100)
    assert read(model_config_to_hf(windowed, torch.bfloat16, {})) == windowed


def test_a_window_must_be_said():
    assert read(MISTRAL_7B, sliding_window=None).window_size is None
    unsaid = {name: value for name, value in MISTRAL_7B.items() if name != "sliding_window"}
    with rejects("config.json has no sliding_window; complete it"):
        read(unsaid)
    with rejects("config.json has no sliding_window; complete it"):
        read(QWEN_25_7B, use_sliding_window=True, sliding_window=None)


def test_family_is_chosen_by_what_it_can_express():
    def family(model, like=None):
        return model_config_to_hf(model, torch.bfloat16, {"model_type": like})["model_type"]

    llama, mistral = read(LLAMA_31_8B), read(MISTRAL_7B)
    assert family(llama) == "llama"
    assert family(llama, "mistral") == "mistral"  # without a window they are the same
    assert family(mistral, "llama") == "mistral"
    # Hugging Face's LlamaConfig wants hidden_size to be a multiple of the heads.
    assert family(replace(llama, hidden_size=4000, num_attention_heads=24)) == "mistral"
    with rejects("none of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, "
                 "Qwen3ForCausalLM is a model with normalization LayerNorm"):  # fmt: skip
        family(replace(llama, normalization="LayerNorm"))
    with rejects("add_qkv_bias True, qk_layernorm True"):
        family(replace(read(QWEN_3_32B), add_qkv_bias=True))
