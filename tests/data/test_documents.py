import json

import pytest

from megatron_untied.data.documents import find_files, read_documents
from tests.data.corpus import NASTY_TEXTS, write_jsonl


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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"bad.jsonl:2: not a line of JSON \(Expecting ',' delimiter at column"),
        (b'{"content": "a"}', r"bad.jsonl:2: no text under the key 'text' .* found: content"),
        (b'{"text": 5}', r"bad.jsonl:2: no text under the key 'text'"),
        (b'["text"]', r"bad.jsonl:2: no text under the key 'text' .* found: list"),
        (b'{"text": "\xff"}', r"bad.jsonl:2: not UTF-8 \(byte 0xff at 10\)"),
    ],
)
def test_says_which_line_is_bad(tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(json.dumps({"text": "good"}).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=message):
        read([file])


def test_rejects_plain_text_that_is_not_utf8(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt: not UTF-8 \(byte 0xe9 at 3\)"):
        read([tmp_path / "latin.txt"])


def test_rejects_other_keys_of_plain_text(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="a.txt is plain text: --json-keys q needs JSON lines"):
        read([tmp_path / "a.txt"], ("q",))
