import json

import pytest
import torch
from rich.console import Console

from megatron_untied.commands import plan as plan_command
from megatron_untied.context_parallel.buffer_plan import Buffer
from megatron_untied.phases import Phase
from megatron_untied.planner.buffer_table import (
    buffers_of_rank,
    print_buffers,
    shared_memories,
)
from megatron_untied.planner.plan import Plan
from tests.planner.test_against_tracer import FAST
from tests.support.planning import machine, run_config


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
    at_most = plan.phases[Phase.ATTENTION_BACKWARD].by_category.total()
    backward = sum(
        memory.num_bytes
        for memory in memories.values()
        if any(Phase.ATTENTION_BACKWARD in use.phases for use in memory.uses)
    )
    assert 0 < backward < at_most


def test_what_is_alive_in_attention_backward_is_one_list(capsys):
    """At 80 columns: a line per memory, buffers of one reason together, reasons below."""
    plan = Plan(run_config(FAST["parked"]), machine())
    print_buffers(plan, Console(width=80, highlight=False))
    printed = capsys.readouterr().out
    _, _, after = printed.partition("attention backward: 0.469\n")
    lines = [" ".join(line.split()) for line in after.splitlines()]
    assert lines[:7] == [
        "0.125 row_tiles",
        "0.125 sum_rows",
        "0.031 q",
        "0.031 k0",
        "0.031 v0",
        "0.031 out",
        "0.031 dk = send_q, send_k, send_v [2], packed_dk [3], out_send, d_out_send",
    ]
    reasons = printed.partition("memory is shared because\n")[2].splitlines()
    assert "  [6] a kernel reads dO for the last time before it writes dQ" in reasons
    assert lines[8] == "0.031 d_out = dq [6], kv_home [7]"
    assert len(reasons) == len(set(reasons)) == 7


def test_the_tool_prints_the_table_and_writes_it(tmp_path, capsys):
    file = tmp_path / "plan.json"
    plan_command.main(["--buffers", *FAST["parked"].split(), "--json", str(file)])
    assert "a kernel reads dO for the last time before it writes dQ" in capsys.readouterr().out
    memories = json.loads(file.read_text())["buffers"]
    (d_out,) = (memory for memory in memories if memory["memory"] == "d_out")
    assert [use["name"] for use in d_out["buffers"]] == ["d_out", "dq", "kv_home"]
    assert d_out["bytes"] == 131072 // 8 * 8 * 128 * 2
