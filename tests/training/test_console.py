import io

from rich.console import Console

from megatron_untied.training.console import ProgressConsole, progress_line


def test_progress_line_extrapolates_from_where_this_run_began():
    # 10 iterations took 60 s, so the 80 that are left take 480 s.
    line = progress_line(start=10, iteration=20, total=100, elapsed=60.0)
    assert line == " progress: 20/100 (20.0%) | elapsed: 0:01:00 | ETA: 0:08:00 |"


def test_without_a_terminal_lines_are_whole_and_progress_is_one():
    output = io.StringIO()
    console = ProgressConsole(start=0, total=4, console=Console(file=output))
    with console.bar:
        console.print(" a long line [not markup] " + "x" * 200)
        console.advance(2)
        console.report(2)
    lines = output.getvalue().splitlines()
    assert lines[0] == " a long line [not markup] " + "x" * 200
    assert lines[1].startswith(" progress: 2/4 (50.0%) | elapsed: 0:00:00 | ETA: 0:00:0")
    assert len(lines) == 2


def test_on_a_terminal_a_bar_shows_progress():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    progress = ProgressConsole(start=0, total=4, console=console)
    with progress.bar:
        progress.advance(3)
        progress.report(3)
    assert "3/4" in output.getvalue()
    assert "progress:" not in output.getvalue()
