"""The tool that checks kernels on a GPU: what can be known of it without one."""

import sys

import pytest
import torch

from benchmarks import check_kernels
from megatron_untied.context_parallel.kernels import Mask
from megatron_untied.context_parallel.kernels.registry import KERNELS
from megatron_untied.context_parallel.kernels.split_calls import Shape, split_calls

KINDS = tuple(dict.fromkeys(kind for row in KERNELS.values() for kind in row))


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_no_kernel_refuses_the_long_call(kind):
    rows = check_kernels.LONG
    shape = Shape(
        num_queries=rows,
        num_keys=rows,
        b=1,
        d=check_kernels.HEAD_WIDTH,
        **check_kernels.FAR_HEADS,
    )
    num_calls = len(split_calls(shape, Mask(window=check_kernels.WINDOW), kind.limits))
    assert num_calls == (2 if kind.limits.indexes_calls_in_32_bits else 1)


def test_every_kernel_of_this_machine_is_checked(monkeypatch, capsys):
    monkeypatch.setattr(check_kernels, "TAIL", 64)
    monkeypatch.setattr(check_kernels, "WINDOW", 32)
    words = ["check_kernels.py", "--tokens", "256", "--long", "512", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", words)
    check_kernels.main()
    said = capsys.readouterr().out
    for kind in KINDS:
        assert kind.name in said
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert said.count("causal") == sum(
        kind.missing(here) is None and torch.float32 in kind.limits.dtypes for kind in KINDS
    )
