import io

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_untied.data.tokenizers import build_tokenizer
from tests.data.corpus import NASTY_TEXTS


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
