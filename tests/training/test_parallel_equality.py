"""The model and its training do not depend on how many ranks share them, or how.

Same seed and samples, fp32. What differs is the order of sums alone: each loss agrees to 1e-5
relative after ten steps of Adam, which turns rounding of tiny gradients into whole steps.
"""

import pytest

from megatron_untied.training.metrics import read_metrics
from tests.support.corpus import random_documents, write_token_files
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import train

TENSOR = {"tensor_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
RING = {"cp_comm_type": "p2p"}
HYBRID = {
    "context_parallel_size": 4,
    "cp_comm_type": "a2a+p2p",
    "hierarchical_context_parallel_sizes": "2 2",
}
SEQUENCE = {"sequence_parallel": True}
ATTENTIVE = {"init_method_std": 0.1}
"""The loss depends on what is attended to from the first step on; with 0.02 by 1e-4 at most."""
STREAMED = {"recompute_granularity": "full", "sequence_tile_size": 24}


def curve(tmp_path, world_size: int, **flags) -> list[dict]:
    path = tmp_path / "metrics.jsonl"
    run_on_ranks(train, world_size, path, **flags)
    return read_metrics(path)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return curve(tmp_path_factory.mktemp("one"), 1)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(2, CONTEXT, id="cp2"),
        pytest.param(2, CONTEXT | {"cp_heads_per_chunk": 2}, id="cp2-one-head-a-rank"),
        pytest.param(2, CONTEXT | {"cp_heads_per_chunk": 6}, id="cp2-last-chunk-is-smaller"),
        pytest.param(4, {"context_parallel_size": 4}, id="cp4"),
        pytest.param(4, {"context_parallel_size": 4, "cp_heads_per_chunk": 4}, id="cp4-one-head"),
        pytest.param(2, CONTEXT | RING, id="ring2"),
        pytest.param(4, {"context_parallel_size": 4, "cp_heads_per_chunk": 3} | RING, id="ring4"),
        pytest.param(4, HYBRID, id="ring2-of-ulysses2"),
        pytest.param(
            4,
            HYBRID | STREAMED | {"recompute_granularity": "selective", "cp_heads_per_chunk": 2},
            id="ring2-of-ulysses2-streamed",
        ),
        pytest.param(4, CONTEXT | RING | TENSOR | SEQUENCE, id="ring2-tp2-sequence-parallel"),
        pytest.param(4, CONTEXT, id="cp2-dp2"),
        pytest.param(4, {"use_distributed_optimizer": True}, id="dp4-distributed-optimizer"),
        pytest.param(2, {"micro_batch_size": 2}, id="dp2-micro-batch-2"),
        pytest.param(2, TENSOR, id="tp2"),
        pytest.param(2, TENSOR | SEQUENCE, id="tp2-sequence-parallel"),
        pytest.param(4, CONTEXT | TENSOR, id="cp2-tp2"),
        pytest.param(
            4,
            CONTEXT
            | TENSOR
            | SEQUENCE
            | {"cp_heads_per_chunk": 2, "use_distributed_optimizer": True, "loss_chunk_size": 13},
            id="cp2-tp2-everything",
        ),
        pytest.param(2, CONTEXT | STREAMED, id="cp2-streamed"),
        pytest.param(1, STREAMED, id="streamed"),
        pytest.param(
            2,
            CONTEXT
            | STREAMED
            | {
                "recompute_granularity": "selective",
                "recompute_num_layers": 2,
                "cpu_offloading_num_layers": 2,
                "park_during_attention": True,
                "cp_heads_per_chunk": 2,
                "use_distributed_optimizer": True,
            },
            id="cp2-streamed-everything",
        ),
    ],
)
def test_ten_steps_are_those_of_one_rank(tmp_path, one_rank, world_size, flags):
    assert len(one_rank) == 10
    require_same(curve(tmp_path, world_size, **flags), one_rank)


def test_every_kind_of_parameter_is_trained_alike(tmp_path):
    """Biases, LayerNorm, norms of heads, tied embeddings: each meets its gradients elsewhere.

    Heads are wider than hidden size / heads, and rotated as YaRN does.
    """
    others = {"disable_bias_linear": None, "normalization": "LayerNorm", "swiglu": None,
              "qk_layernorm": True, "add_qkv_bias": True, "kv_channels": 12, "train_iters": 5,
              "untie_embeddings_and_output_weights": None, "position_embedding_type": "yarn",
              "yarn_rotary_scaling_factor": 4,
              "yarn_original_max_position_embeddings": 16}  # fmt: skip
    one_rank = curve(tmp_path / "one", 1, **others)
    for name, flags in (
        ("plain", {}),
        ("sequence", SEQUENCE),
        ("streamed", SEQUENCE | STREAMED | {"cp_heads_per_chunk": 2}),
    ):
        require_same(curve(tmp_path / name, 4, **CONTEXT, **TENSOR, **flags, **others), one_rank)


def test_packed_documents_are_trained_on_alike(tmp_path):
    """Documents of 1 to 40 tokens in samples of 64, cut at whatever place a rank's share ends."""
    documents = random_documents(300, vocab_size=250, eod=250)
    data = {"mock_data": None, "data_path": write_token_files(tmp_path / "tokens", documents),
            "train_iters": 5, **ATTENTIVE}  # fmt: skip
    packed = data | dict.fromkeys(
        ("reset_position_ids", "dataloader_inter_document_masking", "eod_mask_loss"), True
    )
    one_rank = curve(tmp_path / "one", 1, **packed)
    for name, world_size, flags in (
        ("cp4", 4, {"context_parallel_size": 4, "attention_backend": "local"}),
        ("streamed", 2, CONTEXT | STREAMED | {"cp_heads_per_chunk": 2, "micro_batch_size": 2}),
        ("tp2", 4, CONTEXT | TENSOR | SEQUENCE | STREAMED),
    ):
        require_same(curve(tmp_path / name, world_size, **flags, **packed), one_rank)
    joined = curve(tmp_path / "joined", 1, eod_mask_loss=True, **data)
    assert joined[0]["lm_loss"] != pytest.approx(one_rank[0]["lm_loss"], rel=1e-4)


def test_documents_without_an_end_of_document_are_trained_on_alone(tmp_path):
    """The .idx knows them: not one of their tokens ends a document."""
    documents = [ids[:-1] for ids in random_documents(300, vocab_size=250, eod=250)]
    data = {"mock_data": None, "data_path": write_token_files(tmp_path / "tokens", documents),
            "train_iters": 3, **ATTENTIVE}  # fmt: skip
    packed = data | {"reset_position_ids": True, "dataloader_inter_document_masking": True}
    one_rank = curve(tmp_path / "one", 1, **packed)
    require_same(curve(tmp_path / "cp2", 2, **CONTEXT, **STREAMED, **packed), one_rank)
    joined = curve(tmp_path / "joined", 1, **data)
    assert joined[0]["lm_loss"] != pytest.approx(one_rank[0]["lm_loss"], rel=1e-4)


def test_windows_are_trained_alike(tmp_path):
    window = {"window_size": "9,0", "train_iters": 3}
    one_rank = curve(tmp_path / "one", 1, **window)
    require_same(curve(tmp_path / "cp2", 2, **CONTEXT, **STREAMED, **window), one_rank)


def require_same(shared: list[dict], one_rank: list[dict]) -> None:
    for ours, theirs in zip(shared, one_rank, strict=True):
        assert ours["valid_tokens"] == theirs["valid_tokens"]
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-5)
        # Counts every logical element once, however many ranks hold a copy.
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_the_curve_learns_and_masks_tokens(one_rank):
    assert one_rank[-1]["lm_loss"] < one_rank[0]["lm_loss"] - 0.1
    assert len({step["valid_tokens"] for step in one_rank}) > 1
    assert all(step["valid_tokens"] < 4 * 64 for step in one_rank)
