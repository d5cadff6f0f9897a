"""What the tool refuses; what it prints is tested with the README's command."""

import sys

import pytest

from megatron_untied.commands import trace
from megatron_untied.planner.automatic import choose
from megatron_untied.planner.machine import read_gpus
from tests.support.planning import machine, run_config

AUTOMATIC = (
    "--world-size 8 --model llama3-8b --bf16 --seq-length 4194304 --context-parallel-size 8 "
    "--use-torch-fsdp2 --cp-heads-per-chunk auto --recompute-granularity auto "
    "--activation-disk /nvme --gpu a100-40 --host-memory-gib 700"
)
RUN = "--world-size 8 --model llama3-8b --bf16 --seq-length 65536 --context-parallel-size 8"


def test_what_is_automatic_is_chosen_as_in_training(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory_trace.py", *AUTOMATIC.split()])
    traced = []
    monkeypatch.setattr(trace, "print_trace", lambda *_: None)
    monkeypatch.setattr(trace, "trace_step", lambda config, **_: traced.append(config))
    trace.main()
    gpu = read_gpus()["a100-40"]
    nodes = machine(gpu=gpu, gpu_memory_gib=gpu.memory_gib, host_memory_gib=700)
    planned = choose(run_config(AUTOMATIC.partition(" --gpu ")[0].partition("8 ")[2]), nodes)
    assert [config.memory for config in traced] == [planned.config.memory]
    assert traced[0].parallel == planned.config.parallel
    assert traced[0].memory.activation_disk_gib > 0
    assert "planned: --cp-heads-per-chunk" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cp-heads-per-chunk auto --gpu-memory-gib 6", "no automatic setting fits: the nearest"),
        (
            "--gpus-per-node 3",
            "--world-size 8 is not the ranks of whole nodes of --gpus-per-node 3",
        ),
        ("--nodes 3", "and leave out --nodes"),
        ("--rank 8", "--rank 8 is not one of the 8 ranks: use 0 to 7"),
        ("--rank -1", "--rank -1 is not one of the 8 ranks"),
        ("--json /dev/null/x.json", "/dev/null"),
        ("--seq-length 134217728 --recompute-granularity full", "give more ring ranks"),
    ],
)
def test_a_mistake_is_said_before_the_trace(flags, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory_trace.py", *RUN.split(), *flags.split()])
    with pytest.raises(SystemExit) as stopped:
        trace.main()
    assert message in str(stopped.value) + capsys.readouterr().err
