import json

import pytest

from tools import build_corpus


def test_keeps_sources_that_are_text_and_no_tests(tmp_path):
    for name, data in {
        "a.py": b"a = 1\r\n",
        "pkg/b.py": "b = 'é'\n".encode(),
        "pkg/latin.py": b"# \xe9\n",
        "pkg/__init__.py": b"\n",
        "pkg/data.txt": b"no source",
        "test/c.py": b"c = 1\n",
        "lib2to3/tests/d.py": b"d = 1\n",
        "site-packages/e.py": b"e = 1\n",
        "config-3.11-x86_64/f.py": b"f = 1\n",
        "_sysconfigdata__linux.py": b"g = 1\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    found = dict(build_corpus.source_files(tmp_path))
    assert found == {"a.py": "a = 1\r\n", "pkg/b.py": "b = 'é'\n"}


def test_order_does_not_follow_the_alphabet_and_is_fixed(tmp_path):
    names = [f"{letter}.py" for letter in "abcdefgh"]
    for name in names:
        (tmp_path / name).write_text("x")
    order = [path for path, _ in build_corpus.source_files(tmp_path)]
    assert sorted(order) == names != order
    assert order == [path for path, _ in build_corpus.source_files(tmp_path)]


def test_writes_the_standard_library(tmp_path):
    output = tmp_path / "new" / "corpus.jsonl"
    build_corpus.main(["--output", str(output)])
    with output.open(encoding="utf-8") as lines:
        documents = {(fields := json.loads(line))["path"]: fields["text"] for line in lines}
    with open(json.__file__, encoding="utf-8", newline="") as file:
        assert documents["json/__init__.py"] == file.read()
    assert sum(map(len, documents.values())) > 5_000_000
    assert not any("test" in path.split("/") for path in documents)
    assert [path.name for path in output.parent.iterdir()] == ["corpus.jsonl"]


@pytest.mark.parametrize("output", [".", "a file/corpus.jsonl"])
def test_ends_with_one_line_for_an_output_that_cannot_be(tmp_path, capsys, output):
    (tmp_path / "a file").touch()
    with pytest.raises(SystemExit) as ended:
        build_corpus.main(["--output", str(tmp_path / output)])
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert error.startswith("build_corpus: --output: ")
