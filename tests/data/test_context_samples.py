"""Needles and copies as they are asked, and which documents are held out."""

import re

import numpy as np
import pytest

from megatron_untied.config.data import DataConfig
from megatron_untied.data.context_samples import (
    COPY_PARTS,
    ContextSamples,
    HeldOutDocuments,
)
from megatron_untied.data.tokenizers import build_tokenizer
from tests.support.corpus import train_small_tokenizer, write_token_files


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Samples for a tokenizer with text, in documents of one letter each."""
    folder = tmp_path_factory.mktemp("text")
    model = str(train_small_tokenizer(folder))
    tokenizer = build_tokenizer("SentencePieceTokenizer", model=model)
    documents = [tokenizer.tokenize(letter * 200) for letter in "abcd"]
    data = DataConfig(
        tokenizer_type="SentencePieceTokenizer",
        data_path=(write_token_files(folder / "tokens", documents),),
        split="50,50,0",
    )
    return ContextSamples(
        tokenizer=tokenizer,
        documents=HeldOutDocuments(data, tokenizer),
        lengths=(512, 1024),
        num_depths=3,
        num_trials=2,
    )


def test_needles_of_text_are_sentences_in_held_out_documents(text):
    samples = list(text.needles("passkey"))
    assert len(samples) == 2 * 2 * 3
    for number, sample in enumerate(samples):
        row, column = sample.answers[0].cell
        assert (row, column) == (number % 3, number // 3 % 2)
        assert len(sample.tokens) == len(sample.labels) == text.lengths[column]
        assert np.array_equal(sample.tokens[1:], sample.labels[:-1])
        said = text.tokenizer.detokenize([*sample.tokens.tolist(), int(sample.labels[-1])])
        found = re.search(r"\n(The pass key of (\w+) is (\d{5})\. Remember it\.)\n", said)
        question = f"What is the pass key of {found[2]}? The pass key of {found[2]} is {found[3]}"
        assert said.endswith(question)
        place = found.start() / (len(said) - len(question) - len(found[0]))
        assert place == pytest.approx(text.depths[row], abs=0.05)
        answer = text.tokenizer.detokenize(sample.labels[sample.answers[0].positions].tolist())
        assert answer.strip() == found[3]
        assert not set("ab") & set(said[: found.start()])  # the training share
        assert set("cd") & set(said)


def test_every_needle_of_a_sample_is_asked(text):
    for sample in text.needles("needles"):
        said = text.tokenizer.detokenize(sample.tokens.tolist())
        by_city = dict(re.findall(r"\nThe pass key of (\w+) is (\d{5})\. Remember", said))
        assert len(by_city) == 3
        assert sorted(answer.cell[0] for answer in sample.answers) == [0, 1, 2]
        for answer in sample.answers:
            before = text.tokenizer.detokenize(sample.tokens[: answer.positions.start + 1].tolist())
            city = before.rpartition("The pass key of ")[2].split()[0]
            value = text.tokenizer.detokenize(sample.labels[answer.positions].tolist())
            assert value.strip() == by_city[city]


def test_samples_are_the_same_on_every_rank_and_differ_between_trials(text):
    first, again = ([s.tokens for s in text.needles("needles")] for _ in range(2))
    assert all(map(np.array_equal, first, again))
    assert not np.array_equal(first[0], first[2])


@pytest.mark.parametrize("length", [32, 64, 1000])
def test_a_copy_is_scored_in_parts_behind_its_first_tokens(length):
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=50)
    samples = ContextSamples(
        tokenizer=tokenizer, documents=None, lengths=(length,), num_depths=1, num_trials=1
    )
    (copy,) = samples.copies()
    half = length // 2
    assert np.array_equal(copy.tokens[:half], copy.tokens[half : 2 * half])
    assert copy.num_random == half - 1
    assert copy.tokens.max() < 50  # the end of document is 50
    scored = [answer.positions for answer in copy.answers]
    assert len(scored) == COPY_PARTS
    assert [answer.cell for answer in copy.answers] == [(row, 0) for row in range(COPY_PARTS)]
    assert scored[0].start >= half
    assert scored[-1].stop == length
    assert all(
        a.stop == b.start and b.stop > b.start for a, b in zip(scored, scored[1:], strict=False)
    )
    assert scored[0].stop > scored[0].start
    for where in scored:
        assert np.array_equal(
            copy.labels[where], copy.tokens[where.start + 1 - half : where.stop + 1 - half]
        )
