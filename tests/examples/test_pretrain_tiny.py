"""The tiny example deletes nothing, and reads its arguments before it writes anything."""

from pathlib import Path

import pytest

from tests.examples.launching import EXAMPLES, fake_program, run

SCRIPT = EXAMPLES / "pretrain_tiny.sh"
LATEST = "checkpoints/latest_checkpointed_iteration.txt"


def trained(folder: Path, iteration: int) -> dict[Path, str]:
    """An earlier run's folder; its files."""
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("made_by_pretrain_tiny", "corpus_text_document.idx", "metrics.jsonl"):
        (folder / name).write_text(name)
    (folder / LATEST).write_text(f"{iteration}\n")
    return files(folder)


def files(folder: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-layerz", "2"], "unknown flag --num-layerz; did you mean --num-layers?"),
        (["--lr", "-1"], "argument --lr: -1 is below 0"),
        (["--adam-beta2", "1"], "--adam-beta2 1.0 must be below 1"),
        (["more"], "'more' belongs to no flag; give OUTPUT_FOLDER, then FLAGS"),
        (["--rehearse"], "leave out --dry-run and --rehearse"),
    ],
)
def test_a_mistake_leaves_everything_as_it_is(arguments, message, tmp_path):
    before = trained(tmp_path / "tiny", 120)
    done = run("bash", SCRIPT, tmp_path / "tiny", *arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert files(tmp_path / "tiny") == before


def test_a_mistake_makes_no_folder(tmp_path):
    assert not run("bash", SCRIPT, tmp_path / "new", "--num-layerz", "2").stdout
    assert not (tmp_path / "new").exists()


def test_help_starts_nothing(tmp_path):
    before = trained(tmp_path / "tiny", 120)
    done = run(
        "bash", SCRIPT, tmp_path / "tiny", "--help", PATH=fake_program(tmp_path, "python", "exit 1")
    )
    assert done.returncode == 0
    assert done.stdout.startswith("Trains a 2 M parameter Llama-style model")
    assert files(tmp_path / "tiny") == before


def test_a_folder_of_others_is_refused(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("mine")
    done = run("bash", SCRIPT, tmp_path)
    assert done.returncode == 1
    assert "holds files that this script did not make; give another OUTPUT_FOLDER" in done.stderr
    assert (tmp_path / "corpus.jsonl").read_text() == "mine"


@pytest.mark.parametrize(("iteration", "starts"), [(0, 2), (60, 2), (90, 1), (119, 1), (120, 0)])
def test_started_again_it_goes_on(iteration, starts, tmp_path):
    """Python is not run, but writes down what would be."""
    before = trained(tmp_path / "tiny", iteration)
    log = tmp_path / "log"
    path = fake_program(tmp_path, "python", f'echo "$*" >> {log}')
    done = run("bash", SCRIPT, tmp_path / "tiny", "--seed", "7", PATH=path)
    assert done.returncode == 0, done.stderr
    runs = [line for line in log.read_text().splitlines() if "tools/torchrun.py" in line]
    assert len(runs) == starts
    for line in runs:
        assert f"--load {tmp_path}/tiny/checkpoints" in line
        assert line.endswith("--seed 7")
    assert ["--exit-interval 90" in line for line in runs] == [True, False][2 - starts :]
    assert files(tmp_path / "tiny") == before
