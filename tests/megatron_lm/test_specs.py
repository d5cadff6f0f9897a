"""What stock Megatron may and may not ask of our layers, and how it builds and calls them."""

import re
from pathlib import Path

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_untied.backends import choose_backend
from megatron_untied.config import MemoryConfig, ParallelConfig, Precision, RotaryConfig
from megatron_untied.megatron_lm import untied_layer_spec
from megatron_untied.megatron_lm.limits import check_config
from megatron_untied.model import layer_submodules
from tests.megatron_lm.stock import named, stock_config, stock_model
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import parallel_groups, tiny

SPECS = ("untied_spec", "streamed_spec")


def make_config(**changes):
    return stock_config(tiny(), ParallelConfig(), Precision(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1},
         "attention_dropout 0.1 is not supported by megatron_untied's layers; give --attention"),
        ({"softmax_type": "learnable"}, "softmax_type 'learnable' is not"),
        ({"qk_l2_norm": True}, "qk_l2_norm True is not"),
        ({"rotary_interleaved": True}, "leave --rotary-interleaved out"),
        ({"no_rope_freq": 2}, "leave --no-rope-freq out"),
        ({"tensor_model_parallel_size": 8},
         "--num-query-groups 4 is below --tensor-model-parallel-size 8; 4 ranks work."),
        ({"attention_backend": AttnBackend.unfused},
         "--attention-backend unfused is none of auto, flash, fused, local."),
        ({"window_size": (4, 4)}, "--window-size (4, 4) is not LEFT,0: a query sees LEFT tokens"),
        ({"context_parallel_size": 2, "cp_comm_type": "all_gather"},
         "--cp-comm-type all_gather is not a2a or p2p, one for all layers."),
        ({"context_parallel_size": 2, "cp_comm_type": ["a2a", "p2p"]},
         "--cp-comm-type ['a2a', 'p2p'] is not a2a or p2p"),
    ],
)  # fmt: skip
def test_refuses_what_no_layer_does(changes, message):
    config = make_config(**changes)
    for streamed in (False, True):
        with pytest.raises(ValueError, match=re.escape(message)):
            check_config(config, streamed=streamed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_dropout": 0.1}, "hidden_dropout 0.1 is not .*; give --hidden-dropout 0."),
        ({"recompute_granularity": "full", "recompute_method": "uniform",
          "recompute_num_layers": 1}, "recompute_granularity 'full' is not .* by themselves"),
    ],
)  # fmt: skip
def test_refuses_what_only_the_standard_layer_does(changes, message):
    config = make_config(**changes)
    check_config(config, streamed=False)
    with pytest.raises(ValueError, match=message):
        check_config(config, streamed=True)


def test_lists_everything_wrong_at_once():
    with pytest.raises(ValueError, match="attention_dropout.*\n.*qk_clip.*\n.*attention-backend"):
        check_config(
            make_config(attention_dropout=0.1, qk_clip=True, attention_backend=AttnBackend.unfused),
            streamed=False,
        )


def test_refuses_a_choice_without_effect():
    with pytest.raises(ValueError, match="loss_chunk_size 8 has no effect in a layer"):
        untied_layer_spec(memory=MemoryConfig(loss_chunk_size=8))


def built(spec, **arguments):
    groups = parallel_groups(ParallelConfig())
    return stock_model(spec, tiny(), make_config(), groups, **arguments)


def forward(model, **arguments):
    tokens = torch.arange(12)[None]
    return model(tokens, tokens, arguments.pop("attention_mask", None), **arguments)


def check_refused_arguments(group, spec):
    model = built(named(spec))
    packed = PackedSeqParams(qkv_format="thd", max_seqlen_q=12, max_seqlen_kv=12)
    for arguments, message in (
        ({"attention_mask": torch.ones(1, 1, 12, 12)},
         "was given attention_mask: .* --no-create-attention-mask-in-dataloader"),
        ({"packed_seq_params": packed}, "was given packed_seq_params: packed samples"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            forward(model, **arguments)
    with pytest.raises(ValueError, match="was given inference_context: the layer trains"):
        model.decoder.layers[0](torch.zeros(12, 1, 48), inference_context=object())


@pytest.mark.parametrize("spec", SPECS)
def test_refuses_arguments_that_would_have_no_effect(spec):
    run_on_ranks(check_refused_arguments, 1, spec)


def check_two_rotations(group):
    model = built(untied_layer_spec(rotary=RotaryConfig()))
    with pytest.raises(ValueError, match="has a rotary table and Megatron-LM rotates too"):
        forward(model)


def test_rotates_once():
    run_on_ranks(check_two_rotations, 1)


@torch.no_grad()
def check_no_rotation(group):
    """Without positions a model of one layer sees a bag of tokens before each."""
    torch.manual_seed(0)
    model = built(named("untied_spec"), position_embedding_type="none")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    del model.decoder.layers[1:]
    tokens = torch.tensor([[3, 1, 2, 9], [1, 2, 3, 9]])
    first, second = model(tokens, tokens, None)[:, -1]
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_positions_may_be_none():
    run_on_ranks(check_no_rotation, 1)


def check_sharing(group):
    models = [built(named("untied_spec")) for _ in range(2)]
    for model in models:
        first, second = (layer.self_attention.context for layer in model.decoder.layers)
        assert first is second
        forward(model)
    first, second = (model.decoder.layers[0].self_attention.context for model in models)
    assert first.workspace is not second.workspace


def test_layers_of_one_model_share_buffers_and_models_do_not():
    run_on_ranks(check_sharing, 1)


def check_checkpoint_names(group, spec):
    groups = parallel_groups(ParallelConfig())
    config = make_config(qk_layernorm=True, add_bias_linear=True, normalization="LayerNorm")
    theirs = get_gpt_layer_local_spec(qk_layernorm=True)
    names = [
        set(
            stock_model(each, tiny(), config, groups).sharded_state_dict(
                metadata={"dp_cp_group": groups.dp_cp}
            )
        )
        for each in (named(spec), theirs)
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize("spec", SPECS)
def test_checkpoints_have_the_names_of_megatrons_own_spec(spec):
    run_on_ranks(check_checkpoint_names, 1, spec)


LATER = {
    TransformerLayer: {"is_mtp_layer": False, "pp_layer_offset": 0, "name": "decoder.layers.0"},
    SelfAttention: {"pp_layer_offset": 0, "name": "decoder.layers.0.self_attention"},
}
"""Arguments that megatron-core after 0.16 also gives."""


def later(original, names, seen):
    """A constructor that also takes the arguments of ``names``."""

    def constructor(self, *arguments, **others):
        seen.update((name, others.pop(name)) for name in names if name in others)
        original(self, *arguments, **others)

    return constructor


def check_later_arguments(group, spec):
    groups = parallel_groups(ParallelConfig())
    layer = build_module(named(spec), config=make_config(), layer_number=1, pg_collection=groups)
    attention = layer.submodules_config.self_attention
    for base, built_from in ((TransformerLayer, named(spec)), (SelfAttention, attention)):
        seen = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "__init__", later(base.__init__, LATER[base], seen))
            build_module(
                built_from,
                config=make_config(),
                layer_number=1,
                pg_collection=groups,
                **LATER[base],
            )
        assert seen == LATER[base]


@pytest.mark.parametrize("spec", SPECS)
def test_constructors_pass_on_what_later_versions_give(spec):
    run_on_ranks(check_later_arguments, 1, spec)


def as_mlp_submodule(cls, submodules, config, pg_collection, is_mtp_layer, ffn_hidden_size, name):
    return cls(config, submodules, ffn_hidden_size=ffn_hidden_size, tp_group=pg_collection.tp)


def check_mlp_builder(group):
    groups, config = parallel_groups(ParallelConfig()), make_config()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MLP, "as_mlp_submodule", classmethod(as_mlp_submodule), raising=False)
        slot = layer_submodules(config, choose_backend("local", "RMSNorm"), None).mlp
        mlp = slot(config=config, pg_collection=groups, is_mtp_layer=False, name="mlp")
    assert mlp.linear_fc1.weight.shape == (2 * 72, 48)


def test_later_versions_get_a_builder_of_the_mlp():
    run_on_ranks(check_mlp_builder, 1)


def test_the_documents_own_spec_can_be_made():
    text = (Path(__file__).parents[2] / "docs/megatron_lm.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], names)
    assert isinstance(names["spec"], ModuleSpec)
