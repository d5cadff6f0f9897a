r"""Count the GPU and host memory of one training step, per rank, on any machine.

Runs the real step (model, loss, sharding, offloading, optimizer) at full size on tensors without
memory; attention kernels and collectives only allocate what the real ones do. Takes the flags of
pretrain_gpt.py; --micro-batch-size, --lr and data are optional. What is "auto" is chosen for the
machine that flags of plan_memory.py describe, by default a node of H100s.

    python benchmarks/memory_trace.py --world-size 8 --model llama3-8b --seq-length 5242880 \
        --context-parallel-size 8 --cp-heads-per-chunk 8 --no-cp-overlap --bf16 \
        --use-torch-fsdp2 --recompute-granularity selective --cpu-offloading-num-layers all \
        --sequence-tile-size 8192 --loss-chunk-size 8192

Not counted: what the allocator adds to a request, and what CUDA, NCCL and cuBLAS take for
themselves; 4 GiB is a reasonable reserve.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: nodes have no display

from matplotlib import pyplot
from rich.console import Console

from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.cli.flag_values import count
from megatron_untied.cli.planner_flags import add_machine_flags, complete, machine_of
from megatron_untied.commands import parser_beside_training
from megatron_untied.phases import Phase
from megatron_untied.planner.automatic import choose, describe, is_automatic
from megatron_untied.planner.report import print_line, print_table
from megatron_untied.platform.device import GIB
from megatron_untied.tracing.step import StepTrace, trace_step
from megatron_untied.training.initialize import errors_in_one_line


def parse_own(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This tool's flags, and those of the run."""
    parser = parser_beside_training(__doc__, "--world-size N")
    parser.add_argument("--world-size", type=count, required=True, help="ranks of the run")
    add_machine_flags(parser)
    parser.add_argument("--rank", type=int, default=0, help="the rank to trace (0)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the numbers here")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the step's memory here")
    own, flags = parser.parse_known_args(argv)
    if own.rank not in range(own.world_size):
        parser.error(
            f"--rank {own.rank} is not one of the {own.world_size} ranks: "
            f"use 0 to {own.world_size - 1}"
        )
    own.gpus_per_node = min(own.gpus_per_node, own.world_size)
    nodes, rest = divmod(own.world_size, own.gpus_per_node)
    if rest or own.nodes not in (1, nodes):
        parser.error(
            f"--world-size {own.world_size} is not the ranks of whole nodes of --gpus-per-node "
            f"{own.gpus_per_node}; give as many GPUs per node as divide it, and leave out --nodes"
        )
    own.nodes = nodes
    for file in filter(None, (own.json, own.plot)):  # before minutes of tracing, not after them
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(str(error))
    return own, flags


def as_json(trace: StepTrace) -> dict[str, object]:
    """The numbers by name; bytes."""
    return {
        "peak_device_bytes": trace.peak.num_bytes,
        "peak_phase": trace.peak_phase,
        "live_at_peak": trace.peak.by_category,
        "peak_by_phase": {name: peak.num_bytes for name, peak in trace.peak_by_phase.items()},
        "model_state_bytes": trace.model_state_bytes,
        "host_bytes": trace.host_bytes,
        "attention_forward_calls_per_layer": trace.attention_forward_calls_per_layer,
        "attention_flops": trace.attention_flops,
        "exchange_bytes_per_layer": trace.exchange_bytes_per_layer,
    }


def print_trace(trace: StepTrace, console: Console) -> None:
    """Print two tables: the phases of a step, and what was alive at the peak."""
    phases = {
        name + " <- peak" * (name == trace.peak_phase): [f"{peak.num_bytes / GIB:.2f}"]
        for name, peak in trace.peak_by_phase.items()
    }
    print_table(console, "Device memory by phase", "phase", ["highest, GiB"], phases)
    alive = {
        category: [f"{num_bytes / GIB:.2f}"]
        for category, num_bytes in trace.peak.by_category.items()
        if num_bytes >= trace.peak.num_bytes / 1000  # small ones would hide the others
    }
    title = f"Alive at the peak, in {trace.peak_phase}"
    print_table(console, title, "allocated for", ["GiB"], alive)
    print_line(
        console,
        f"device peak {trace.peak.num_bytes / GIB:.2f} GiB, between steps "
        f"{trace.model_state_bytes / GIB:.2f}; host {trace.host_bytes / GIB:.2f} GiB per rank",
    )
    print_line(
        console,
        f"per layer: attention forward {trace.attention_forward_calls_per_layer:g} times per step, "
        f"{trace.exchange_bytes_per_layer / GIB:.2f} GiB exchanged; attention "
        f"{trace.attention_flops:.4g} FLOPs per step",
    )


COLORS = {
    Phase.SETUP: "lightgray",
    Phase.FORWARD: "lightsteelblue",
    Phase.ATTENTION_FORWARD: "tab:blue",
    Phase.MLP_FORWARD: "cornflowerblue",
    Phase.LOSS: "tab:orange",
    Phase.BACKWARD: "mistyrose",
    Phase.RECOMPUTE_ATTENTION: "tab:blue",
    Phase.RECOMPUTE_MLP: "cornflowerblue",
    Phase.MLP_BACKWARD: "salmon",
    Phase.ATTENTION_BACKWARD: "tab:red",
    Phase.QKV_BACKWARD: "indianred",
    Phase.OPTIMIZER: "gray",
}
# In the colors of the forward that they repeat.
HATCHED = {Phase.RECOMPUTE_ATTENTION, Phase.RECOMPUTE_MLP}


def draw(trace: StepTrace, title: str):
    """A figure of the step: a bar per phase in their order, as high as its peak."""
    figure, axes = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    labeled = set()
    for place, (phase, num_bytes) in enumerate(trace.timeline):
        label = None if phase in labeled else phase  # every layer has a bar, the legend one line
        labeled.add(phase)
        hatch = "///" if phase in HATCHED else None
        axes.bar(place, num_bytes / GIB, 1, color=COLORS[phase], hatch=hatch, label=label)
    axes.axhline(trace.model_state_bytes / GIB, color="black", linestyle=":")
    axes.set(title=title, ylabel="device memory, GiB", xticks=[])
    axes.set(xlabel="a step, phase after phase; dotted: between steps")
    axes.margins(x=0)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def main() -> None:
    """Trace one step, print it, and write the files that were requested."""
    own, flags = parse_own(sys.argv[1:])
    console, began = Console(), time.perf_counter()
    with errors_in_one_line():
        # As for a plan: the learning rate and the data do not change what is allocated.
        config = parse_arguments(complete(flags), world_size=own.world_size)
        if config.stages:
            raise ValueError(
                "--seq-length-schedule has several lengths, and a trace is of one step; give "
                "--seq-length and the batch and rotary flags of the stage to trace"
            )
        if is_automatic(config):
            plan = choose(config, machine_of(own))  # as training does on such nodes
            print_line(console, describe(plan))
            config = plan.config
        with console.status("tracing a step"):
            trace = trace_step(config, world_size=own.world_size, rank=own.rank)
    print_trace(trace, console)
    console.print(f"traced in {time.perf_counter() - began:.0f} s")
    if own.plot:
        draw(trace, f"rank {own.rank} of {own.world_size}").savefig(own.plot, dpi=150)
    if own.json:
        own.json.write_text(json.dumps(as_json(trace), indent=2) + "\n")
