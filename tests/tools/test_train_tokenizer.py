import json

import pytest
import sentencepiece

from megatron_untied.commands import train_tokenizer
from tests.support.corpus import NASTY_TEXTS, write_jsonl

TEXTS = [*NASTY_TEXTS, "def f(x):\n        return x + 2 * y\n" * 30]


def run(tmp_path, name, *flags):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    prefix = tmp_path / "new" / name
    train_tokenizer.main(["--input", str(corpus), "--model-prefix", str(prefix), *flags])
    return (tmp_path / "new" / f"{name}.model").read_bytes()


def test_gives_back_every_text_and_learns_indentation(tmp_path):
    model = run(tmp_path, "exact", "--vocab-size", "340")
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size() == 340
    assert len(tokenizer.encode(" " * 8)) == 1
    assert (tokenizer.unk_id(), tokenizer.bos_id(), tokenizer.eos_id()) == (0, 1, 2)


def test_is_the_same_for_the_same_seed(tmp_path):
    flags = ["--vocab-size", "330", "--input-sentence-size", "12"]
    first, again = (run(tmp_path, name, *flags) for name in "ab")
    assert first == again


def test_samples_every_line_alike():
    drawn = [line for seed in range(3000) for line in train_tokenizer.sample("abcde", 2, seed=seed)]
    assert len(drawn) == 6000
    for letter in "abcde":  # 1200 each in the mean, 27 standard deviation
        assert abs(drawn.count(letter) - 1200) < 130
    assert train_tokenizer.sample("abc", 9, seed=0) == list("abc")


@pytest.mark.parametrize(
    ("vocab_size", "message"), [(9999, "Vocabulary size too high"), (100, "smaller than required")]
)
def test_rejects_a_vocabulary_that_does_not_fit_the_text(tmp_path, vocab_size, message):
    with pytest.raises(SystemExit, match=f"--vocab-size {vocab_size}: .*{message}"):
        run(tmp_path, "bad", "--vocab-size", str(vocab_size))


@pytest.mark.parametrize("flag", ["--vocab-size", "--input-sentence-size"])
def test_rejects_counts_that_are_not_positive(capsys, flag):
    flags = {
        "--input": "x",
        "--model-prefix": "x",
        "--vocab-size": "400",
        flag: "0",
    }
    with pytest.raises(SystemExit):
        train_tokenizer.main([word for pair in flags.items() for word in pair])
    assert f"{flag} 0 is not positive" in capsys.readouterr().err


def test_leaves_bad_lines_out_when_asked_to(tmp_path, capsys):
    corpus = tmp_path / "a.jsonl"
    good = "".join(json.dumps({"text": "the cat and the hat"}) + "\n" for _ in range(50))
    corpus.write_text(good + '{"text": null}\n')
    flags = ["--input", str(corpus), "--model-prefix", str(tmp_path / "x"), "--vocab-size", "270"]
    with pytest.raises(SystemExit, match="a.jsonl:51: no text under the key 'text'"):
        train_tokenizer.main(flags)
    train_tokenizer.main([*flags, "--on-bad-line", "skip"])
    assert "bad lines: 1 left out, 0 mended" in capsys.readouterr().out
    assert (tmp_path / "x.model").is_file()
