import json

import pytest
from matplotlib import pyplot

from tools import plot_loss

LINES = [
    {"iteration": 1, "lm_loss": 5.0},
    {"iteration": 2, "lm_loss": None},
    {"iteration": 2, "validation_loss": 4.5},
    {"iteration": 3, "lm_loss": 4.0},
]


def test_curves_hold_what_was_measured():
    assert plot_loss.curve(LINES, "lm_loss") == ([1, 3], [5.0, 4.0])
    assert plot_loss.curve(LINES, "validation_loss") == ([2], [4.5])


def test_figure_shows_training_validation_and_entropy():
    figure = plot_loss.draw(([1, 3], [5.0, 4.0]), ([2], [4.5]), unigram_entropy=5.5)
    (axes,) = figure.axes
    train, validation, entropy = axes.lines
    assert list(train.get_ydata()) == [5.0, 4.0]
    assert list(validation.get_xdata()) == [2]
    assert list(entropy.get_ydata()) == [5.5, 5.5]
    pyplot.close(figure)


def test_writes_an_image_beside_the_metrics(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    plot_loss.main([str(metrics)])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_says_when_there_is_nothing_to_draw(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("")
    with pytest.raises(SystemExit, match="has no losses"):
        plot_loss.main([str(metrics)])
