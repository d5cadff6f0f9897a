import re

import pytest

from tests.training.command_line import tiny_config


@pytest.mark.parametrize(
    ("world_size", "changes", "message"),
    [
        (3, {"context_parallel_size": 2},
         "3 ranks do not divide into tensor parallel 1 x context parallel 2; start a multiple"),
        (1, {"num_query_groups": 3},
         "--num-attention-heads 8 is not a multiple of --num-query-groups 3; 2 groups work"),
        (1, {"rotary_percent": 1.5}, "--rotary-percent 1.5 is outside (0, 1]; 1.0 rotates whole"),
        (1, {"rotary_percent": 0.4},
         "--rotary-percent 0.4 rotates 3 of 8 channels of a head; rotation goes by pairs"),
        (1, {"rotary_percent": 0.1}, "--rotary-percent 0.1 rotates 0 of 8 channels of a head"),
        (1, {"rotary_base": 1}, "--rotary-base 1.0 must be above 1, such as 10000"),
        (1, {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4,
             "yarn_original_max_position_embeddings": 32, "yarn_beta_slow": 40},
         "--yarn-beta-slow 40.0 must be below --yarn-beta-fast 32.0; YaRN has 1 and 32"),
        (1, {"sequence_parallel": True},
         "--sequence-parallel splits tokens over tensor-parallel ranks, and there is 1"),
        (3, {"tensor_model_parallel_size": 3},
         "--num-attention-heads 8 does not divide over --tensor-model-parallel-size 3; "
         "2 tensor-parallel ranks work"),
        (8, {"tensor_model_parallel_size": 8},
         "--num-query-groups 4 does not divide over --tensor-model-parallel-size 8; "
         "4 tensor-parallel ranks work"),
        (4, {"tensor_model_parallel_size": 4, "ffn_hidden_size": 98},
         "--ffn-hidden-size 98 does not divide over --tensor-model-parallel-size 4; 2 tensor"),
        (4, {"context_parallel_size": 4, "seq_length": 66},
         "--seq-length 66 does not divide over 4 context-parallel ranks; 64 does"),
        (4, {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True,
             "seq_length": 66},
         "--seq-length 66 does not divide over 2 context-parallel x 2 sequence-parallel ranks"),
        (4, {"context_parallel_size": 4, "cp_comm_type": "p2p", "seq_length": 68},
         "--seq-length 68 does not divide over 4 context-parallel ranks in two blocks each; 64 "),
        (4, {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p"},
         "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A P, a ring of P "
         "groups of A ranks, such as 2 2"),
        (4, {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p",
             "hierarchical_context_parallel_sizes": "2 3"},
         "--hierarchical-context-parallel-sizes 2 3 are 6 ranks and --context-parallel-size is 4; "
         "2 2 works"),
        (4, {"context_parallel_size": 4, "cp_comm_type": "p2p",
             "hierarchical_context_parallel_sizes": "1 4"},
         "--hierarchical-context-parallel-sizes 1 4 does nothing with --cp-comm-type p2p; a2a+p2p"),
        (2, {"context_parallel_size": 2, "cp_comm_type": "p2p", "window_size": "16,0"},
         "--window-size 16,0 needs the whole sequence on a rank; --cp-comm-type p2p passes it on "
         "in blocks, a2a does not"),
        (4, {"context_parallel_size": 4, "cp_heads_per_chunk": 6},
         "--cp-heads-per-chunk 6 is not a multiple of 4, the ranks that trade sequence for heads: "
         "each attends with as many heads as the others; 4 works"),
        (4, {"context_parallel_size": 4, "cp_comm_type": "p2p", "cp_heads_per_chunk": 9},
         "--cp-heads-per-chunk 9 is more than the 8 query heads of a tensor-parallel rank; 8 or "),
        (4, {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "cp_heads_per_chunk": 6},
         "--cp-heads-per-chunk 6 is more than the 4 query heads of a tensor-parallel rank; 4 "),
        (1, {"recompute_granularity": "full", "recompute_num_layers": 3},
         "--recompute-num-layers 3 is more than --num-layers 2; 2 keeps the first layer's input"),
        (1, {"recompute_granularity": "full", "cpu_offloading_num_layers": 3},
         "--cpu-offloading-num-layers 3 is more than --num-layers 2; 2 offloads all"),
        (1, {"optimizer_cpu_offload": True},
         "--optimizer-cpu-offload needs --use-torch-fsdp2, whose optimizer can run on the host; "),
        (1, {"optimizer_cpu_offload": True, "use_distributed_optimizer": True},
         "give it instead of --use-distributed-optimizer, or leave the offload out"),
        (1, {"use_torch_fsdp2": True, "use_distributed_optimizer": True},
         "--use-torch-fsdp2 spreads what --use-distributed-optimizer spreads, and weights and "
         "gradients too; give one of them"),
        (1, {"use_torch_fsdp2": True, "transformer_impl": "transformer_engine"},
         "--transformer-impl transformer_engine allocates its layers; give --transformer-impl "),
        (1, {"micro_batch_size": 3},
         "--global-batch-size 4 is not a multiple of --micro-batch-size 3 x 1 data-parallel "
         "ranks; 3 is"),
        (3, {}, "--global-batch-size 4 is not a multiple of --micro-batch-size 1 x 3"),
        (1, {"max_position_embeddings": 32},
         "--seq-length 64 is above --max-position-embeddings 32; give --max-position-embeddings"),
        (1, {"min_lr": 1}, "--min-lr 1.0 is above --lr 0.001; 0.0001 is not"),
        (1, {"lr_warmup_init": 1}, "--lr-warmup-init 1.0 is above --lr 0.001"),
        (1, {"lr_warmup_iters": 10},
         "--lr-warmup-iters 10 is not below --lr-decay-iters 10 (--train-iters, unless given);"),
        (1, {"lr_decay_style": "WSD"},
         "--lr-decay-style WSD needs --lr-wsd-decay-iters, such as 1"),
        (1, {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9, "lr_warmup_iters": 2},
         "--lr-wsd-decay-iters 9 is more than the iterations between warmup and --lr-decay-iters; "
         "at most 8 works"),
        (1, {"skip_train": True},
         "--skip-train only evaluates and --eval-iters is 0; give --eval-iters 1 or more"),
        (1, {"adam_beta2": 1}, "--adam-beta2 1.0 must be below 1, such as 0.9"),
        (1, {"lr": 1, "weight_decay": 1}, "--weight-decay 1.0 at --lr 1.0 shrinks weights beyond"),
        (1, {"kv_channels": 7}, "--kv-channels 7 is odd, and rotation goes by pairs; 8 works"),
        (1, {"hidden_size": 24}, "--kv-channels 3 is odd, and rotation goes by pairs; 4 works"),
    ],
)  # fmt: skip
def test_rejects(world_size, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_config(world_size, **changes)


def test_lists_everything_wrong_at_once():
    with pytest.raises(ValueError, match="do not divide into.*\n.*--min-lr"):
        tiny_config(3, context_parallel_size=2, min_lr=1)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (8, {"context_parallel_size": 8, "cp_heads_per_chunk": 8}),
        (6, {"context_parallel_size": 6, "seq_length": 66, "cp_heads_per_chunk": 12}),  # 8 heads
        (8, {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True,
             "cp_heads_per_chunk": 2}),
        (4, {"context_parallel_size": 4, "cp_comm_type": "p2p", "cp_heads_per_chunk": 3}),
        (4, {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p", "cp_heads_per_chunk": 6,
             "hierarchical_context_parallel_sizes": "2 2"}),
        (1, {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 8, "lr_warmup_iters": 2}),
        (1, {"rotary_percent": 0.25}),
    ],
)  # fmt: skip
def test_allows(world_size, changes):
    tiny_config(world_size, **changes)
