import re

import pytest

from tests.support.command_line import tiny_config

STREAMED = {"recompute_granularity": "full"}


@pytest.mark.parametrize(
    ("world_size", "changes", "message"),
    [
        (3, {"context_parallel_size": 2},
         "3 ranks are not a multiple of tensor parallel 1 x context parallel 2; start a multiple"),
        (1, {"num_query_groups": 3},
         "--num-attention-heads 8 is not a multiple of --num-query-groups 3; use 2 groups"),
        (1, {"rotary_percent": 1.5}, "--rotary-percent 1.5 is outside (0, 1]; use 1.0 to rotate"),
        (1, {"rotary_percent": 0.4},
         "--rotary-percent 0.4 rotates 3 of 8 channels of a head; channels are rotated in pairs"),
        (1, {"rotary_percent": 0.1}, "--rotary-percent 0.1 rotates 0 of 8 channels of a head"),
        (1, {"rotary_base": 1}, "--rotary-base 1.0 must be above 1, such as 10000"),
        (1, {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4,
             "yarn_original_max_position_embeddings": 32, "yarn_beta_slow": 40},
         "--yarn-beta-slow 40.0 must be below --yarn-beta-fast 32.0; the defaults are 1 and 32"),
        (1, {"sequence_parallel": True},
         "--sequence-parallel shards tokens over tensor-parallel ranks, but there is only 1"),
        (3, {"tensor_model_parallel_size": 3},
         "--num-attention-heads 8 is not divisible by --tensor-model-parallel-size 3; "
         "use 2 tensor-parallel ranks"),
        (8, {"tensor_model_parallel_size": 8},
         "--num-query-groups 4 is not divisible by --tensor-model-parallel-size 8; "
         "use 4 tensor-parallel ranks"),
        (4, {"tensor_model_parallel_size": 4, "ffn_hidden_size": 98},
         "--ffn-hidden-size 98 is not divisible by --tensor-model-parallel-size 4; use 2 tensor"),
        (4, {"context_parallel_size": 4, "seq_length": 66},
         "--seq-length 66 is not divisible over 4 context-parallel ranks; use 64"),
        (4, {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True,
             "seq_length": 66},
         "--seq-length 66 is not divisible over 2 context-parallel x 2 sequence-parallel ranks"),
        (4, {"context_parallel_size": 4, "cp_comm_type": "p2p", "seq_length": 68},
         "--seq-length 68 is not divisible over 4 context-parallel ranks with two blocks each; "
         "use 64"),
        (4, {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p"},
         "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A R, a ring of R "
         "groups of A ranks, such as 2 2"),
        (4, {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p",
             "hierarchical_context_parallel_sizes": "2 3"},
         "--hierarchical-context-parallel-sizes 2 3 are 6 ranks, but --context-parallel-size is 4; "
         "use 2 2"),
        (4, {"context_parallel_size": 4, "cp_comm_type": "p2p",
             "hierarchical_context_parallel_sizes": "1 4"},
         "--hierarchical-context-parallel-sizes 1 4 has no effect with --cp-comm-type p2p; "
         "use it with a2a+p2p"),
        (2, {"context_parallel_size": 2, "cp_comm_type": "p2p", "window_size": "16,0"},
         "--window-size 16,0 needs whole sequences on each rank; --cp-comm-type p2p shards it "
         "in blocks, use a2a"),
        (4, {"context_parallel_size": 4, "cp_heads_per_chunk": 6},
         "--cp-heads-per-chunk 6 is not a multiple of the 4 ranks of a Ulysses group, which attend "
         "to equal numbers of heads; use 4"),
        (4, {"context_parallel_size": 4, "cp_comm_type": "p2p", "cp_heads_per_chunk": 9},
         "--cp-heads-per-chunk 9 is more than the 8 query heads per tensor-parallel rank; use 8 "),
        (4, {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "cp_heads_per_chunk": 6},
         "--cp-heads-per-chunk 6 is more than the 4 query heads per tensor-parallel rank; use "),
        (1, {"recompute_granularity": "full", "recompute_num_layers": 3},
         "--recompute-num-layers 3 is more than --num-layers 2; use 2 to keep the input"),
        (1, {"recompute_granularity": "selective", "attention_output_layers": 3},
         "--attention-output-layers 3 is more than --num-layers 2; use 2, or leave it out"),
        (1, {"recompute_granularity": "full", "attention_output_layers": 1},
         "--attention-output-layers 1 keeps attention outputs, and --recompute-granularity full "
         "recomputes all of them; give selective"),
        (1, {"recompute_granularity": "full", "cpu_offloading_num_layers": 3},
         "--cpu-offloading-num-layers 3 is more than --num-layers 2; use 2, or all"),
        (1, {"recompute_granularity": "full", "cpu_offloading_num_layers": 0,
             "activation_disk": "/tmp"},
         "--activation-disk has no effect with --cpu-offloading-num-layers 0: what is offloaded to "
         "the host goes on to the disk; give 2, or all"),
        (1, {"optimizer_cpu_offload": True},
         "--optimizer-cpu-offload needs --use-torch-fsdp2, whose optimizer can run on the host; "),
        (1, {"optimizer_cpu_offload": True, "use_distributed_optimizer": True},
         "give that instead of --use-distributed-optimizer, or leave out the offload"),
        (1, {"use_torch_fsdp2": True, "use_distributed_optimizer": True},
         "--use-torch-fsdp2 shards all that --use-distributed-optimizer shards, and weights and "
         "gradients too; give one of them"),
        (1, {"use_torch_fsdp2": True, "transformer_impl": "transformer_engine"},
         "--transformer-impl transformer_engine allocates its layers; give --transformer-impl "),
        (1, {"micro_batch_size": 3},
         "--global-batch-size 4 is not a multiple of --micro-batch-size 3 x 1 data-parallel "
         "ranks; use 3"),
        (3, {}, "--global-batch-size 4 is not a multiple of --micro-batch-size 1 x 3"),
        (1, {"max_position_embeddings": 32},
         "--seq-length 64 is above --max-position-embeddings 32; give --max-position-embeddings"),
        (1, {"min_lr": 1}, "--min-lr 1.0 is above --lr 0.001; use 0.0001"),
        (1, {"lr_warmup_init": 1}, "--lr-warmup-init 1.0 is above --lr 0.001"),
        (1, {"lr_warmup_iters": 10},
         "--lr-warmup-iters 10 is not below --lr-decay-iters 10 (default: --train-iters); use 1"),
        (1, {"lr_decay_style": "WSD"},
         "--lr-decay-style WSD needs --lr-wsd-decay-iters, such as 1"),
        (1, {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9, "lr_warmup_iters": 2},
         "--lr-wsd-decay-iters 9 is more than the iterations between warmup and --lr-decay-iters; "
         "use at most 8"),
        (1, {"skip_train": True},
         "--skip-train only evaluates, but --eval-iters is 0; give --eval-iters 1 or more"),
        (1, {"adam_beta2": 1}, "--adam-beta2 1.0 must be below 1, such as 0.9"),
        (1, {"lr": 1, "weight_decay": 1}, "--weight-decay 1.0 at --lr 1.0 changes the sign of"),
        (1, {"kv_channels": 7}, "--kv-channels 7 is odd; channels are rotated in pairs; use 8"),
        (1, {"hidden_size": 24, "kv_channels": None},
         "--kv-channels 3 is odd; channels are rotated in pairs; use 4"),
        (1, {"freeze": "embedding.*"},
         "--freeze needs streamed layers; give --recompute-granularity selective"),
        (1, STREAMED | {"freeze": "decoder.layer.0.mlp.linear_fc1.weight"},
         "matches no parameter; names are those of checkpoints, such as "
         "decoder.layers.0.mlp.linear_fc1.weight"),
        (1, STREAMED | {"freeze": "*"}, "--freeze * leaves nothing to train; freeze less"),
        (1, STREAMED | {"freeze": "*.weight", "add_qkv_bias": True},
         "linear_qkv.bias trained without its weight, which is not implemented; freeze '*.linear_"),
        (1, STREAMED | {"lora_rank": 4, "freeze": "*.mlp.*"},
         "--freeze has no effect with --lora-rank, which trains adapters alone; leave it out"),
        (1, {"lora_rank": 4}, "--lora-rank needs streamed layers"),
        (1, STREAMED | {"lora_rank": 4, "swiglu": None, "lora_targets": "gate_proj up_proj"},
         "--lora-targets gate_proj is the gate of --swiglu; leave it out"),
        (1, STREAMED | {"lora_rank": 4, "save": "x"},
         "--save writes the adapters of --lora-rank without the weights that they are for; give "
         "--pretrained-checkpoint"),
        (1, STREAMED | {"lora_rank": 4, "load": "x", "finetune": True},
         "--finetune --load takes whole models, and --lora-rank trains adapters of one"),
        (1, STREAMED | {"lora_alpha": 8}, "--lora-alpha has no effect without --lora-rank"),
        (1, {"use_checkpoint_args": True}, "--use-checkpoint-args has no effect without --load"),
    ],
)  # fmt: skip
def test_rejects(world_size, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_config(world_size, **changes)


def test_lists_everything_wrong_at_once():
    with pytest.raises(ValueError, match="are not a multiple of.*\n.*--min-lr"):
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
        (1, STREAMED | {"lora_rank": 4, "swiglu": None}),
        (1, STREAMED | {"freeze": "embedding.* *norm*"}),
    ],
)  # fmt: skip
def test_allows(world_size, changes):
    tiny_config(world_size, **changes)
