from datetime import datetime

import pytest

from megatron_untied.streaming.copy_engine import Wait
from megatron_untied.training.reporting import LogLine, evaluation_line

VALUES = {
    "time": datetime(2026, 3, 4, 5, 6, 7),
    "iteration": 20,
    "train_iters": 100,
    "consumed_samples": 80,
    "seconds_per_iteration": 1.23456,
    "learning_rate": 3e-4,
    "global_batch_size": 4,
    "lm_loss": 5.25,
    "grad_norm": 1.23456,
    "skipped_iterations": 0,
    "nan_iterations": 1,
    "tokens_per_second_per_gpu": 98.76,
    "tflops_per_gpu": 321.98765,
    "peak_device_bytes": 123456789,
}


def test_megatrons_fields_come_first_and_in_its_order():
    assert str(LogLine(**VALUES)) == (
        " [2026-03-04 05:06:07] iteration       20/     100 | consumed samples:           80 | "
        "elapsed time per iteration (ms): 1234.6 | learning rate: 3.000000E-04 | "
        "global batch size:     4 | lm loss: 5.250000E+00 | loss scale: 1.0 | grad norm: 1.235 | "
        "number of skipped iterations:   0 | number of nan iterations:   1 | "
        "tokens/s/GPU: 98.8 | model TFLOP/s/GPU: 321.988 | peak memory: 0.115 GiB |"
    )


def test_log_throughput_adds_megatrons_field_where_megatron_has_it():
    fields = str(LogLine(**VALUES, log_throughput=True)).split(" | ")
    assert fields[2:5] == [
        "elapsed time per iteration (ms): 1234.6",
        "throughput per GPU (TFLOP/s/GPU): 322.0",
        "learning rate: 3.000000E-04",
    ]


def test_waits_come_last_by_phase_the_longest_first():
    waits = {
        Wait("disk", "backward"): 0.5,
        Wait("host", "attention forward"): 0.001,
        Wait("host", "MLP backward tiles"): 0.02,
    }
    assert str(LogLine(**VALUES, waits=waits)).endswith(
        " | waits for host (ms): 21.0 (MLP backward tiles 20.0, attention forward 1.0)"
        " | waits for disk (ms): 500.0 (backward 500.0) |"
    )


@pytest.mark.parametrize(("loss", "perplexity"), [(0.0, "1.000000E+00"), (30.0, "4.851652E+08")])
def test_evaluation_line_stops_perplexity_at_a_loss_of_twenty(loss, perplexity):
    assert evaluation_line(7, loss) == (
        f" validation loss at iteration 7 | lm loss value: {loss:.6E} | lm loss PPL: {perplexity} |"
    )
