"""Measured memory beside the plan's, with the numbers of a GPU passed as values."""

from megatron_untied.platform.device import GIB, DeviceMemory
from megatron_untied.training.memory_report import describe, memory_against_plan
from tests.support.ranks import run_on_ranks


def memory(allocated: float, reserved: float, used: float) -> DeviceMemory:
    return DeviceMemory(
        allocated_bytes=int(allocated * GIB),
        reserved_bytes=int(reserved * GIB),
        free_bytes=int((80 - used) * GIB),
        total_bytes=80 * GIB,
    )


def lines_on_a_rank(group, planned_gib: float, ranks: list[DeviceMemory]) -> list[str]:
    return memory_against_plan(int(planned_gib * GIB), ranks[group.rank()])


def test_every_rank_has_one_line_that_names_the_rank_with_the_most():
    ranks = [memory(40, 41, 43), memory(39, 48, 50)]
    expected = (
        "memory: planned 47.00 GiB | allocated 39.00 GiB | reserved 48.00 GiB (18.8% "
        "fragmentation) | free 30.00 GiB of 80.00 GiB | rank 1, the highest of 2"
    )
    assert run_on_ranks(lines_on_a_rank, 2, 47, ranks) == [[expected], [expected]]


def test_tensors_above_the_plan_are_a_warning_with_their_rank():
    ranks = [memory(44, 44, 45), memory(41, 45, 46)]
    line, warning = describe(42 * GIB, ranks)
    assert "rank 1, the highest of 2" in line
    assert "tensors on rank 0 take 2.00 GiB more than planned" in warning
    assert len(describe(44 * GIB, ranks)) == 1
    assert len(describe(int(43.9 * GIB), ranks)) == 1  # within the planner's own tolerance


def test_memory_beyond_the_reserve_is_a_warning():
    _, warning = describe(42 * GIB, [memory(41, 42, 43), memory(41, 42, 50)])
    assert "50.00 GiB of the GPU of rank 1 are in use, 8.00 GiB beside the plan" in warning
    assert "reserves 4 GiB" in warning
    assert len(describe(42 * GIB, [memory(41, 42, 46)])) == 1
