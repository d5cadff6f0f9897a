import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_untied.commands import preprocess
from megatron_untied.data.indexed_files import open_indexed_files
from megatron_untied.data.indexed_writer import IndexedWriter
from megatron_untied.data.provenance import Provenance, read_provenance
from megatron_untied.data.tokenizers import build_tokenizer, tokenizer_hash
from tests.support.corpus import NASTY_TEXTS, write_jsonl


@pytest.fixture
def run(tmp_path, tokenizer_model):
    """Calls the tool on a corpus; the prefix of what it wrote under ``name``."""

    def run_tool(name, *flags, corpus):
        preprocess.main(
            ["--input", str(corpus), "--output-prefix", str(tmp_path / name)]
            + ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tokenizer_model]
            + list(flags)
        )
        return str(tmp_path / f"{name}_text_document")

    return run_tool


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "corpus.jsonl", [*NASTY_TEXTS, ""] * 30)


def contents(prefix):
    files = []
    for ending in (".bin", ".idx"):
        with open(prefix + ending, "rb") as file:
            files.append(file.read())
    return files


def test_megatron_core_reads_back_the_texts(run, corpus, tokenizer_model, capsys):
    dataset = IndexedDataset(run("out", "--append-eod", corpus=corpus))
    tokenizer = build_tokenizer("SentencePieceTokenizer", model=tokenizer_model)
    assert {dataset[i][-1] for i in range(len(dataset))} == {tokenizer.eod}
    texts = [tokenizer.detokenize(dataset[i][:-1].tolist()) for i in range(len(dataset))]
    assert texts == [*NASTY_TEXTS] * 30
    assert "240 documents (30 empty ones left out)" in capsys.readouterr().out


def test_number_of_workers_and_kind_of_input_change_no_byte(run, corpus, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for number, text in enumerate([*NASTY_TEXTS, ""] * 30):
        (folder / f"{number:04}.txt").write_bytes(text.encode())
    one = contents(run("one", corpus=corpus))
    assert one == contents(run("three", "--workers", "3", corpus=corpus))
    assert one == contents(run("text", "--workers", "2", corpus=folder))


def test_one_output_for_each_json_key(run, tmp_path):
    corpus = tmp_path / "qa.jsonl"
    corpus.write_text('{"q": "what", "a": "this"}\n{"q": "who", "a": ""}\n')
    run("out", "--json-keys", "q", "a", corpus=corpus)
    assert len(IndexedDataset(str(tmp_path / "out_q_document"))) == 2
    assert len(IndexedDataset(str(tmp_path / "out_a_document"))) == 1


def test_tells_what_made_the_files(run, corpus, tokenizer_model):
    prefix = run("out", "--append-eod", corpus=corpus)
    tokenizer = build_tokenizer("SentencePieceTokenizer", model=tokenizer_model)
    assert read_provenance(open_indexed_files(prefix)) == Provenance(
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=tokenizer_model,
        tokenizer_hash=tokenizer_hash(tokenizer),
        vocab_size=400,
        eod=2,
        append_eod=True,
        bos=None,
        parse_special_tokens=False,
    )


def test_bos_is_written_when_asked_for_and_spoken_of_when_not(run, corpus, capsys):
    prefix = run("out", corpus=corpus)
    assert "no BOS: the tokenizer's (token 1) is written with --prepend-bos only" in (
        capsys.readouterr().out
    )
    without = open_indexed_files(prefix)
    files = open_indexed_files(run("bos", "--prepend-bos", corpus=corpus))
    assert "no BOS" not in capsys.readouterr().out
    starts = np.cumsum(files.lengths) - files.lengths
    assert (files.tokens[starts] == 1).all()
    assert np.array_equal(np.delete(files.tokens, starts), without.tokens)
    assert read_provenance(files).bos == 1


@pytest.fixture
def broken(tmp_path):
    """Texts 0 to 59, of which 40 has a lone surrogate, and one null line after 49."""
    texts = [f"text {number}" for number in range(60)]
    texts[40] += "\ud800"
    path = write_jsonl(tmp_path / "broken.jsonl", texts)
    lines = path.read_text().splitlines()
    lines.insert(50, '{"text": null}')
    path.write_text("\n".join(lines) + "\n")
    return path


def texts_of(prefix, tokenizer_model):
    tokenizer = build_tokenizer("SentencePieceTokenizer", model=tokenizer_model)
    dataset = IndexedDataset(prefix)
    return [tokenizer.detokenize(dataset[i].tolist()) for i in range(len(dataset))]


def test_a_bad_line_ends_the_run_and_the_finished_part_is_kept(
    run, corpus, broken, tmp_path, tokenizer_model, capsys
):
    before = contents(run("out", corpus=corpus))
    place = r"error: .*broken.jsonl:41: U\+D800 .*--on-bad-line skip"
    with pytest.raises(SystemExit, match=place):
        run("out", "--workers", "2", corpus=broken)
    assert contents(str(tmp_path / "out_text_document")) == before
    part = str(tmp_path / "out_text_document.incomplete")
    assert texts_of(part, tokenizer_model) == [f"text {number}" for number in range(40)]
    assert read_provenance(open_indexed_files(part)).vocab_size == 400
    assert f"kept all documents up to {broken}:40 in {part}" in capsys.readouterr().err


def test_skips_bad_lines_and_counts_them(run, broken, tmp_path, tokenizer_model, capsys):
    prefix = run("out", "--on-bad-line", "skip", corpus=broken)
    expected = [f"text {number}" for number in range(60) if number != 40]
    assert texts_of(prefix, tokenizer_model) == expected
    output = capsys.readouterr().out
    report = tmp_path / "out.bad_lines.txt"
    assert f"bad lines: 2 left out, 0 mended; all places are in {report}" in output
    places = [line.split(": ")[0] for line in report.read_text().splitlines()]
    assert places == [f"{broken}:41", f"{broken}:51"]
    assert all(place in output for place in places)


def test_replaces_what_is_no_text_and_skips_what_has_none(run, broken, tokenizer_model, capsys):
    prefix = run("out", "--on-bad-line", "replace", corpus=broken)
    expected = [f"text {number}" for number in range(60)]
    expected[40] += "\ufffd"
    assert texts_of(prefix, tokenizer_model) == expected
    assert "bad lines: 1 left out, 1 mended" in capsys.readouterr().out


def test_many_bad_lines_are_named_in_the_report_and_the_first_on_the_terminal(
    run, tmp_path, capsys
):
    corpus = tmp_path / "a.jsonl"
    corpus.write_text('{"text": "a"}\n' + "no\n" * 100)
    run("out", "--on-bad-line", "skip", corpus=corpus)
    output = capsys.readouterr().out
    assert "a.jsonl:21: " in output
    assert "a.jsonl:22: " not in output
    assert "  and 80 more" in output
    assert len((tmp_path / "out.bad_lines.txt").read_text().splitlines()) == 100


@pytest.mark.parametrize("resumed_with", [(), ("--on-bad-line", "skip")])
def test_resumed_files_are_those_of_a_run_without_a_break(
    run, broken, tmp_path, corpus, resumed_with
):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "0.jsonl").write_bytes(corpus.read_bytes())
    broken.rename(folder / "1.jsonl")
    (folder / "2.txt").write_text("the end")
    with pytest.raises(SystemExit, match="1.jsonl:41"):
        run("out", "--append-eod", "--workers", "3", corpus=folder)
    if not resumed_with:
        mended = (folder / "1.jsonl").read_text().replace("\\ud800", "").replace("null", '"new"')
        (folder / "1.jsonl").write_text(mended)
    prefix = run("out", "--append-eod", "--resume", *resumed_with, corpus=folder)
    whole = run("whole", "--append-eod", *resumed_with, corpus=folder)
    assert contents(prefix) == contents(whole)
    names = ("_text_document.provenance.json",)
    for name in names:
        assert (tmp_path / f"out{name}").read_text() == (tmp_path / f"whole{name}").read_text()
    assert not list(tmp_path.glob("*incomplete*"))


def test_a_run_may_break_off_more_than_once(run, broken, tmp_path, tokenizer_model):
    with pytest.raises(SystemExit, match="broken.jsonl:41"):
        run("out", corpus=broken)
    with pytest.raises(SystemExit, match="broken.jsonl:41"):
        run("out", "--resume", corpus=broken)
    broken.write_text(broken.read_text().replace("\\ud800", ""))
    with pytest.raises(SystemExit, match="broken.jsonl:51"):
        run("out", "--resume", corpus=broken)
    prefix = run("out", "--resume", "--on-bad-line", "skip", corpus=broken)
    assert texts_of(prefix, tokenizer_model) == [f"text {number}" for number in range(60)]


def test_keeps_the_finished_part_of_each_key(run, tmp_path, tokenizer_model):
    corpus = tmp_path / "qa.jsonl"
    corpus.write_text('{"q": "what", "a": ""}\n{"q": "who", "a": ""}\n{"q": 1}\n{"q":"","a":"b"}\n')
    with pytest.raises(SystemExit, match="qa.jsonl:3"):
        run("out", "--json-keys", "q", "a", corpus=corpus)
    run("out", "--json-keys", "q", "a", "--resume", "--on-bad-line", "skip", corpus=corpus)
    assert texts_of(str(tmp_path / "out_q_document"), tokenizer_model) == ["what", "who"]
    assert texts_of(str(tmp_path / "out_a_document"), tokenizer_model) == ["b"]
    counts = json.loads((tmp_path / "out_a_document.provenance.json").read_text())
    assert counts["num_empty"] == 2


def test_resumes_nothing_that_changed(run, broken, tmp_path):
    with pytest.raises(SystemExit, match="--resume: there is no .*out.incomplete.json"):
        run("out", "--resume", corpus=broken)
    with pytest.raises(SystemExit, match="broken.jsonl:41"):
        run("out", corpus=broken)
    with pytest.raises(SystemExit, match="--resume: tokenizer, its flags or --json-keys"):
        run("out", "--resume", "--append-eod", corpus=broken)
    with pytest.raises(SystemExit, match="--resume: files of --input before"):
        run("out", "--resume", corpus=write_jsonl(tmp_path / "other.jsonl", ["a"]))
    broken.write_text(broken.read_text().replace("text 7", "text 8"))
    with pytest.raises(SystemExit, match="--resume: .*broken.jsonl changed before"):
        run("out", "--resume", corpus=broken)
    assert (tmp_path / "out_text_document.incomplete.idx").is_file()


def test_an_interrupt_keeps_the_finished_part(run, corpus, tmp_path, monkeypatch, capsys):
    add, calls = IndexedWriter.add, []

    def interrupted(writer, ids):
        calls.append(len(ids))
        add(writer, ids)
        if len(calls) == 100:
            raise KeyboardInterrupt  # after the document is in the files, before it is counted

    monkeypatch.setattr(IndexedWriter, "add", interrupted)
    with pytest.raises(SystemExit) as ended:
        run("out", corpus=corpus)
    assert ended.value.code == 130
    assert "interrupted\n" in capsys.readouterr().err
    monkeypatch.undo()
    resumed = contents(run("out", "--resume", corpus=corpus))
    assert resumed == contents(run("whole", corpus=corpus))


def test_nothing_is_kept_of_a_run_that_finished_nothing(run, broken, tmp_path, capsys):
    broken.write_text('{"text": null}\n')
    with pytest.raises(SystemExit, match="broken.jsonl:1"):
        run("out", corpus=broken)
    with pytest.raises(SystemExit, match="nothing to write to .*no document has a token"):
        run("out", "--on-bad-line", "skip", corpus=broken)
    assert "bad lines: 1 left out" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.jsonl", "out.bad_lines.txt"]


def test_compressed_and_parquet_files_change_no_byte(run, corpus, tmp_path):
    one = contents(run("one", corpus=corpus))
    for ending, compress in ((".gz", gzip.compress), (".zst", zstandard.compress)):
        packed = tmp_path / f"corpus.jsonl{ending}"
        packed.write_bytes(compress(corpus.read_bytes()))
        assert one == contents(run("packed", corpus=packed))
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "corpus.parquet")
    assert one == contents(run("packed", corpus=tmp_path / "corpus.parquet"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vocab-size", "32000"], "--vocab-size 32000 does not match"),
        (["--tokenizer-model", "absent.model"], "absent.model: no such file"),
        (["--input", "absent.jsonl"], "--input absent.jsonl: no such file"),
        (["--parse-special-tokens"], "--parse-special-tokens: SentencePiece never makes"),
        (
            ["--prepend-bos", "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"],
            "--prepend-bos: the tokenizer has no BOS of its own; leave the flag out",
        ),
    ],
)
def test_ends_with_one_line_for_bad_flags(run, corpus, flags, message):
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run("out", *flags, corpus=corpus)


def test_rejects_no_workers(run, corpus, capsys):
    with pytest.raises(SystemExit):
        run("out", "--workers", "0", corpus=corpus)
    assert "--workers 0: at least one process must tokenize" in capsys.readouterr().err


def test_runs_as_a_script():
    script = Path(__file__).parents[2] / "tools/preprocess_data.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--on-bad-line {error,skip,replace}" in done.stdout


@pytest.fixture
def folders(tmp_path):
    """A folder, and a git repository that tracks some of its files."""
    texts = {
        "plain/b.py": "b = 1",
        "plain/a/z.txt": "zed\n",
        "plain/a-b.txt": "",
        "plain/.hidden": "no",
        "repository/src/main.c": "int main;\n",
        "repository/.github/ci.yml": "on: push\n",
        "repository/build/out.txt": "not tracked",
        "repository/README": "<s> is text",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "plain/image.png").write_bytes(b"\x89PNG\x00\xff")
    (tmp_path / "plain/link.py").symlink_to("b.py")
    for command in ("init -q", "add README src .github"):
        subprocess.run(["git", "-C", str(tmp_path / "repository"), *command.split()], check=True)
    return tmp_path / "plain", tmp_path / "repository"


def test_a_folder_or_repository_is_one_document(run, folders, tmp_path, tokenizer_model, capsys):
    plain, repository = folders
    jsonl = write_jsonl(tmp_path / "more.jsonl", ["one", "two"])
    flags = ["--join-folders", "--input", str(repository), str(jsonl), str(plain)]
    prefix = run("joined", *flags, corpus=plain)
    tokenizer = build_tokenizer("SentencePieceTokenizer", model=tokenizer_model)
    found = [tokenizer.detokenize(ids.tolist()) for ids in IndexedDataset(prefix)]
    assert found == [
        "=== .github/ci.yml ===\non: push\n=== README ===\n<s> is text\n"
        "=== src/main.c ===\nint main;\n",
        "one",
        "two",
        "=== a/z.txt ===\nzed\n=== a-b.txt ===\n\n=== b.py ===\nb = 1\n",
    ]
    assert (
        "2 folders are a document each: 6 text files, 1 left out that are no UTF-8 text, the first "
        f"is {plain}/image.png" in " ".join(capsys.readouterr().out.split())
    )
    assert contents(run("again", *flags, "--workers", "2", corpus=plain)) == contents(prefix)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["plain/b.py"], "--join-folders has no effect without a folder in --input"),
        (["plain", "plain/b.py"], "b.py and also what holds it or is in it"),
        (["plain/b.py", "plain"], "plain and also what holds it or is in it"),
        (["plain", "plain/../plain"], "twice"),
        (["empty"], "empty has no files; leave it out"),
    ],
)
def test_refuses_folders_that_cannot_be_documents(run, folders, tmp_path, inputs, message):
    (tmp_path / "empty").mkdir()
    paths = [str(tmp_path / name) for name in inputs]
    with pytest.raises(SystemExit, match=message):
        run("joined", "--join-folders", "--input", *paths, corpus=folders[0])


def test_says_why_git_does_not_list_a_repository(run, folders):
    _, repository = folders
    (repository / ".git" / "HEAD").unlink()
    with pytest.raises(SystemExit, match=f"git cannot list {repository}: fatal: "):
        run("joined", "--join-folders", corpus=repository)
