"""What the tool refuses; what it prints is tested with the README's command."""

import sys

import pytest

from megatron_untied.commands import trace

RUN = "--world-size 8 --model llama3-8b --bf16 --seq-length 65536 --context-parallel-size 8"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cp-heads-per-chunk auto", "auto depends on the memory of a machine"),
        ("--recompute-granularity auto", "auto depends on the memory of a machine"),
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
