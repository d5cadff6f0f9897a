import json

import pytest

from benchmarks import longest_context
from benchmarks.memory_table import LENGTHS, SUBJECTS, Case, report
from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.cli.planner_flags import complete

CASES = [Case(s, length, each) for s in SUBJECTS for length in s.lengths for each in s.settings]


@pytest.mark.parametrize("case", [case for case in CASES if case.length in ("1M", "5M")])
def test_flags_are_of_the_run_that_the_line_names(case):
    subject, setting, words = case.subject, case.setting, case.flags.split()
    assert words[:2] == ["--world-size", str(subject.world_size)]
    config = parse_arguments(complete(words[2:]), world_size=subject.world_size)
    assert config.batch.seq_length == LENGTHS[case.length]
    assert config.model.num_layers == config.memory.cpu_offloading_num_layers == subject.layers
    assert config.parallel.context_parallel_size == subject.world_size
    assert config.memory.recompute_granularity in setting
    assert config.memory.park_during_attention == ("parked" in setting)
    on_the_host = "optimizer on the host" in subject.title
    assert config.optimization.optimizer_cpu_offload == on_the_host
    assert (config.parallel.heads_per_chunk == "all") == ("one exchange" in setting)
    hidden = config.model.hidden_size
    assert subject.residual_bytes(2**20) == 2**20 // subject.world_size * hidden * 2


def test_a_trace_that_is_there_is_not_made_again(tmp_path):
    case = CASES[0]
    file = tmp_path / "llama3-8b_128K_one-exchange_full.json"
    file.write_text(json.dumps({"peak_device_bytes": 1}))
    assert case.numbers(tmp_path) == {"peak_device_bytes": 1}


@pytest.mark.parametrize("number", [5, 39])  # one GPU of 24 GB with 1 TiB, eight of 80 with drives
def test_the_longest_context_is_what_is_committed(number):
    cell = longest_context.CELLS[number]
    assert cell.planned() == longest_context.committed()[cell]


def test_the_tables_of_the_longest_context_have_the_committed_numbers():
    found, here = longest_context.committed(), longest_context.HERE
    assert (here / "results/longest_context.md").read_text() == longest_context.report(found)
    rows = longest_context.table(iter(longest_context.README_ROWS), found)
    assert "\n".join(rows) in (here.parent / "README.md").read_text()


def test_bytes_become_gib_and_h():
    gib = 2**30
    numbers = {
        "peak_device_bytes": 20 * gib,
        "model_state_bytes": 10 * gib,
        "peak_phase": "loss",
        "host_bytes": 3 * gib // 2,
        "attention_forward_calls_per_layer": 1.0,
        "attention_flops": 12_345_678,
        "exchange_bytes_per_layer": 15 * gib // 2,
    }
    case = Case(SUBJECTS[0], "1M", "untied, selective")  # H is 1 GiB
    row = "1M | untied, selective | 8192 | 20.00 | 10.00 | loss | 1.5 | 1 | 1.235e+07 | 7.50"
    written = report({case: numbers})
    assert f"| {row} |\n" in written
    # The tables of other models stay as they are.
    title = f"## {SUBJECTS[1].title}"
    assert title not in written
    before = f"# x\n\n{title}\n\n| 1 |\n| 2 |\n\n## y\n\n{row}"
    assert written != (both := report({case: numbers}, before))
    assert f"{title}\n\n| 1 |\n| 2 |\n\n## Flags\n" in both
