import gzip
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron_untied.data.documents import find_files, read_documents
from tests.support.corpus import NASTY_TEXTS, write_jsonl


def read(inputs, keys=("text",)):
    return [document.texts for document in read_documents(find_files(map(str, inputs)), keys)]


def test_json_lines_and_plain_text_give_the_same_documents(tmp_path):
    lines = write_jsonl(tmp_path / "all.jsonl", NASTY_TEXTS)
    folder = tmp_path / "files"
    folder.mkdir()
    for number, text in enumerate(NASTY_TEXTS):
        (folder / f"{number}.txt").write_bytes(text.encode())
    assert read([lines]) == read([folder]) == [{"text": text} for text in NASTY_TEXTS]


def test_order_is_that_of_the_inputs_and_sorted_inside_them(tmp_path):
    for name in ("b/2.py", "b/1.py", "b/.hidden/x.py", "a.txt", "c1.txt", "c0.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = find_files([str(tmp_path / name) for name in ("c*.txt", "b", "a.txt")])
    names = [file.relative_to(tmp_path).as_posix() for file in found]
    assert names == ["c0.txt", "c1.txt", "b/1.py", "b/2.py", "a.txt"]


def test_reads_several_keys_and_skips_blank_lines(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"q": "1", "a": "2", "n": 3}\n\n  \n{"q": "", "a": "4"}')
    assert read([file], ("q", "a")) == [{"q": "1", "a": "2"}, {"q": "", "a": "4"}]


@pytest.mark.parametrize("name", ["absent.txt", "absent*.txt", "empty"])
def test_rejects_an_input_that_names_nothing(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="--input .*no such file, and no file matches it"):
        find_files([str(tmp_path / name)])


def test_a_file_named_twice_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    (tmp_path / "link.txt").symlink_to(tmp_path / "data" / "a.txt")
    file = f"{tmp_path}/data/a.txt"
    for other in (file, f"{tmp_path}/data", f"{tmp_path}/data/*", f"{tmp_path}/link.txt"):
        with pytest.raises(ValueError, match="--input names .* twice.*count double; name it once"):
            find_files([file, other])
    assert find_files([f"{tmp_path}/data/**"]) == [Path(file)]


GOOD = b'{"text": "good"}\n'


def read_bytes(tmp_path, data, name="some.jsonl", **flags):
    """(number, text or problem) of each document of a file."""
    (tmp_path / name).write_bytes(data)
    documents = read_documents([tmp_path / name], **flags)
    return [(d.place.number, d.problem or d.texts["text"]) for d in documents]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "a"', "not a line of JSON (Expecting ',' delimiter at column"),
        (b'{"content": "a"}', "no text under the key 'text' of --json-keys; found: content"),
        (b"{}", "no text under the key 'text' of --json-keys; found: no key at all"),
        (b'{"text": 5}', "no text under the key 'text' of --json-keys: its value is a int"),
        (b'{"text": null}', "no text under the key 'text' of --json-keys: its value is null"),
        (b'["text"]', "no text under the key 'text' of --json-keys; found: list"),
        (b'{"text": "\xff"}', "not UTF-8 (byte 0xff at 10)"),
        (b'{"text": "ab\\ud800"}', "U+D800 at character 2 is half of a pair"),
        (b'{"text": "\xed\xa0\x80"}', "not UTF-8 (byte 0xed at 10)"),
        (b"[" * 100_000, "not a line of JSON (maximum recursion"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "not a line of JSON (Exceeds the limit"),
    ],
)
def test_a_bad_line_is_a_problem_between_good_ones(tmp_path, line, problem):
    first, bad, last = read_bytes(tmp_path, GOOD + line + b"\n" + GOOD)
    assert (first, last) == ((1, "good"), (3, "good"))
    assert bad[0] == 2
    assert bad[1].startswith(problem)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"text": "a\xffb"}', "a\ufffdb"),
        (b'{"text": "a\\ud800b"}', "a\ufffdb"),
        (b'{"text": "a\\ude00"}', "a\ufffd"),
        (b'{"text": "\\ud83d\\ude00"}', "\U0001f600"),
    ],
)
def test_replaces_what_is_no_text(tmp_path, line, text):
    assert read_bytes(tmp_path, line + b"\n" + GOOD, replace=True) == [(1, text), (2, "good")]
    (tmp_path / "a.jsonl").write_bytes(line)
    (document,) = read_documents([tmp_path / "a.jsonl"], replace=True)
    assert bool(document.replaced) == ("\ufffd" in text)


def test_replacing_mends_no_line_without_text(tmp_path):
    (null,) = read_bytes(tmp_path, b'{"text": null}\n', replace=True)
    assert "its value is null" in null[1]


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path):
    mark = b"\xef\xbb\xbf"
    assert read_bytes(tmp_path, mark + GOOD + mark + GOOD) == [(1, "good"), (2, "good")]


def test_line_ends_of_windows_and_blank_lines(tmp_path):
    data = b'{"text": "a\\r\\n"}\r\n\r\n  \r\n{"text": "b"}'
    assert read_bytes(tmp_path, data) == [(1, "a\r\n"), (4, "b")]


@pytest.mark.parametrize(
    "data",
    [
        b'[{"text": "a"}, {"text": "b"}]',
        b'\xef\xbb\xbf [\n {"text": "a"},\n {"text": "b"}\n]\n',
        b"[\n]",
    ],
)
def test_a_file_of_one_array_is_one_problem(tmp_path, data):
    ((number, problem),) = read_bytes(tmp_path, data, "a.json")
    assert number == 0
    assert problem.startswith("the file is one JSON array where lines of JSON are expected")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (gzip.compress(GOOD), "the content is that of a .gz file"),
        (zstandard.compress(GOOD), "the content is that of a .zst file"),
        (b"PAR1....", "the content is that of a .parquet file"),
        (GOOD.decode().encode("utf-16"), "the text is UTF-16"),
    ],
)
def test_says_what_a_file_is_that_is_no_text(tmp_path, data, problem):
    for name in ("a.jsonl", "a.txt"):
        ((number, found),) = read_bytes(tmp_path, data, name)
        assert (number, found.startswith(problem)) == (0, True)


@pytest.mark.parametrize(
    ("ending", "compress"), [(".gz", gzip.compress), (".zst", zstandard.compress)]
)
def test_reads_compressed_files(tmp_path, ending, compress):
    two = compress(GOOD) + compress(GOOD * 2)  # frames one after the other are one file
    assert read_bytes(tmp_path, two, "a.jsonl" + ending) == [(n, "good") for n in (1, 2, 3)]
    assert read_bytes(tmp_path, compress(b"a\nb"), "a.txt" + ending) == [(0, "a\nb")]
    (document,) = read_documents([tmp_path / ("a.txt" + ending)])
    assert document.num_bytes == (tmp_path / ("a.txt" + ending)).stat().st_size


@pytest.mark.parametrize(
    ("ending", "compress"), [(".gz", gzip.compress), (".zst", zstandard.compress)]
)
def test_what_is_left_of_a_damaged_file_is_a_problem(tmp_path, ending, compress):
    lines = b"".join(b'{"text": "%d"}\n' % (n * n) for n in range(99_999))
    data = compress(lines)
    *good, (number, problem) = read_bytes(tmp_path, data[: len(data) // 2], "a.jsonl" + ending)
    assert len(good) > 10_000
    assert number == len(good) + 1
    assert problem.startswith("the data is damaged or cut short")
    ((_, problem),) = read_bytes(tmp_path, GOOD, "b.jsonl" + ending)
    assert problem.startswith("the data is damaged or cut short")


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


@pytest.mark.parametrize(
    "kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary("int32", "string")]
)
def test_reads_the_rows_of_parquet(tmp_path, kind):
    texts = ["a", None, "é\n", "", "a"]
    file = write_parquet(
        tmp_path / "a.parquet", text=pyarrow.array(texts, "string").cast(kind), n=range(5)
    )
    found = list(read_documents([file]))
    assert [d.texts.get("text") for d in found] == texts
    assert [d.place.number for d in found] == [1, 2, 3, 4, 5]
    assert found[1].problem == "no text under the key 'text' of --json-keys: its value is null"
    assert sum(d.num_bytes for d in found) == file.stat().st_size


def test_rejects_parquet_without_text_before_anything_is_read(tmp_path):
    good = write_jsonl(tmp_path / "a.jsonl", ["a"])
    file = write_parquet(tmp_path / "a.parquet", content=["a"], n=[1])
    with pytest.raises(ValueError, match="no column 'text' of --json-keys; found: content, n"):
        read_documents([good, file])
    with pytest.raises(ValueError, match="column 'n' of --json-keys holds int64, not strings"):
        read_documents([file], ["n"])
    file.write_bytes(b"not Parquet")
    with pytest.raises(ValueError, match="a.parquet cannot be read as Parquet"):
        read_documents([file])


@pytest.mark.parametrize(
    ("name", "package"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")]
)
def test_names_the_package_that_is_missing(tmp_path, monkeypatch, name, package):
    for module in ("zstandard", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ImportError, match=f"{name}: .* need the package {package}; pip install"):
        read_documents([tmp_path / name])


def test_memory_does_not_grow_with_the_file(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(200):
            file.write(b'{"text": "%s"}\n' % (b"a" * 100_000))
    (tmp_path / "b.json").write_bytes(b"[" + b"1," * 10_000_000 + b"1]")
    for name, count in (("a.jsonl.gz", 200), ("b.json", 1)):
        tracemalloc.start()
        assert sum(1 for _ in read_documents([tmp_path / name])) == count
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
        tracemalloc.stop()


def test_goes_on_after_a_place(tmp_path):
    files = [write_jsonl(tmp_path / f"{n}.jsonl", [f"{n}.{m}" for m in range(3)]) for n in "abc"]
    everything = list(read_documents(files))
    for index, document in enumerate(everything):
        rest = list(read_documents(files, after=document.place))
        assert [d.texts for d in rest] == [d.texts for d in everything[index + 1 :]]
        if rest:
            assert sum(d.num_bytes for d in rest) == sum(d.num_bytes for d in everything)


def test_plain_text_that_is_not_utf8_is_a_problem(tmp_path):
    ((number, problem),) = read_bytes(tmp_path, "caf\xe9".encode("latin-1"), "latin.txt")
    assert (number, problem) == (0, "not UTF-8 (byte 0xe9 at 3)")


def test_rejects_other_keys_of_plain_text(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="a.txt is plain text: --json-keys q needs JSON lines"):
        read([tmp_path / "a.txt"], ("q",))
