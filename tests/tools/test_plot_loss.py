import json

import pytest
from matplotlib import pyplot

from megatron_untied.commands import plot_loss

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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "error: [Errno 2] No such file or directory: "),
        ("", "metrics.jsonl has no losses"),
        ("no json\n", "metrics.jsonl is not a file of --metrics-jsonl (JSONDecodeError("),
        ("[1]\n", "metrics.jsonl is not a file of --metrics-jsonl (AttributeError("),
        ('{"lm_loss": 1}\n', "metrics.jsonl is not a file of --metrics-jsonl (KeyError("),
    ],
)
def test_ends_with_one_line_where_there_is_nothing_to_draw(tmp_path, capsys, content, message):
    metrics = tmp_path / "metrics.jsonl"
    if content is not None:
        metrics.write_text(content)
    with pytest.raises(SystemExit) as ended:
        plot_loss.main([str(metrics)])
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert message in error


@pytest.mark.parametrize("output", ["absent/loss.png", "loss.unknown", "."])
def test_ends_with_one_line_for_an_output_that_cannot_be(tmp_path, capsys, output):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    with pytest.raises(SystemExit) as ended:
        plot_loss.main([str(metrics), "--output", str(tmp_path / output)])
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert error.startswith("error: --output ")
