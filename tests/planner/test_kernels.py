"""The kernel of a plan: that of the GPU and the flags; and the line that a run begins with."""

import re
from dataclasses import replace

import pytest

from megatron_untied.context_parallel.kernels.flash_attention import FlashAttention2, TorchFlash
from megatron_untied.context_parallel.kernels.matrix_products import MatrixProducts
from megatron_untied.context_parallel.kernels.traced import SCRATCH
from megatron_untied.phases import Phase
from megatron_untied.planner.kernels import describe_kernel
from megatron_untied.planner.machine import read_gpus
from megatron_untied.planner.plan import Plan
from megatron_untied.planner.report import as_json, headline
from tests.support.planning import machine, run_config

RUN = "--model llama3-8b --bf16 --seq-length 131072 --context-parallel-size 8 "
GPUS = read_gpus()


def plan(flags: str, gpu: str, **changes) -> Plan:
    return Plan(run_config(RUN + flags), machine(gpu=GPUS[gpu], **changes))


@pytest.mark.parametrize(
    ("gpu", "flags", "name"),
    [
        ("h100-80", "", "flash-attention-3"),
        ("gh200", "--attention-backend flash", "flash-attention-3"),
        ("b200", "", "flash-attention-4"),
        ("a100-80", "", "flash-attention-2"),
        ("rtx-4090", "", "flash-attention-2"),
        ("h100-80", "--attention-backend torch-flash", "torch-flash"),
        ("h100-80", "--attention-backend fused", "cudnn"),
        ("h100-80", "--attention-backend local", "flash-attention-3"),
        ("b200", "--kv-channels 256", "flash-attention-2"),
    ],
)
def test_a_plan_is_for_the_kernel_that_the_gpu_and_the_flags_give(gpu, flags, name):
    made = plan(flags, gpu)
    assert made.geometry.kernel.kind.name == name
    assert as_json(made)["attention_kernel"] == name
    assert headline(made).endswith(f"attention by {name}")


def test_only_what_is_installed_is_planned_with():
    kernels = {kind.name: kind.limits for kind in (FlashAttention2, TorchFlash)}
    assert plan("", "h100-80", kernels=kernels).geometry.kernel.kind is FlashAttention2
    with pytest.raises(ValueError, match="flash-attention-3 is not installed"):
        plan("", "h100-80", kernels={}).geometry  # noqa: B018


@pytest.mark.parametrize(
    ("gpu", "flags", "message"),
    [
        ("a100-80", "--attention-backend flash-attention-3",
         "flash-attention-3 needs a Hopper GPU, and A100 SXM 80 GB is none"),
        ("h100-80", "--attention-backend fused --window-size 4095,0",
         "cudnn has no sliding window"),
        ("h100-80", "--kv-channels 512",
         "takes heads of up to 256 channels in multiples of 8, not --kv-channels 512"),
    ],
)  # fmt: skip
def test_a_kernel_that_does_not_fit_is_refused_with_the_reason(gpu, flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(flags, gpu).geometry  # noqa: B018


def test_slower_kernels_take_longer_and_what_they_allocate_is_counted():
    flags = "--recompute-granularity selective --use-torch-fsdp2 --sequence-tile-size 1024 "
    made = {
        name: plan(flags + f"--attention-backend {name}", "h100-80")
        for name in ("flash-attention-3", "flash-attention-2", "torch-flash", "cudnn")
    }
    hours = {name: each.time.attention for name, each in made.items()}
    assert hours["flash-attention-3"] < hours["cudnn"] < hours["flash-attention-2"]
    for phase, slower in ((Phase.ATTENTION_BACKWARD, "torch-flash"),
                          (Phase.ATTENTION_FORWARD, "flash-attention-2")):  # fmt: skip
        in_kernel = {name: each.phases[phase].num_bytes for name, each in made.items()}
        assert in_kernel["flash-attention-3"] < in_kernel[slower]


def test_every_gpu_has_fractions_for_the_kernels_that_run_on_it():
    for gpu in GPUS.values():
        runs = {k.name for k in SCRATCH if gpu.compute_capability in k.platform.majors}
        assert gpu.attention_fractions.keys() == runs, gpu.title


def chosen(kind, *passed_over):
    kernel = kind()
    kernel.passed_over = passed_over
    return kernel


def test_a_run_begins_with_its_kernel_and_what_a_better_one_would_bring():
    h100 = GPUS["h100-80"]
    line = describe_kernel(
        chosen(TorchFlash, "flash-attention-3 needs the package FlashAttention-3 (No module)"), h100
    )
    assert line == (
        "attention: torch-flash on H100 SXM 80 GB; flash-attention-3 would take about 57% of its "
        "time (needs the package FlashAttention-3 (No module)); cudnn would take about 63% of its "
        "time (--attention-backend cudnn asks for it)"
    )
    on_a100 = describe_kernel(chosen(TorchFlash), GPUS["a100-80"])
    assert on_a100 == "attention: torch-flash on A100 SXM 80 GB"  # none is faster
    assert describe_kernel(chosen(MatrixProducts), None) == "attention: matrix-products"
    unlisted = replace(h100, title="NVIDIA X", attention_fractions={})
    assert describe_kernel(chosen(TorchFlash), unlisted) == "attention: torch-flash on NVIDIA X"
