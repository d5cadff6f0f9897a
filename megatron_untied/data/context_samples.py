"""Samples that only a model which reads its context predicts: documents, needles and copies.

Every sample is made from its number and a seed, so all ranks make the same ones. Held-out documents
are the validation share of ``--split``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.tokenizers import MegatronTokenizerBase

from megatron_untied.config.data import DataConfig, check_split, parse_blend
from megatron_untied.data.indexed_files import (
    IndexedFiles,
    open_indexed_files,
    out_of_vocabulary,
    outside,
)

CITIES = (
    *("Oslo", "Lima", "Cairo", "Paris", "Tokyo", "Delhi", "Quito", "Dublin", "Athens", "Madrid"),
    *("Berlin", "Vienna", "Lisbon", "Nairobi", "Helsinki", "Santiago", "Brussels", "Copenhagen"),
)
KEY_TOKENS = 4
"""Tokens of a key and of a value, for tokenizers without text."""
COPY_PARTS = 8
"""Of a copy, scored one by one: with the first half of the sample, sixteenths of it."""
FOUND_TOKENS = 8
"""First tokens of a copy, which are not scored: they could be random ones as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Labels of a sample that follow from its context."""

    cell: tuple[int, int]
    """Row, such as the depth, and length, as indices into the grid."""
    positions: slice


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ContextSample:
    """One sequence, and what is asked of it."""

    tokens: np.ndarray
    """int64 [s]."""
    labels: np.ndarray
    """int64 [s]: the tokens that follow."""
    num_labels: int
    """Of the first positions; a document of s tokens has no label at its last one."""
    answers: tuple[Answer, ...] = ()
    num_random: int = 0
    """Of the first labels, which nothing predicts."""

    @classmethod
    def of(cls, ids: np.ndarray, *, s: int, **others: Any) -> "ContextSample":
        """Of ``ids`` [s + 1], or [s] without a last label; ``others`` are fields."""
        labels = np.zeros(s, np.int64)  # any token of the vocabulary, where there is none
        labels[: len(ids) - 1] = ids[1:]
        return cls(tokens=ids[:s], labels=labels, num_labels=len(ids) - 1, **others)


@dataclass(frozen=True)
class HeldOutDocuments:
    """The documents of the validation share of ``data``, in file order."""

    data: DataConfig
    tokenizer: MegatronTokenizerBase

    @cached_property
    def files(self) -> list[tuple[IndexedFiles, range, np.ndarray]]:
        """Each file with the numbers of its held-out documents, and where all its documents start.

        Raises:
            FileNotFoundError, ValueError: as :func:`open_indexed_files`, or nothing is held out.
        """
        check_split(self.data.split)
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(self.data.split))
        if matrix[1] is None:
            raise ValueError(
                f"--split {self.data.split} holds out no documents; give a share to validation, or "
                "--split 0,1,0 if all of --data-path is held out"
            )
        found = []
        for prefix in parse_blend(self.data.data_path).prefixes:
            files = open_indexed_files(prefix, vocab_size=self.tokenizer.vocab_size)
            first, stop = (round(share * len(files.lengths)) for share in matrix[1])
            starts = np.concatenate([[0], files.lengths.cumsum(dtype=np.int64)])
            found.append((files, range(first, stop), starts))
        return found

    def long(self, num_tokens: int) -> list[tuple[int, int]]:
        """File and number of each document of at least ``num_tokens``.

        Raises:
            ValueError: there is none, with the longest.
        """
        of_file = [files.lengths[held.start : held.stop] for files, held, _ in self.files]
        places = [
            (file, self.files[file][1].start + int(n))
            for file, lengths in enumerate(of_file)
            for n in np.flatnonzero(lengths >= num_tokens)
        ]
        if not places:
            longest = max((int(lengths.max(initial=0)) for lengths in of_file), default=0)
            raise ValueError(
                f"none of the {sum(map(len, of_file)):,} documents that --split {self.data.split} "
                f"holds out has {num_tokens:,} tokens, the longest has {longest:,}; give a lower "
                "--seq-length, or longer documents"
            )
        return places

    def tokens(self, place: tuple[int, int], num_tokens: int) -> np.ndarray:
        """The first ``num_tokens`` of a document, or all if it has fewer; int64.

        Raises:
            ValueError: a token is not in the vocabulary.
        """
        (files, _, starts), document = self.files[place[0]], place[1]
        stop = min(starts[document] + num_tokens, starts[document + 1])
        ids = files.tokens[starts[document] : stop]
        if len(found := outside(ids, self.tokenizer.vocab_size)):
            raise out_of_vocabulary(
                files.prefix,
                document=document,
                place=int(found[0]),
                token=int(ids[found[0]]),
                vocab_size=self.tokenizer.vocab_size,
            )
        return ids.astype(np.int64)

    def joined(self, first: int, num_tokens: int) -> np.ndarray:
        """``num_tokens`` of documents one after the other, from number ``first`` on; int64."""
        places = [(file, n) for file, (_, held, _) in enumerate(self.files) for n in held]
        parts, missing, number = [], num_tokens, first
        while missing:
            parts.append(self.tokens(places[number % len(places)], missing))
            missing, number = missing - len(parts[-1]), number + 1
        return np.concatenate(parts)


@dataclass(frozen=True, kw_only=True)
class ContextSamples:
    """Makes samples for a grid of lengths and depths."""

    tokenizer: MegatronTokenizerBase
    documents: HeldOutDocuments | None
    """Where needles are hidden; None hides them among random tokens."""
    lengths: Sequence[int]
    num_depths: int
    num_trials: int
    seed: int = 1

    @property
    def depths(self) -> list[float]:
        """Shares of the text before a needle: from 0, the beginning, to 1, next to the question."""
        return np.linspace(0, 1, self.num_depths).tolist() if self.num_depths > 1 else [0.5]

    @property
    def vocab_size(self) -> int:
        """Different random tokens; the end of document is none of them."""
        return self.tokenizer.vocab_size - (self.tokenizer.library == "null")

    def random_tokens(self, rng: np.random.Generator, num_tokens: int) -> np.ndarray:
        """Uniform, int64 [num_tokens]: no model is better than log(vocab_size) nats on these."""
        return rng.integers(0, self.vocab_size, num_tokens)

    def copies(self) -> Iterator[ContextSample]:
        """Random tokens twice, for every length; rows are :data:`COPY_PARTS` parts of the copy."""
        for trial in range(self.num_trials):
            for column, length in enumerate(self.lengths):
                rng, distance = np.random.default_rng([self.seed, trial, column]), length // 2
                ids = np.resize(self.random_tokens(rng, distance), length + 1)  # repeats them
                # Position i predicts token i + 1, so the first copied label is at distance - 1.
                edges = np.linspace(distance - 1, length, COPY_PARTS + 1).astype(int)
                edges[0] += min(FOUND_TOKENS, (edges[1] - edges[0]) // 2)
                answers = [
                    Answer(cell=(row, column), positions=slice(*edges[row : row + 2].tolist()))
                    for row in range(COPY_PARTS)
                ]
                yield ContextSample.of(
                    ids, s=length, answers=tuple(answers), num_random=distance - 1
                )

    def check(self, kind: Literal["passkey", "needles"]) -> None:
        """Raise ``ValueError`` if the shortest sample cannot hold its needles and questions."""
        shortest, rows = int(np.argmin(self.lengths)), range(self.num_depths)
        self._with_needles(0, shortest, list(rows if kind == "needles" else rows[:1]))

    def needles(self, kind: Literal["passkey", "needles"]) -> Iterator[ContextSample]:
        """Key and value hidden in a text that ends with the key, for every depth and length.

        ``passkey``: one in each sample. ``needles``: one at every depth, asked one after the other,
        with the right answers before.
        """
        rows = range(self.num_depths)
        for trial in range(self.num_trials):
            for column in range(len(self.lengths)):
                for hidden in [[row] for row in rows] if kind == "passkey" else [list(rows)]:
                    yield self._with_needles(trial, column, hidden)

    def _with_needles(self, trial: int, column: int, rows: list[int]) -> ContextSample:
        length = self.lengths[column]
        rng = np.random.default_rng([self.seed, trial, column, *rows])
        made = [self._needle(rng, name) for name in rng.permutation(len(CITIES))[: len(rows)]]
        asked = sum(len(question) + len(answer) for _, question, answer in made)
        room = length + 1 - asked - sum(len(statement) for statement, _, _ in made)
        if room < 0:
            raise ValueError(
                f"{len(rows)} needles and their questions are {length + 1 - room} tokens, more "
                f"than the {length} of a length; give longer --lengths, or fewer --depths"
            )
        if self.documents is None:
            text = self.random_tokens(rng, room)
        else:
            text = self.documents.joined(trial, room)
        parts, done = [], 0
        for row, (statement, _, _) in zip(rows, made, strict=True):
            place = round(self.depths[row] * room)
            parts += [text[done:place], statement]
            done = place
        parts.append(text[done:])
        answers, end = [], length + 1 - asked
        # In another order than that in which they are hidden, which could be learned.
        for i in rng.permutation(len(rows)):
            _, question, answer = made[i]
            parts += [question, answer]
            end += len(question) + len(answer)
            positions = slice(end - len(answer) - 1, end - 1)  # of the tokens before
            answers.append(Answer(cell=(rows[i], column), positions=positions))
        return ContextSample.of(np.concatenate(parts), s=length, answers=tuple(answers))

    def _needle(
        self, rng: np.random.Generator, name: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens of a statement, of a question, and of its answer."""
        if self.tokenizer.library == "null":
            key, value = np.split(self.random_tokens(rng, 2 * KEY_TOKENS), 2)
            return np.concatenate([key, value]), key, value
        city, number = CITIES[name], rng.integers(10_000, 100_000)
        statement = f"\nThe pass key of {city} is {number}. Remember it.\n"
        question = f"\nWhat is the pass key of {city}? The pass key of {city} is"
        # Together: alone, the number could begin with another token.
        whole, start = self._ids(f"{question} {number}"), self._ids(question)
        shared = min(len(start), len(whole) - 1)
        while not np.array_equal(whole[:shared], start[:shared]):
            shared -= 1
        return self._ids(statement), whole[:shared], whole[shared:]

    def _ids(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.tokenize(text), np.int64)
