import math
import re

import pytest

from megatron_untied.checkpoint import Provenance
from megatron_untied.checkpoint import directory as disk
from megatron_untied.checkpoint.run_config import write_run_config
from megatron_untied.cli.arguments import defaults, parse_arguments, parse_flags, parser
from megatron_untied.cli.derived import rotary_config
from megatron_untied.cli.flags import FLAGS, NOT_YET
from megatron_untied.cli.planner_flags import parse_plan_request
from megatron_untied.config import RotaryConfig
from tests.support.command_line import command_line, tiny_config
from tests.support.optimizer_run import MODEL


def rejects(message: str):
    return pytest.raises(ValueError, match=re.escape(message))


def test_flags_become_one_configuration():
    config = tiny_config(
        world_size=4,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        bf16=True,
        cp_heads_per_chunk=4,
        loss_chunk_size=16,
        adam_beta2=0.95,
        lr_warmup_iters=3,
        no_load_optim=True,
        no_check_for_nan_in_loss_and_grad=True,
        qk_layernorm=True,
        rotary_base=5e5,
    )
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.parallel.sequence_parallel
    assert config.parallel.heads_per_chunk == 4
    assert config.precision.bf16
    assert config.memory.loss_chunk_size == 16
    assert config.optimization.adam_beta2 == 0.95
    assert config.schedule.lr_warmup_iters == 3
    assert not config.checkpoint.load_optim
    assert config.checkpoint.load_rng
    assert not config.loop.check_for_nan
    assert not config.model.add_bias_linear
    assert config.model.qk_layernorm
    assert config.model.vocab_size == 251  # NullTokenizer adds an end of document
    assert config.model.rotary == RotaryConfig(base=5e5)
    assert config.distributed.timeout_minutes == 10


LLAMA_8B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "ffn_hidden_size": 14336,
    "global_batch_size": 1,
    "context_parallel_size": 8,
    "recompute_granularity": "selective",
}


def test_the_timeout_follows_the_time_of_a_step(monkeypatch):
    monkeypatch.setattr("megatron_untied.platform.device.slow_flops_per_second", lambda: 2e14)

    def minutes(millions, **flags):
        config = tiny_config(8, seq_length=millions * 2**20, **LLAMA_8B | flags)
        return config.distributed.timeout_minutes

    assert minutes(1) == 12
    attention = 3.5 * 32 * 2 * 4096 * (5 * 2**20) ** 2 / 8 / 2e14 / 60
    assert attention < minutes(5) < 1.03 * attention
    # One more forward of attention.
    assert minutes(5, recompute_granularity="full") == pytest.approx(
        4.5 / 3.5 * minutes(5), rel=0.01
    )
    assert minutes(5, distributed_timeout_minutes=0.5) == 0.5


def test_defaults_are_megatrons():
    config = tiny_config(
        swiglu=None,
        ffn_hidden_size=None,
        kv_channels=None,
        group_query_attention=None,
        num_query_groups=None,
        normalization=None,
        disable_bias_linear=None,
        untie_embeddings_and_output_weights=None,
        global_batch_size=None,
    )
    model = config.model
    assert (model.ffn_hidden_size, model.kv_channels, model.num_query_groups) == (192, 6, 8)
    assert (model.normalization, model.add_bias_linear) == ("LayerNorm", True)
    assert not model.untie_embeddings_and_output_weights
    assert model.max_position_embeddings == config.batch.seq_length
    assert config.schedule.lr_decay_iters == config.loop.train_iters
    assert (config.schedule.min_lr, config.schedule.lr_decay_style) == (0.0, "linear")
    assert (config.seed, config.optimization.weight_decay) == (1234, 0.01)


def test_swiglu_width_is_two_thirds_of_four_hidden_rounded_down_to_64():
    assert tiny_config(ffn_hidden_size=None, hidden_size=4096).model.ffn_hidden_size == 10880


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16},
         "--hidden-size 16 with --swiglu gives an MLP of width 0: 8/3 x 16, rounded down to a "
         "multiple of 64; give --ffn-hidden-size, such as 43"),
        ({"hidden_size": 4, "kv_channels": None},
         "--hidden-size 4 is not a multiple of --num-attention-heads 8; give --kv-channels, such "
         "as 2"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_derived_are_refused_with_one_that_works(changes, message):
    with rejects(message):
        tiny_config(ffn_hidden_size=None, **changes)
    name, value = re.search(r"--([\w-]+), such as (\d+)", message).groups()
    tiny_config(**{"ffn_hidden_size": 43} | changes | {name.replace("-", "_"): value})


def test_the_width_that_is_proposed_divides_over_tensor_parallel_ranks():
    with rejects("give --ffn-hidden-size, such as 44"):
        tiny_config(4, ffn_hidden_size=None, hidden_size=16, tensor_model_parallel_size=4)


@pytest.mark.parametrize(
    ("text", "tokens"), [("1Mi", 2**20), ("128Ki", 2**17), ("1.5mi", 3 * 2**19), ("4096", 4096)]
)
def test_lengths_may_have_a_unit(text, tokens):
    config = tiny_config(seq_length=text, sequence_tile_size=text, recompute_granularity="full",
                         loss_chunk_size=text, window_size=f"{text},0")  # fmt: skip
    assert config.batch.seq_length == config.model.max_position_embeddings == tokens
    assert config.memory.sequence_tile_size == config.memory.loss_chunk_size == tokens
    assert config.model.window_size == tokens + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1M", "argument --seq-length: '1M' is ambiguous; give 1Mi for 1048576 tokens, or 1000000"),
        ("128k", "'128k' is ambiguous; give 128Ki for 131072 tokens, or 128000"),
        ("0.3Ki", "'0.3Ki' is not a whole number of tokens; use 307"),
        ("1MiB", "'1MiB' is not an integer"),
        ("0Ki", "0 is below 1, the smallest value"),
        ("4Gi", "4294967296 is above 2147483647, the largest value"),
    ],
)
def test_lengths_of_which_the_meaning_is_open_are_refused(text, message):
    with rejects(message):
        parse_flags(["--seq-length", text])


def test_all_layers_can_be_offloaded_by_name():
    def offloaded(value):
        config = tiny_config(recompute_granularity="full", cpu_offloading_num_layers=value)
        return config.memory.cpu_offloading_num_layers

    assert [offloaded(value) for value in ("all", "1", "0")] == [2, 1, 0]
    with rejects("argument --cpu-offloading-num-layers: 'most' is not an integer; or give all"):
        offloaded("most")


def test_disks_are_folders_with_commas_between():
    flags = {"recompute_granularity": "full", "cpu_offloading_num_layers": "all"}
    memory = tiny_config(**flags, activation_disk="/a,/b", activation_disk_gib=0.5).memory
    assert memory.activation_disk == ("/a", "/b")
    assert (memory.activation_disk_gib, memory.activation_disk_checksums) == (0.5, True)
    limits = [
        tiny_config(**flags, activation_disk="/a", activation_disk_gib=value).memory
        for value in ("auto", "all", "0")
    ]
    assert [memory.activation_disk_gib for memory in limits] == ["auto", None, 0.0]
    assert all(isinstance(memory.sequence_tile_size, int) for memory in limits)  # as without disks
    assert tiny_config(**flags).memory.activation_disk_gib is None
    opened = tiny_config(recompute_granularity="auto", activation_disk="/a").memory
    assert opened.cpu_offloading_num_layers == "auto"
    for value, message in {
        "/a,": "argument --activation-disk: '/a,' has an empty folder; give DIR or DIR,DIR",
        "/a,/b,/a": "'/a,/b,/a' has a folder twice; give each disk once",
    }.items():
        with rejects(message):
            tiny_config(**flags, activation_disk=value)


def test_global_batch_is_one_pass_of_the_data_parallel_ranks_unless_given():
    config = tiny_config(world_size=6, context_parallel_size=2, micro_batch_size=2,
                         global_batch_size=None)  # fmt: skip
    assert config.batch.global_batch_size == 6


def test_rope_scaling_is_llama3s():
    rotary = tiny_config(use_rope_scaling=True, rope_scaling_factor=32).model.rotary
    assert rotary == RotaryConfig(scaling="llama3", scaling_factor=32.0)


YARN = {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4,
        "yarn_original_max_position_embeddings": 32768}  # fmt: skip


def test_every_kind_of_scaling_has_its_flags():
    assert tiny_config(rotary_seq_len_interpolation_factor=4).model.rotary == RotaryConfig(
        scaling="linear", scaling_factor=4.0
    )
    assert tiny_config(rotary_seq_len_interpolation_factor=1).model.rotary == RotaryConfig()
    assert tiny_config(**YARN, rotary_base=1e6).model.rotary == RotaryConfig(
        base=1e6, scaling="yarn", scaling_factor=4.0, original_max_positions=32768
    )
    config = tiny_config(
        **YARN, yarn_beta_fast=16, yarn_beta_slow=2, yarn_mscale=0.7, yarn_mscale_all_dim=1,
        no_yarn_correction_range_round_to_int=True,
    )  # fmt: skip
    log4 = math.log(4)
    assert config.model.rotary == RotaryConfig(
        scaling="yarn",
        scaling_factor=4.0,
        original_max_positions=32768,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=(0.07 * log4 + 1) / (0.1 * log4 + 1),
        truncate=False,
    )


@pytest.mark.parametrize(
    ("stored", "given", "expected"),
    [
        ({"base": 5e5, "scaling": "llama3", "scaling_factor": 8.0}, {"rotary_base": 1e6},
         {"base": 1e6, "scaling": "llama3", "scaling_factor": 8.0}),
        ({"scaling": "yarn", "scaling_factor": 4.0, "attention_factor": 1.5},
         {"use_rope_scaling": True}, {"scaling": "llama3", "scaling_factor": 8.0}),
        ({"scaling": "linear", "scaling_factor": 2.0, "percent": 0.5},
         {"rotary_seq_len_interpolation_factor": 1}, {"percent": 0.5}),
        ({"scaling": "yarn", "scaling_factor": 4.0}, {}, {"scaling": "yarn", "scaling_factor": 4}),
    ],
)  # fmt: skip
def test_flags_change_the_rotary_embedding_of_a_checkpoint(stored, given, expected):
    assert rotary_config(given, RotaryConfig(**stored)) == RotaryConfig(**expected)


def test_rejects_rope_where_the_checkpoint_has_yarn():
    yarn = RotaryConfig(scaling="yarn", scaling_factor=4.0)
    with rejects("--position-embedding-type rope contradicts the checkpoint, which has yarn"):
        rotary_config({"position_embedding_type": "rope"}, yarn)


def test_a_window_counts_the_query_itself():
    # Megatron's pair are neighbors: 4095 tokens before a query, and none after.
    assert tiny_config(window_size="4095,0").model.window_size == 4096
    assert tiny_config(window_size="(0,0)").model.window_size == 1
    assert tiny_config().model.window_size is None


@pytest.mark.parametrize(
    "words", [["--window-size", "-1,0"], ["--window-size=-1,0"], ["--window-size", "(-1,0)"]]
)
def test_a_window_of_minus_one_is_none(words):
    argv = [*command_line(), "--window-size", "7,0", *words]
    assert parse_arguments(argv, world_size=1).model.window_size is None


def test_a_ring_of_ulysses_groups():
    config = tiny_config(8, context_parallel_size=8, cp_comm_type="a2a+p2p",
                         hierarchical_context_parallel_sizes="4 2")  # fmt: skip
    assert config.parallel.hierarchical_context_parallel_sizes == (4, 2)
    assert config.parallel.num_ulysses_and_ring == (4, 2)


def test_documents_and_kernels():
    config = tiny_config(reset_position_ids=True, dataloader_inter_document_masking=True,
                         attention_backend="local")  # fmt: skip
    assert config.data.reset_position_ids
    assert config.data.dataloader_inter_document_masking
    assert config.attention_backend == "local"
    assert tiny_config().attention_backend == "auto"


def test_a_value_may_follow_an_equals_sign():
    assert parse_arguments([*command_line(), "--lr=0.5"], world_size=1).schedule.lr == 0.5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layer", "2"], "unknown flag --num-layer; did you mean --num-layers?"),
        (["--recompute-granularty=full"], "did you mean --recompute-granularity?"),
        (["--zzz"], "unknown flag --zzz"),
        (["stray"], "'stray' does not belong to a flag"),
        (["--bf16", "0"], "--bf16 takes no value; remove '0'"),
        (["--num-layers", "0"], "argument --num-layers: 0 is below 1, the smallest value"),
        (["--num-layers", "two"], "argument --num-layers: 'two' is not an integer"),
        (["--lr", "nan"], "argument --lr: nan is below 0"),
        (["--lr", "fast"], "argument --lr: 'fast' is not a number"),
        (["--hidden-dropout", "0.1"], "argument --hidden-dropout: invalid choice: 0.1"),
        (
            ["--rope-scaling-factor", "0.5"],
            "argument --rope-scaling-factor: 0.5 is below 1.0, the smallest value",
        ),
        (["--yarn-rotary-scaling-factor", "0.5"], "0.5 is below 1.0, the smallest value"),
        (["--position-embedding-type", "learned_absolute"], "invalid choice: 'learned_absolute'"),
        (["--cp-heads-per-chunk", "some"], "'some' is not an integer"),
        (["--cp-comm-type", "allgather"], "argument --cp-comm-type: invalid choice: 'allgather'"),
        (["--hierarchical-context-parallel-sizes", "4"], "expected 2 arguments"),
        (["--window-size", "128"], "'128' is not LEFT,0: a query attends to LEFT tokens before it"),
        (["--window-size", "128,128"], "'128,128' is not LEFT,0"),
        (["--window-size", "x,0"], "'x' is not an integer"),
        (["--window-size", "-2,0"], "-2 is below -1"),
        (["--seed", "-1"], "-1 is below 0"),
        (["--attention-backend", "triton"], "invalid choice: 'triton'"),
        (["--lr-decay-style", "step"], "argument --lr-decay-style: invalid choice: 'step'"),
    ],
)
def test_rejects_what_no_flag_means(argv, message):
    with rejects(message):
        parse_flags(argv)


@pytest.mark.parametrize("refused", NOT_YET)
def test_refuses_flags_whose_feature_does_not_exist(refused):
    name, _, value = refused.partition(" ")
    with rejects(f"{refused} is not supported: {NOT_YET[refused]}"):
        parse_flags(["--seed", "1", name, value or "1"])
    with rejects(f"{refused} is not supported: {NOT_YET[refused]}"):
        parse_flags([f"{name}={value or 1}"])


def test_no_flag_is_both_honored_and_refused():
    honored = {name for group in FLAGS.values() for name, _ in group}
    assert not honored & NOT_YET.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": None, "train_iters": None}, "missing --train-iters --lr; required"),
        ({"num_layers": None}, "missing --num-layers"),
        ({"tokenizer_type": None}, "missing --tokenizer-type"),
        ({"group_query_attention": None},
         "--num-query-groups has no effect without --group-query-attention; give both"),
        ({"position_embedding_type": "yarn"},
         "--position-embedding-type yarn needs --yarn-rotary-scaling-factor and "
         "--yarn-original-max-position-embeddings"),
        ({"yarn_beta_fast": 16},
         "--yarn-beta-fast has no effect without --position-embedding-type yarn"),
        (YARN | {"yarn_mscale": 1}, "--yarn-mscale has no effect without --yarn-mscale-all-dim"),
        (YARN | {"use_rope_scaling": True},
         "--use-rope-scaling and --position-embedding-type yarn both scale the rotary embedding; "
         "give one of them"),
        ({"rotary_seq_len_interpolation_factor": 2, "use_rope_scaling": True},
         "--use-rope-scaling and --rotary-seq-len-interpolation-factor both scale"),
        ({"rope_scaling_factor": 4}, "--rope-scaling-factor has no effect without --use-rope"),
        ({"dataloader_inter_document_masking": True},
         "--dataloader-inter-document-masking has no effect without --reset-position-ids"),
        ({"document_boundaries": "eod"},
         "--document-boundaries has no effect without --reset-position-ids"),
        ({"recompute_granularity": "full", "activation_disk": "/a"},
         "--activation-disk has no effect without --cpu-offloading-num-layers; give both"),
        ({"activation_disk_gib": 5}, "--activation-disk-gib has no effect without --activation-d"),
        ({"no_activation_disk_checksums": True},
         "--no-activation-disk-checksums has no effect without --activation-disk; give both"),
        ({"save_interval": 5}, "--save-interval has no effect without --save"),
        ({"finetune": True}, "--finetune has no effect without --load"),
        ({"use_checkpoint_args": True}, "--use-checkpoint-args has no effect without --load"),
        ({"reset_data_position": True}, "--reset-data-position has no effect without --load"),
        ({"save_into_existing": True}, "--save-into-existing has no effect without --save"),
        ({"hidden_size": 60, "kv_channels": None},
         "--hidden-size 60 is not a multiple of --num-attention-heads 8; give --kv-channels, such "
         "as 6"),
        ({"mock_data": None}, "give either --data-path or --mock-data"),
        ({"wandb_project": "mine"}, "--wandb-project mine needs the package wandb"),
        ({"distributed_backend": "nccl"}, "--distributed-backend nccl needs GPUs"),
    ],
)  # fmt: skip
def test_rejects_flags_that_need_others(changes, message):
    with rejects(message):
        tiny_config(**changes)


@pytest.mark.parametrize("spelling", ["opt_param-scheduler", "opt-param-scheduler"])
def test_megatrons_two_spellings_are_one_flag(spelling):
    for name in ("override", "use-checkpoint"):
        argv = [*command_line(load="somewhere"), f"--{name}-{spelling}"]
        checkpoint = parse_arguments(argv, world_size=1).checkpoint
        assert checkpoint.override_opt_param_scheduler == (name == "override")
        assert checkpoint.use_checkpoint_opt_param_scheduler == (name == "use-checkpoint")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--override-opt_param-scheduler", "--override-opt_param-scheduler cannot be combined"),
        ("--finetune", "has no effect with --finetune, which restarts the schedule"),
        ("--no-load-optim", "has no effect with --no-load-optim, which restarts the schedule"),
    ],
)
def test_rejects_two_sources_of_the_schedule(flag, message):
    argv = command_line(load="somewhere", use_checkpoint_opt_param_scheduler=True)
    with rejects(message):
        parse_arguments([*argv, flag], world_size=1)


@pytest.mark.parametrize("parse", [parse_arguments, parse_plan_request])
def test_rejects_another_architecture_than_the_checkpoints(tmp_path, parse):
    """In training and in planning alike."""
    disk.start(tmp_path, 0)
    write_run_config(disk.staging_folder(tmp_path, 0), MODEL, None, Provenance())
    disk.publish(tmp_path, 0)
    argv = [
        *("--load", str(tmp_path), "--finetune", "--use-checkpoint-args", "--seq-length", "32"),
        *("--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--mock-data"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(MODEL.vocab_size - 1)),
    ]
    arguments = {"world_size": 1} if parse is parse_arguments else {}
    config = parse([*argv, "--num-layers", str(MODEL.num_layers)], **arguments)
    assert getattr(config, "config", config).model.num_layers == MODEL.num_layers
    with rejects("--num-layers: 2, here 3. Leave these flags out: --use-checkpoint-args takes"):
        parse([*argv, "--num-layers", "3"], **arguments)


def test_samples_are_counted_from_where_the_run_begins():
    config = tiny_config(train_iters=10, global_batch_size=2, eval_iters=3)
    assert config.num_samples(iteration=0, consumed_samples=0) == (20, 6, 0)
    # Read in batches of 4 before: the dataset must reach 12 + 7 x 2.
    assert config.num_samples(iteration=3, consumed_samples=12) == (26, 6, 0)
    assert config.num_samples(iteration=3, consumed_samples=0) == (14, 6, 0)
    assert config.num_samples(iteration=10, consumed_samples=40) == (0, 6, 0)


def test_every_default_reaches_help():
    text = " ".join(parser().format_help().split())
    for name in (name for group in FLAGS.values() for name, _ in group):
        assert name in text
    assert "default: 1000" in text
    assert defaults()["eval_interval"] == 1000


def test_says_what_is_missing_when_nothing_is_given():
    with rejects("missing --seq-length --micro-batch-size --train-iters --lr --tokenizer-type"):
        parse_arguments([], world_size=1)
