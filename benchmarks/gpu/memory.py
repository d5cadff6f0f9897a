"""Parts: peak memory by the real allocator against the plan and the trace; the longest context."""

import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import ROOT, Sizes
from benchmarks.gpu.training import TrainingFailed, train
from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.cli.planner_flags import complete
from megatron_untied.context_parallel.kernels.traced import SCRATCH
from megatron_untied.planner.machine import DEVICE_RESERVE_GIB, Machine, this_gpu
from megatron_untied.planner.plan import Plan, longest
from megatron_untied.platform.device import GIB, current_device

SETTINGS = {
    "on the device": "",
    "on the host, parked": "--cpu-offloading-num-layers all --park-during-attention ",
}
GOAL = 0.03
"""Allowed error of plan and trace, as a share of the measured peak."""
MARGIN = 1.06
"""Factor above the longest context at which a run must fail, at the latest in its second step: the
first one has no Adam moments, which are more than this on a small card."""


def this_machine_alone() -> Machine:
    """One rank on this GPU with its kernels; without one, the planner's default card."""
    gpu, here = this_gpu(), current_device()
    installed = {kind.name: kind().limits for kind in SCRATCH if not kind.missing(here)}
    return Machine(
        gpus_per_node=1,
        gpu=gpu,
        gpu_memory_gib=gpu.memory_gib,
        host_memory_gib=gpu.host_memory_gib,
        kernels=installed or None,
    )


def plan_of(flags: str) -> Plan:
    """The plan of a run of one rank."""
    config = parse_arguments(complete(shlex.split(flags)), world_size=1)
    return Plan(config, this_machine_alone())


def traced_peak(flags: str, file: Path) -> int:
    """Peak bytes that ``memory_trace.py`` counts for a run of one rank."""
    # It would trace "auto" as FlashAttention-3, and the run takes what is installed.
    flags += f" --attention-backend {plan_of(flags).geometry.kernel.kind.name}"
    # A trace needs no GPU, and must not take memory from what is measured.
    trace = ["env", "CUDA_VISIBLE_DEVICES=", sys.executable, "-m", "benchmarks.memory_trace"]
    command = [*trace, "--world-size", "1", "--json", str(file), *shlex.split(flags)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return json.loads(file.read_text())["peak_device_bytes"]


def run_peaks(record: Record, sizes: Sizes) -> None:
    """Two steps under each setting: the peak of the second, which has Adam's moments."""
    for name, extra in SETTINGS.items():
        flags = f"{sizes.model.format(layers=1)} {extra}--seq-length {sizes.memory_length}"
        with ThreadPoolExecutor() as threads:  # the trace runs beside the training
            tracing = threads.submit(traced_peak, flags, record.path.with_suffix(".trace.json"))
            measured = train(flags, iterations=2)[-1]["peak_device_bytes"]
            planned, traced = plan_of(flags).peak.num_bytes, tracing.result()
        row = {"setting": name, "planned, GiB": planned / GIB, "traced, GiB": traced / GIB}
        if not torch.cuda.is_available():
            record.row("peak memory", **row, note="a CPU has no allocator to compare with")
            continue
        off = {
            f"{kind} off by": x / measured - 1 for kind, x in (("plan", planned), ("trace", traced))
        }
        record.row("peak memory", **row, **{"measured, GiB": measured / GIB}, **off)
        for kind, part in off.items():
            record.expect(abs(part) <= GOAL, f"{name}: {kind} {part:+.1%}, goal {GOAL:.0%}")


def run_longest(record: Record, sizes: Sizes) -> None:
    """The longest context that the plan gives must run; beyond the whole card it must not."""
    flags = f"{sizes.model.format(layers=2)} --window-size {sizes.context_window - 1},0 "
    plan = plan_of(f"{flags} --seq-length {sizes.memory_length}")
    card = replace(plan.machine, gpu_memory_gib=plan.machine.gpu_memory_gib + DEVICE_RESERVE_GIB)
    predicted = longest(plan, with_host=True)
    without_reserve = longest(replace(plan, machine=card), with_host=True)
    record.row("predicted", limit="the plan", tokens=predicted)
    record.row("predicted", limit="without the reserve of the plan", tokens=without_reserve)
    if not torch.cuda.is_available():
        predicted = sizes.memory_length  # a CPU is no limit: only that the run works is tested
    fits = _fits(record, flags, predicted)
    record.expect(fits, f"{predicted} tokens do not fit, though the plan says so")
    if torch.cuda.is_available():
        beyond = int(MARGIN * without_reserve) // 1024 * 1024
        problem = f"{beyond} tokens fit, though the plan fills the card with {without_reserve}"
        record.expect(not _fits(record, flags, beyond), problem)


def _fits(record: Record, flags: str, tokens: int) -> bool:
    try:  # two steps: the second one has Adam's moments
        steps = train(f"{flags} --seq-length {tokens}", iterations=2)
    except TrainingFailed as error:
        if not error.is_out_of_memory:
            raise
        record.row("tried", tokens=tokens, result="out of memory")
        return False
    record.row(
        "tried",
        tokens=tokens,
        result="trains",
        **{"peak, GiB": steps[-1]["peak_device_bytes"] / GIB},
    )
    return True
