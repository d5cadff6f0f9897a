"""Parts of a text give the ids of the whole; no tokenizer is cut where they may not."""

import io
import random

import pytest
import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from megatron_untied.data import long_texts
from megatron_untied.data.long_texts import parts_encoder
from megatron_untied.data.tokenizers import build_tokenizer
from tests.support.corpus import NASTY_TEXTS

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLIT = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")


def nasty_text(seed, words=3000):
    """Words, digits, runs of white space and other scripts, none of them rare."""
    rng = random.Random(seed)
    pieces = [*"abc", "the", "123", "4567", ".", '"', "'s", "é", "e\u0301", "中文", "😀", "</s>"]
    spaces = [
        "",
        " ",
        " ",
        " ",
        "  ",
        "\n",
        "\n\n",
        " \n ",
        "\t",
        "\r\n",
        "\u00a0",
        " " * 50,
        "\n" * 9,
    ]
    text = "".join(rng.choice(pieces) + rng.choice(spaces) for _ in range(words))
    return "".join(NASTY_TEXTS) + text


def bpe(tmp_path, pre_tokenizer, normalizer=None):
    """A Hugging Face folder whose merges were learned from such texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([nasty_text(99)], trainer)
    tokenizer.add_tokens([AddedToken("the a", special=False, normalized=False)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path)
    return build_tokenizer("HuggingFaceTokenizer", model=str(tmp_path))


def sentencepiece_model(tmp_path, **flags):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        **{
            "sentence_iterator": iter(nasty_text(99).split("\n")),
            "model_writer": model,
            "vocab_size": 400,
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "hard_vocab_limit": False,
            "minloglevel": 2,
            **flags,
        }
    )
    (tmp_path / "a.model").write_bytes(model.getvalue())
    return build_tokenizer("SentencePieceTokenizer", model=str(tmp_path / "a.model"))


def require_same_ids(monkeypatch, tokenizer, texts, num_parts):
    monkeypatch.setattr(long_texts, "PART_CHARACTERS", 400)
    monkeypatch.setattr(long_texts, "_MARGIN_CHARACTERS", 100)
    encode = parts_encoder(tokenizer, parse_special_tokens=False)
    for text in texts:
        parts = list(encode(text))
        assert len(parts) >= num_parts
        assert [id_ for _, ids in parts for id_ in ids] == tokenizer.tokenize(text)
        ends = [end for end, _ in parts]
        assert ends == sorted(set(ends))
        assert ends[-1] == len(text)


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.NFKC()])
@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Sequence([SPLIT, BYTES]),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), SPLIT, BYTES]),
    ],
)
def test_hugging_face_parts_are_the_whole(monkeypatch, tmp_path, pre_tokenizer, normalizer):
    tokenizer = bpe(tmp_path, pre_tokenizer, normalizer)
    require_same_ids(monkeypatch, tokenizer, map(nasty_text, range(5)), 15)


@pytest.mark.parametrize("add_dummy_prefix", [False, True])
def test_sentencepiece_parts_are_the_whole(monkeypatch, tmp_path, add_dummy_prefix):
    tokenizer = sentencepiece_model(tmp_path, add_dummy_prefix=add_dummy_prefix)
    require_same_ids(monkeypatch, tokenizer, map(nasty_text, range(5)), 10)


def test_null_tokenizer_parts_are_the_whole(monkeypatch):
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=5000)
    require_same_ids(monkeypatch, tokenizer, [" ".join(map(str, range(5000)))], 50)


def test_a_text_without_a_boundary_is_one_part(monkeypatch, tmp_path):
    tokenizer = bpe(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    require_same_ids(monkeypatch, tokenizer, ["a" * 5000, " " * 5000, "中" * 5000, ""], 1)


@pytest.mark.parametrize("kind", ["Hugging Face", "SentencePiece", "null"])
def test_a_long_text_without_a_boundary_is_refused(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(long_texts, "PART_CHARACTERS", 400)
    tokenizer = {
        "Hugging Face": lambda: bpe(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False)),
        "SentencePiece": lambda: sentencepiece_model(tmp_path),
        "null": lambda: build_tokenizer("NullTokenizer", vocab_size=5000),
    }[kind]()
    encode = parts_encoder(tokenizer, parse_special_tokens=False, most=2000)
    assert list(encode("1 " + "0" * 1900 + "1"))
    with pytest.raises(ValueError, match="in one call, since .* character .*--long-texts-in-one"):
        list(encode("1 " + "0" * 2001))


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"(?<=\d)\D+"), "isolated"), BYTES]),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+(?=.*x)"), "isolated"), BYTES]),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"^\w+"), "isolated"), BYTES]),
        pre_tokenizers.Metaspace(),
    ],
)
def test_does_not_cut_what_looks_far(tmp_path, pre_tokenizer):
    found = parts_encoder(bpe(tmp_path, pre_tokenizer), parse_special_tokens=False)
    assert found == "its pre-tokenizer may cut words by what is far from them"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"model_type": "unigram"}, "its pieces are not chosen by BPE"),
        ({"normalization_rule_name": "nmt_nfkc"}, "it normalizes the text as a whole"),
        ({"remove_extra_whitespaces": True}, "it normalizes the text as a whole"),
        ({"user_defined_symbols": ["a b"]}, "its pieces may have a space inside"),
        ({"split_by_whitespace": False, "sentence_iterator": iter(["of the in the cat"] * 99)},
         "its pieces may have a space inside"),
    ],
)  # fmt: skip
def test_does_not_cut_sentencepiece_that_is_not_local(tmp_path, flags, reason):
    found = parts_encoder(sentencepiece_model(tmp_path, **flags), parse_special_tokens=False)
    assert found.startswith(reason)


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, backend):
        self.backend, self.num_characters = backend, 0

    def encode(self, text, **arguments):
        self.num_characters += len(text)
        return self.backend.encode(text, **arguments)


@pytest.mark.parametrize("word", [5, 350, 5000])
def test_every_character_is_encoded_a_few_times(monkeypatch, tmp_path, word):
    """So a text of any length takes linear time, also where words are longer than a part."""
    monkeypatch.setattr(long_texts, "PART_CHARACTERS", 400)
    monkeypatch.setattr(long_texts, "_MARGIN_CHARACTERS", 40)
    library = bpe(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend = Counting(library._tokenizer.tokenizer.backend_tokenizer)
    text = " ".join(["a b", "c" * word] * (20_000 // word))
    parts = list(long_texts._at_words(text, backend, 13_000))
    assert len(parts) >= 3
    assert [id_ for _, ids in parts for id_ in ids] == library.tokenize(text)
    assert len(text) <= backend.num_characters <= (4 if word > 400 else 2) * len(text) + 400
