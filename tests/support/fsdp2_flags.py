"""Flags of fully sharded runs, to be put together."""

FULL = {"use_torch_fsdp2": True}
OFFLOAD = {"optimizer_cpu_offload": True}
CONTEXT = {"context_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
VECTORS = {"qk_layernorm": True, "disable_bias_linear": None, "normalization": "LayerNorm"}
UNEVEN = {
    "hidden_size": 42,
    "ffn_hidden_size": 98,
    "kv_channels": 6,
    "make_vocab_size_divisible_by": 1,
}
"""Rows that do not divide by 2 or 4 ranks; of 6 the fourth of 4 ranks has none."""
DOCUMENTS = {"reset_position_ids": True, "dataloader_inter_document_masking": True}
TIED = {"untie_embeddings_and_output_weights": None}


def layers(granularity: str, every: int, **flags) -> dict:
    """Flags of streamed layers in groups of ``every``, with tiles that do not divide."""
    return {
        "recompute_granularity": granularity,
        "recompute_method": "uniform",
        "recompute_num_layers": every,
        "sequence_tile_size": 24,
        "loss_chunk_size": 13,
    } | flags


PARKED = {"cpu_offloading_num_layers": 2, "park_during_attention": True}
