import io
import json
import re
import socket

import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_untied.data import tokenizers
from megatron_untied.data.tokenizers import build_tokenizer, tokenizer_hash
from tests.support.corpus import NASTY_TEXTS


@pytest.fixture(scope="module")
def hugging_face_folder(tmp_path_factory):
    """A byte-level BPE of 300 tokens and an end of document, as Hugging Face saves it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        NASTY_TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    folder = tmp_path_factory.mktemp("hf")
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_sentencepiece_gives_back_every_text(tokenizer_model, text):
    tokenizer = build_tokenizer("SentencePieceTokenizer", model=tokenizer_model)
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert tokenizer.eod not in ids


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_hugging_face_gives_back_every_text(hugging_face_folder, text):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", model=hugging_face_folder)
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert tokenizer.eod == tokenizer.vocab_size - 1
    assert tokenizer.eod not in ids


def test_null_tokenizer_reads_numbers_and_adds_an_end_of_document():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert tokenizer.tokenize("5 0 99") == [5, 0, 99]
    assert (tokenizer.eod, tokenizer.vocab_size) == (100, 101)


def test_accepts_the_vocabulary_size_it_has(tokenizer_model):
    built = build_tokenizer("SentencePieceTokenizer", model=tokenizer_model, vocab_size=400)
    assert built.vocab_size == 400


@pytest.mark.parametrize("vocab_size", [399, 401, 32000])
def test_rejects_another_vocabulary_size(tokenizer_model, vocab_size):
    with pytest.raises(ValueError, match=f"--vocab-size {vocab_size} does not match .* 400 tokens"):
        build_tokenizer("SentencePieceTokenizer", model=tokenizer_model, vocab_size=vocab_size)


def test_rejects_an_unknown_type():
    with pytest.raises(ValueError, match="GPT2BPETokenizer is none of SentencePieceTokenizer"):
        build_tokenizer("GPT2BPETokenizer", model="x")


@pytest.mark.parametrize("tokenizer_type", ["SentencePieceTokenizer", "HuggingFaceTokenizer"])
def test_rejects_no_model(tokenizer_type):
    with pytest.raises(ValueError, match=f"{tokenizer_type} needs --tokenizer-model"):
        build_tokenizer(tokenizer_type)
    with pytest.raises(ValueError, match=f"{tokenizer_type} needs --tokenizer-model"):
        build_tokenizer(tokenizer_type, model="")


@pytest.mark.parametrize("vocab_size", [None, 0])
def test_null_tokenizer_rejects_no_vocabulary(vocab_size):
    with pytest.raises(ValueError, match=f"needs --vocab-size of at least 1, not {vocab_size}"):
        build_tokenizer("NullTokenizer", vocab_size=vocab_size)


@pytest.mark.parametrize("tokenizer_type", ["SentencePieceTokenizer", "HuggingFaceTokenizer"])
def test_rejects_a_missing_model(tmp_path, tokenizer_type):
    with pytest.raises(FileNotFoundError, match="absent.model: no such file or folder"):
        build_tokenizer(tokenizer_type, model=str(tmp_path / "absent.model"))


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B"])
def test_asks_no_hub_for_a_name(monkeypatch, name):
    def connect(*arguments):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(FileNotFoundError, match=f"{name}: no such file .* download the tokenizer"):
        build_tokenizer("HuggingFaceTokenizer", model=name)


def test_rejects_a_file_for_a_folder_and_a_folder_for_a_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json is a file; .*needs a folder with tokeniz"):
        build_tokenizer("HuggingFaceTokenizer", model=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="is a folder; .*needs a .model file"):
        build_tokenizer("SentencePieceTokenizer", model=str(tmp_path))


def digits_by_three(folder, tokenizer_class):
    """A byte-level BPE over digits whose pre-tokenizer is not what GPT-2's or Qwen's class has."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [(a, b) for a in "0123456789" for b in "0123456789"]
    merges += [(a + b, c) for a, b in list(merges) for c in "0123456789"]
    merges += [("202", c) for c in "0123456789"]  # reached only where digits are not cut
    for a, b in merges:
        vocabulary.setdefault(a + b, len(vocabulary))
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    words = Regex(r"\p{N}{1,3}| ?\p{L}+|[^\s\p{L}\p{N}]+|\s+")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<s>", "</s>", "<unk>", "<|endoftext|>"])
    bpe.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": tokenizer_class,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return bpe


@pytest.mark.parametrize(
    ("tokenizer_class", "differs"),
    [
        ("GPT2Tokenizer", True),
        ("GPT2TokenizerFast", True),
        ("Qwen2Tokenizer", True),
        ("LlamaTokenizer", False),
        ("LlamaTokenizerFast", False),
        ("PreTrainedTokenizerFast", False),
    ],
)
def test_the_tokenizer_file_decides(tmp_path, caplog, tokenizer_class, differs):
    by_file = digits_by_three(tmp_path, tokenizer_class)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", model=str(tmp_path))
    lines = [r.getMessage() for r in caplog.records if r.name == tokenizers.__name__]
    assert len(lines) == differs
    assert all("gives other ids than tokenizer.json; tokenizer.json is used" in x for x in lines)
    for text in ("2023 650841823", "hello world 12345\n", " x", *NASTY_TEXTS):
        expected = by_file
        expected.encode_special_tokens = True
        assert tokenizer.tokenize(text) == expected.encode(text, add_special_tokens=False).ids
    assert tokenizer.eod == by_file.token_to_id("</s>")
    assert tokenizer.vocab_size == by_file.get_vocab_size()


@pytest.mark.parametrize("tokenizer_class", ["GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_the_text_of_a_special_token_is_text(tmp_path, tokenizer_class):
    digits_by_three(tmp_path, tokenizer_class)
    text = "a <|endoftext|></s>\n<s> b"
    tokenizer = build_tokenizer("HuggingFaceTokenizer", model=str(tmp_path))
    vocabulary = tokenizer._tokenizer.tokenizer.get_vocab()
    special = {vocabulary[token] for token in ("<s>", "</s>", "<|endoftext|>")}
    assert not special & set(tokenizer.tokenize(text))
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    parsing = build_tokenizer(
        "HuggingFaceTokenizer", model=str(tmp_path), parse_special_tokens=True
    )
    assert special < set(parsing.tokenize(text))
    assert tokenizer_hash(parsing) == tokenizer_hash(tokenizer)


def test_a_special_token_that_its_file_does_not_call_special_is_text(tmp_path):
    digits_by_three(tmp_path, "PreTrainedTokenizerFast")
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"special": true', '"special": false'))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", model=str(tmp_path))
    assert tokenizer.eod not in tokenizer.tokenize("a </s> b")


def test_sentencepiece_has_nothing_to_parse(tokenizer_model):
    with pytest.raises(ValueError, match="--parse-special-tokens: SentencePiece never makes"):
        build_tokenizer("SentencePieceTokenizer", model=tokenizer_model, parse_special_tokens=True)


def test_hash_follows_vocabulary_merges_and_end_of_document_but_not_the_place(tmp_path):
    hashes = []
    for name, change in (
        ("a", lambda text: text),
        ("moved", lambda text: json.dumps(json.loads(text))),
        ("vocabulary", lambda text: text.replace('"<unk>"', '"<UNK>"')),
        ("merges", lambda text: re.sub(r'\[\s*"0",\s*"0"\s*\],', "", text, count=1)),
    ):
        folder = tmp_path / name
        folder.mkdir()
        digits_by_three(folder, "PreTrainedTokenizerFast")
        file = folder / "tokenizer.json"
        before = file.read_text()
        file.write_text(change(before))
        assert (file.read_text() != before) == (name != "a")
        tokenizer = build_tokenizer("HuggingFaceTokenizer", model=str(folder))
        hashes.append(tokenizer_hash(tokenizer))
    digits_by_three(tmp_path, "PreTrainedTokenizerFast")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"</s>"', '"<|endoftext|>"'))
    hashes.append(tokenizer_hash(build_tokenizer("HuggingFaceTokenizer", model=str(tmp_path))))
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4


def test_rejects_a_file_that_is_no_sentencepiece_model(tmp_path):
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="bad.model cannot be read as a SentencePieceTokenizer"):
        build_tokenizer("SentencePieceTokenizer", model=str(tmp_path / "bad.model"))


def test_rejects_a_folder_without_a_hugging_face_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="cannot be read as a HuggingFaceTokenizer"):
        build_tokenizer("HuggingFaceTokenizer", model=str(tmp_path))


def test_rejects_a_tokenizer_that_cannot_end_documents(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c"] * 9),
        model_writer=model,
        vocab_size=6,
        model_type="char",
        eos_id=-1,
        minloglevel=2,
    )
    (tmp_path / "endless.model").write_bytes(model.getvalue())
    with pytest.raises(ValueError, match="has no end-of-sentence token"):
        build_tokenizer("SentencePieceTokenizer", model=str(tmp_path / "endless.model"))
