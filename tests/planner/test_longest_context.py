"""The longest context: nothing that flags can say makes it longer, and its flags give it."""

import itertools
import shlex
from dataclasses import replace

import pytest

from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.cli.context_flags import context_flags, launch_command, training_flags
from megatron_untied.cli.planner_flags import parse_plan_request
from megatron_untied.planner.plan import Plan, fits, length_step, longest
from megatron_untied.planner.search import (
    GPU,
    HOST,
    KERNEL,
    LongestContext,
    limit_of,
    longest_context,
)
from tests.support.planning import machine, run_config

SMALL = (
    "--num-layers 3 --hidden-size 512 --num-attention-heads 4 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --bf16 --seq-length 4096 --context-parallel-size 2 "
    "--vocab-size 8000"
)
POOR = {"gpus_per_node": 2, "gpu_memory_gib": 5.0}


def longest_of(flags: str, **changes) -> LongestContext:
    plan = Plan(run_config(flags, world_size=2), machine(**POOR | changes))
    found = longest_context([plan])
    assert found is not None
    return found


def other_settings(plan: Plan):
    """Everything that the flags of memory can say, by steps."""
    config = plan.config
    for chunk, overlap, fsdp, cpu in itertools.product(
        (2, 4), (True, False), (False, True), (False, True)
    ):
        if cpu and not fsdp:
            continue
        parallel = replace(config.parallel, heads_per_chunk=chunk, cp_overlap=overlap)
        optimization = replace(config.optimization, use_torch_fsdp2=fsdp, optimizer_cpu_offload=cpu)
        for granularity, park, size, on_host in itertools.product(
            ("full", "selective"), (True, False), (1, 2, 3), (0, 1, 2, 3)
        ):
            memory = replace(
                config.memory, recompute_granularity=granularity, park_during_attention=park,
                recompute_num_layers=size, cpu_offloading_num_layers=on_host,
                attention_output_layers=None, sequence_tile_size=2048, loss_chunk_size=512,
            )  # fmt: skip
            yield replace(config, parallel=parallel, memory=memory, optimization=optimization)


@pytest.mark.parametrize("host_memory_gib", [2048, 5.0])
def test_no_setting_fits_a_longer_one(host_memory_gib):
    found = longest_of(SMALL, host_memory_gib=host_memory_gib)
    assert found.plan.fits
    step = length_step(found.plan)
    for config in other_settings(found.plan):
        longer = Plan(config, found.plan.machine, every_layer=False).at_length(found.tokens + step)
        assert not fits(longer), config
    both = f"{GPU} and {HOST}"
    assert found.limit in (GPU, HOST, both, f"{both} together", KERNEL)


def test_much_and_little_host_memory_limit_differently():
    rich, poor = (longest_of(SMALL, host_memory_gib=gib) for gib in (10000, 4.5))
    assert rich.tokens > poor.tokens
    assert rich.limit == GPU
    assert HOST in poor.limit


def test_the_kernel_may_be_the_limit():
    found = longest_of(SMALL, gpu_memory_gib=5000, host_memory_gib=100000)
    assert found.limit == KERNEL


def test_settings_are_no_slower_than_they_must_be():
    """Plenty of memory for this length: nothing is recomputed, offloaded or parked."""
    found = longest_of(SMALL, gpu_memory_gib=5000, host_memory_gib=100000)
    assert found.plan.config.memory.cpu_offloading_num_layers == 0
    assert not found.plan.config.optimization.optimizer_cpu_offload


def test_nothing_fits_at_all():
    huge = f"{SMALL} --num-layers 90 --hidden-size 8192 --num-attention-heads 64"
    plan = Plan(run_config(huge, world_size=2), machine(**POOR))
    assert longest_context([plan]) is None


def test_what_limits_given_flags():
    plan = Plan(run_config(SMALL, world_size=2), machine(**POOR))
    tokens = longest(plan, with_host=True)
    assert limit_of([plan], tokens) == GPU


def test_the_flags_give_the_plan():
    """Flags that were given and that contradict are left out, the others stay."""
    given = shlex.split(
        f"{SMALL} --use-distributed-optimizer --no-cp-overlap --recompute-granularity full "
        "--recompute-method uniform --cpu-offloading-num-layers=2 --max-position-embeddings 8192 "
        "--mock-data --micro-batch-size 1 --lr 1 --train-iters 2 --tokenizer-type NullTokenizer"
    )
    plan = Plan(parse_arguments(given, world_size=2), machine(**POOR))
    found = longest_context([plan])
    flags = training_flags(given, found.plan.config)
    assert flags.count("--seq-length") == 1
    said = Plan(parse_arguments(flags, world_size=2), plan.machine)
    assert said.config.batch.seq_length == found.tokens > 8192
    assert said.peak.num_bytes == found.plan.peak.num_bytes
    assert said.host.total() == found.plan.host.total()
    assert context_flags(said.config) == context_flags(found.plan.config)


def test_without_a_length_all_ranks_share_a_sequence():
    question = parse_plan_request(
        "--model llama3-8b --bf16 --nodes 2 --gpus-per-node 4 --max-context".split()
    )
    assert question.assumed_length
    assert [
        (run.parallel.context_parallel_size, run.parallel.cp_comm_type)
        for run in question.other_ranks
    ] == [(8, "a2a"), (8, "a2a+p2p")]
    told = parse_plan_request("--model llama3-8b --context-parallel-size 2 --max-context".split())
    assert told.other_ranks == ()


def test_a_command_for_several_nodes_names_its_own():
    assert launch_command(["--lr", "1"], machine()).startswith("torchrun --nproc-per-node 8 pre")
    assert '--nnodes 2 --node-rank "$NODE_RANK"' in launch_command([], machine(nodes=2))
