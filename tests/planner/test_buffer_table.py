import json

import pytest
import torch
from rich.console import Console

from megatron_untied.commands import plan as plan_command
from megatron_untied.context_parallel.buffer_plan import Buffer
from megatron_untied.phases import MemoryCategory, Phase
from megatron_untied.planner.buffer_table import (
    fullest_moments,
    memories_of,
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


LISTED = {
    MemoryCategory.RESIDUAL,
    MemoryCategory.SLOTS,
    MemoryCategory.CHUNKS,
    MemoryCategory.KERNEL,
}


@pytest.mark.parametrize("name", FAST)
def test_what_is_listed_for_a_phase_is_all_that_the_plan_counts_there(name):
    plan = Plan(run_config(FAST[name]), machine())
    memories, moments = memories_of(plan).values(), fullest_moments(plan)
    assert Phase.ATTENTION_BACKWARD in moments
    for phase, moment in moments.items():
        listed = [memory for memory in memories if phase in memory.bytes_by_phase]
        for category in LISTED:
            found = sum(
                memory.bytes_by_phase[phase]
                for memory in listed
                if category in {u.buffer.category for u in memory.uses if phase in u.phases}
            )
            assert found == moment.by_category[category], (phase, category)
        assert all(any(phase in use.phases for use in memory.uses) for memory in listed)


def test_a_buffer_is_listed_in_later_phases_while_it_is_alive():
    """The slots of dO hold dQ at the end, and the residual's gradient is there throughout."""
    memories = memories_of(Plan(run_config(FAST["selective, overlapped"]), machine()))
    alive = {Phase.MLP_BACKWARD, Phase.ATTENTION_BACKWARD, Phase.QKV_BACKWARD}
    assert alive <= set(memories["d_out_slots"].bytes_by_phase)
    assert alive <= set(memories["residual"].bytes_by_phase)
    assert set(memories["kernel_fp32_dq"].bytes_by_phase) == {Phase.ATTENTION_BACKWARD}
    # Attention's chunk buffers are freed before the gradients of the projections are computed.
    assert Phase.QKV_BACKWARD not in memories["d_out0"].bytes_by_phase


def test_what_is_alive_in_attention_backward_is_one_list(capsys):
    """At 80 columns: a line per memory, buffers of one reason together, reasons below."""
    plan = Plan(run_config(FAST["parked"]), machine())
    print_buffers(plan, Console(width=80, highlight=False))
    printed = capsys.readouterr().out
    _, _, after = printed.partition("attention backward: 0.470\n")
    lines = [" ".join(line.split()) for line in after.splitlines()]
    assert lines[:11] == [
        "0.125 row_tiles",
        "0.063 kernel_fp32_dq",
        "0.062 sum_rows",
        "0.031 q",
        "0.031 k0",
        "0.031 v0",
        "0.031 out",
        "0.031 dk = send_q, send_k, send_v [2], packed_dk [3], out_send, d_out_send",
        "[4], d_out_recv [5]",
        "0.031 d_out = dq [6], kv_home [7]",
        "0.031 dv = packed_dv [3]",
    ]
    reasons = printed.partition("memory is shared because\n")[2].splitlines()
    assert "  [6] a kernel reads dO for the last time before it writes dQ" in reasons
    assert len(reasons) == len(set(reasons)) == 7


def test_the_tool_prints_the_table_and_writes_it(tmp_path, capsys):
    file = tmp_path / "plan.json"
    plan_command.main(["--buffers", *FAST["parked"].split(), "--json", str(file)])
    assert "a kernel reads dO for the last time before it writes dQ" in capsys.readouterr().out
    memories = json.loads(file.read_text())["buffers"]
    (d_out,) = (memory for memory in memories if memory["memory"] == "d_out")
    assert [use["name"] for use in d_out["buffers"]] == ["d_out", "dq", "kv_home"]
    assert d_out["bytes"] == 131072 // 8 * 8 * 128 * 2
