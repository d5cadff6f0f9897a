import os
import signal
from dataclasses import dataclass

import numpy as np
import pytest

from megatron_untied.data import long_texts, tokenize_documents
from megatron_untied.data.documents import Document, Place
from megatron_untied.data.tokenize_documents import Encoder, encode_in_order
from megatron_untied.data.tokenizers import build_tokenizer
from tests.data.test_long_texts import sentencepiece_model

NULL_TOKENIZER = build_tokenizer("NullTokenizer", vocab_size=100)


def documents(*texts):
    for number, text in enumerate(texts):
        place = Place(file_index=0, file="here", number=number)
        yield Document(place=place, texts={"text": text}, num_bytes=len(text))


def encode(*texts, append_eod=False, num_workers=1):
    encoder = Encoder(NULL_TOKENIZER, append_eod=append_eod)
    encoded = encode_in_order(documents(*texts), encoder, num_workers=num_workers)
    return [document.ids["text"].tolist() for document in encoded]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_keeps_the_order_of_the_documents(monkeypatch, num_workers):
    monkeypatch.setattr(tokenize_documents, "_BATCH_CHARACTERS", 6)  # many batches, of two or so
    texts = [str(number) for number in range(100)]
    assert encode(*texts, num_workers=num_workers) == [[number] for number in range(100)]


def test_ends_documents_that_are_not_empty():
    assert encode("1 2", "", "3", append_eod=True) == [[1, 2, 100], [], [3, 100]]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(100, np.uint16), (128256, np.int32)])
def test_takes_the_smallest_dtype_that_megatron_has(vocab_size, dtype):
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=vocab_size)
    assert Encoder(tokenizer, append_eod=False).dtype is dtype


def problems(tokenizer, *texts, **flags):
    encoder = Encoder(tokenizer, append_eod=False, **flags)
    encoded = list(encode_in_order(documents(*texts), encoder, num_workers=2))
    assert all(bool(document.problem) != bool(document.ids) for document in encoded)
    return [document.problem for document in encoded]


@pytest.mark.parametrize("token", [101, -1])
def test_tokens_outside_the_vocabulary_are_a_problem_of_their_document(token):
    problem = f"token {token} is outside the vocabulary of 101"
    assert problems(NULL_TOKENIZER, "5", f"1 {token}", "6") == [None, problem, None]


def test_an_end_of_document_inside_a_text_is_a_problem_unless_it_is_asked_for():
    before, problem, after = problems(NULL_TOKENIZER, "5", "1 100 2", "6")
    assert (before, after) == (None, None)
    assert "gives the end-of-document token 100, a boundary where no document ends" in problem
    assert problems(NULL_TOKENIZER, "1 100 2", parse_special_tokens=True) == [None]


def test_a_text_that_is_no_number_is_a_problem_of_null_tokenizer():
    assert "invalid literal for int" in problems(NULL_TOKENIZER, "one")[0]


def test_begins_and_ends_documents_that_have_text(tokenizer_model):
    tokenizer = build_tokenizer("SentencePieceTokenizer", model=tokenizer_model)
    encoder = Encoder(tokenizer, append_eod=True, bos=1)
    full, empty = encode_in_order(documents("a", ""), encoder, num_workers=1)
    assert full.ids["text"].tolist() == [1, *tokenizer.tokenize("a"), 2]
    assert empty.ids["text"].tolist() == []


def test_bytes_of_a_long_document_are_told_part_by_part(monkeypatch):
    monkeypatch.setattr(long_texts, "PART_CHARACTERS", 10)
    text = " ".join(map(str, range(50)))
    told = []
    encoder = Encoder(NULL_TOKENIZER, append_eod=True)
    (document,) = encode_in_order(documents(text), encoder, num_workers=1, advance=told.append)
    assert document.ids["text"].tolist() == [*range(50), 100]
    assert len(told) > 5
    assert sum(told) == len(text)


def test_a_long_text_that_cannot_be_cut_is_a_problem_unless_asked_for(monkeypatch, tmp_path):
    tokenizer = sentencepiece_model(tmp_path, model_type="unigram")
    monkeypatch.setattr(long_texts, "PART_CHARACTERS", 100)
    monkeypatch.setattr(long_texts, "WHOLE_CHARACTERS", 1000)
    text = "the cat " * 126  # 8 characters over
    short, problem = problems(tokenizer, text[:1000], text)
    assert short is None
    assert "1,008 characters in one call" in problem
    assert "its pieces are not chosen by BPE" in problem
    assert "--long-texts-in-one-call" in problem
    assert problems(tokenizer, text, long_in_one_call=True) == [None]


def test_an_error_while_reading_reaches_the_caller():
    def broken():
        yield from documents("1")
        raise ValueError("file:2: bad line")

    encoder = Encoder(NULL_TOKENIZER, append_eod=False)
    with pytest.raises(ValueError, match="file:2: bad line"):
        list(encode_in_order(broken(), encoder, num_workers=2))


@dataclass
class KilledTokenizer:
    vocab_size: int = 9
    eod: int = 8
    library: str = "null"

    def tokenize(self, text):
        os.kill(os.getpid(), signal.SIGKILL)


def test_says_that_a_process_died():
    encoder = Encoder(KilledTokenizer(), append_eod=False)
    with pytest.raises(RuntimeError, match=r"a tokenizer process died \(exit code -9; "):
        list(encode_in_order(documents("1"), encoder, num_workers=2))
