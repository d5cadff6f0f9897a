import io
import json
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from megatron_untied.context_parallel.buffer_plan import Buffer
from megatron_untied.phases import Phase
from megatron_untied.planner.buffer_table import (
    buffers_of_rank,
    print_buffers,
    shared_memories,
)
from megatron_untied.planner.plan import Plan
from tests.planner.planned import machine, run_config
from tests.planner.test_against_tracer import FAST


def buffer(name, numel, memory=None, because=""):
    return Buffer(
        name=name, memory=memory or name, numel=numel, dtype=torch.float32, because=because
    )


def test_buffers_of_one_memory_stand_together_with_its_owner_first():
    send = buffer("send", 7, memory="out", because="it is idle")
    uses = [
        (Phase.ATTENTION_FORWARD, (send, buffer("out", 5), buffer("q", 6))),
        (Phase.ATTENTION_BACKWARD, (buffer("out", 5),)),
        (Phase.ATTENTION_BACKWARD, (buffer("out", 5),)),
    ]
    found = shared_memories(uses)
    assert list(found) == ["out", "q"]
    assert [use.buffer.name for use in found["out"].uses] == ["out", "send"]
    assert found["out"].num_bytes == 7 * 4
    assert found["out"].uses[0].phases == [Phase.ATTENTION_FORWARD, Phase.ATTENTION_BACKWARD]


@pytest.mark.parametrize("name", ["plain", "selective, overlapped", "parked"])
def test_the_table_is_of_the_planned_bytes(name):
    plan = Plan(run_config(FAST[name]), machine())
    _, memories = buffers_of_rank(plan)
    at_most = plan.phases[Phase.ATTENTION_BACKWARD].by_cause.total()
    backward = sum(
        memory.num_bytes
        for memory in memories.values()
        if any(Phase.ATTENTION_BACKWARD in use.phases for use in memory.uses)
    )
    assert 0 < backward < at_most


def test_the_reason_stands_beside_what_shares_memory():
    console = Console(width=250, record=True, quiet=False, file=io.StringIO())
    print_buffers(Plan(run_config(FAST["parked"]), machine()), console)
    (row,) = (line for line in console.export_text().splitlines() if "\u2502 dq " in line)
    assert "a kernel reads dO for the last time before it writes dQ" in row
    assert Phase.ATTENTION_BACKWARD in row


def test_the_tool_prints_the_table_and_writes_it(tmp_path):
    file = tmp_path / "plan.json"
    flags = ["--buffers", "--json", str(file), *FAST["parked"].split()]
    shown = subprocess.run(
        [sys.executable, "tools/plan_memory.py", *flags], capture_output=True, text=True, check=True
    )
    assert "Buffers of attention, Ulysses rank 0" in shown.stdout
    memories = json.loads(file.read_text())["buffers"]
    (d_out,) = (each for each in memories if each["memory"] == "d_out")
    assert [use["name"] for use in d_out["buffers"]] == ["d_out", "dq", "kv_home"]
    assert d_out["bytes"] == 131072 // 8 * 8 * 128 * 2
