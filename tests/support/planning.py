"""Runs and machines to plan."""

from megatron_untied.cli.planner_flags import parse_plan_request
from megatron_untied.config.run import RunConfig
from megatron_untied.planner.machine import Machine, read_gpus


def run_config(flags: str, *, world_size: int = 8) -> RunConfig:
    """The run that ``flags`` describe, with what the planner assumes."""
    machine_flags = ["--gpus-per-node", str(world_size)]
    return parse_plan_request([*machine_flags, *flags.split()]).config


def machine(**changes) -> Machine:
    """A node of eight GPUs of 80 GiB and 2 TiB."""
    usual = {"gpu": read_gpus()["h100-80"], "gpu_memory_gib": 80, "host_memory_gib": 2048}
    return Machine(**usual | changes)
