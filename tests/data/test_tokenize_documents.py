import os
import signal
from dataclasses import dataclass

import numpy as np
import pytest

from megatron_untied.data import tokenize_documents
from megatron_untied.data.documents import Document
from megatron_untied.data.tokenize_documents import Encoder, encode_in_order
from megatron_untied.data.tokenizers import build_tokenizer

NULL_TOKENIZER = build_tokenizer("NullTokenizer", vocab_size=100)


def documents(*texts):
    for number, text in enumerate(texts):
        yield Document(where=f"here:{number}", texts={"text": text}, num_bytes=len(text))


def encode(*texts, append_eod=False, num_workers=1):
    encoder = Encoder(tokenizer=NULL_TOKENIZER, append_eod=append_eod)
    encoded = encode_in_order(documents(*texts), encoder, num_workers=num_workers)
    return [document.ids["text"].tolist() for document in encoded]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_keeps_the_order_of_the_documents(monkeypatch, num_workers):
    monkeypatch.setattr(tokenize_documents, "_BATCH_BYTES", 4)  # many batches, of two or so
    texts = [str(number) for number in range(100)]
    assert encode(*texts, num_workers=num_workers) == [[number] for number in range(100)]


def test_ends_documents_that_are_not_empty():
    assert encode("1 2", "", "3", append_eod=True) == [[1, 2, 100], [], [3, 100]]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(100, np.uint16), (128256, np.int32)])
def test_takes_the_smallest_dtype_that_megatron_has(vocab_size, dtype):
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=vocab_size)
    assert Encoder(tokenizer=tokenizer, append_eod=False).dtype is dtype


@pytest.mark.parametrize("token", [101, -1])
def test_rejects_tokens_outside_the_vocabulary(token):
    message = f"here:1: token {token} is outside the vocabulary of 101"
    with pytest.raises(ValueError, match=message):
        encode("5", f"1 {token}")


def test_says_which_document_cannot_be_encoded(tokenizer_model):
    tokenizer = build_tokenizer("SentencePieceTokenizer", model=tokenizer_model)
    encoder = Encoder(tokenizer=tokenizer, append_eod=False)
    with pytest.raises(ValueError, match="here:1: .*surrogates not allowed"):
        list(encode_in_order(documents("fine", "\ud800"), encoder, num_workers=2))


def test_an_error_while_reading_reaches_the_caller():
    def broken():
        yield from documents("1")
        raise ValueError("file:2: bad line")

    encoder = Encoder(tokenizer=NULL_TOKENIZER, append_eod=False)
    with pytest.raises(ValueError, match="file:2: bad line"):
        list(encode_in_order(broken(), encoder, num_workers=2))


@dataclass
class KilledTokenizer:
    vocab_size: int = 9

    def tokenize(self, text):
        os.kill(os.getpid(), signal.SIGKILL)


def test_says_that_a_process_died():
    encoder = Encoder(tokenizer=KilledTokenizer(), append_eod=False)
    with pytest.raises(RuntimeError, match=r"a tokenizer process died \(exit code -9; "):
        list(encode_in_order(documents("1"), encoder, num_workers=2))
