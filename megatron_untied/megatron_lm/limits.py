"""Refuses settings and arguments of Megatron-LM that our layers do not support."""

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_untied.config.run import ATTENTION_BACKENDS

REQUIRED = {
    "attention_dropout": (0.0, "give --attention-dropout 0"),
    "softmax_scale": (None, "leave --softmax-scale out"),
    "softmax_type": ("vanilla", "leave --softmax-type out"),
    "apply_query_key_layer_scaling": (False, "leave --apply-query-key-layer-scaling out"),
    "qk_clip": (False, "leave --qk-clip out"),
    "qk_l2_norm": (False, "leave --qk-l2-norm out"),
    "log_max_attention_logit": (False, "leave --log-max-attention-logit out"),
    "attention_output_gate": (False, "leave --attention-output-gate out"),
    "rotary_interleaved": (False, "leave --rotary-interleaved out"),
    "no_rope_freq": (None, "leave --no-rope-freq out"),
    "window_attn_skip_freq": (None, "leave --window-attn-skip-freq out"),
    "multi_latent_attention": (False, "leave --multi-latent-attention out"),
    "experimental_attention_variant": (None, "leave --experimental-attention-variant out"),
    "heterogeneous_block_specs": (False, "leave --heterogeneous-layers-config-path out"),
    "num_moe_experts": (None, "leave --num-experts out"),
    "layernorm_zero_centered_gamma": (False, "leave --apply-layernorm-1p out"),
    "deterministic_mode": (False, "leave --deterministic-mode out"),
    "fp8": (None, "leave --fp8-format out"),
    "fp4": (None, "leave --fp4-format out"),
    "cuda_graph_impl": ("none", "leave --cuda-graph-impl out"),
    "fine_grained_activation_offloading": (
        False,
        "leave --fine-grained-activation-offloading out",
    ),
}
"""Fields of TransformerConfig with the only supported value, and the remedy for another."""

REQUIRED_OF_STREAMED = {
    "hidden_dropout": (0.0, "give --hidden-dropout 0"),
    "recompute_granularity": (None, "these layers recompute by themselves: leave it out"),
    "pipeline_model_parallel_size": (1, "give 1, or a spec without streaming"),
    "cpu_offloading": (False, "give the spec a MemoryConfig with cpu_offloading_num_layers"),
}

REFUSED_ARGUMENTS = {
    "attention_mask": (
        "attention is causal by itself, and an s x s tensor does not fit at length; give "
        "--no-create-attention-mask-in-dataloader"
    ),
    "packed_seq_params": "packed samples are not supported; give one document per sample",
    "attention_bias": "there is no bias on attention scores",
    "context": "there is no cross-attention",
    "context_mask": "there is no cross-attention",
    "inference_context": "the layer trains; generate with one of megatron-core's own specs",
    "inference_params": "the layer trains; generate with one of megatron-core's own specs",
    "padding_mask": "every token takes part; mask the loss of padding instead",
}


def check_config(config: TransformerConfig, *, streamed: bool) -> None:
    """Check what the layers support.

    Raises:
        ValueError: with one line for each setting that they do not.
    """
    problems = []
    for name, (value, advice) in (REQUIRED | (REQUIRED_OF_STREAMED if streamed else {})).items():
        # Fields differ between versions of megatron-core; a missing one has no effect.
        found = getattr(config, name, value)
        if found != value:
            problems.append(
                f"{name} {found!r} is not supported by megatron_untied's layers; {advice}."
            )
    g, t = config.num_query_groups, config.tensor_model_parallel_size
    if g < t:
        problems.append(
            f"--num-query-groups {g} is below --tensor-model-parallel-size {t}; {g} ranks work."
        )
    backend = config.attention_backend.name
    if backend not in ATTENTION_BACKENDS:
        problems.append(f"--attention-backend {backend} is none of auto, flash, fused, local.")
    window = config.window_size
    if window is not None and (window[0] < 0 or window[1]):
        problems.append(f"--window-size {window} is not LEFT,0: a query sees LEFT tokens before.")
    if config.context_parallel_size > 1 and comm_types(config) not in ({"a2a"}, {"p2p"}):
        problems.append(
            f"--cp-comm-type {config.cp_comm_type} is not a2a or p2p, one for all layers."
        )
    if problems:
        raise ValueError("\n".join(problems))


def check_arguments(**unsupported_kwargs: object) -> None:
    """Check the arguments of a layer's forward that it does not use.

    Raises:
        ValueError: for one that would have an effect in megatron-core's layer.
    """
    # Others pass: megatron-core gives every layer the same arguments, used or not.
    for name, reason in REFUSED_ARGUMENTS.items():
        if unsupported_kwargs.get(name) is not None:
            raise ValueError(f"a layer of megatron_untied was given {name}: {reason}.")


def comm_types(config: TransformerConfig) -> set[str | None]:
    """The kinds of context parallelism over all layers: ``a2a``, ``p2p`` and so on."""
    types = config.cp_comm_type  # one for all, or a list with one per layer
    return set(types) if isinstance(types, list) else {types}
