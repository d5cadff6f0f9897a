from pathlib import Path

import pytest

from megatron_untied.checkpoint import Progress
from megatron_untied.training.reporting import RunSummary
from tests.support.command_line import tiny_config


def test_tells_losses_tokens_speed_and_where_everything_is():
    summary = RunSummary(
        config=tiny_config(metrics_jsonl="m.jsonl", tensorboard_dir="t"),
        start=Progress(iteration=2, consumed_samples=8),
        progress=Progress(iteration=6, consumed_samples=24),
        checkpoint=Path("c/iter_0000006"),
        step_seconds=2.0,
        train_loss=5.25,
        validation=(5, 5.5),
    )
    assert str(summary).splitlines() == [
        "summary",
        "  iterations: 6 of 10, 4 in this run",
        "  train loss: 5.250000",
        "  validation loss: 5.500000 (iteration 5)",
        "  tokens: 1,024 in 0:00:02 of training (512 tokens/s); 0:00:00 in total",
        "  checkpoint: the last checkpoint is c/iter_0000006; --load c resumes",
        "  TensorBoard: t",
        "  metrics: m.jsonl",
    ]


@pytest.mark.parametrize(
    ("save", "remedy"), [(None, "give --save"), ("c", "--save-interval saves more often")]
)
def test_says_what_is_lost_without_a_checkpoint(save, remedy):
    summary = RunSummary(
        config=tiny_config(save=save),
        start=Progress(),
        progress=Progress(iteration=3, consumed_samples=12),
        checkpoint=None,
    )
    advice = f"no checkpoint was saved (3 iterations are lost); {remedy}"
    assert summary.resume_advice() == advice
