"""Encodes documents as token ids in several processes, in the order of the documents."""

import logging
import math
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
from megatron.core.datasets.indexed_dataset import DType
from megatron.core.tokenizers import MegatronTokenizerBase

from megatron_untied.data import long_texts
from megatron_untied.data.documents import Document, Place

logger = logging.getLogger(__name__)

_BATCH_CHARACTERS = 1 << 18

Advance = Callable[[int], None]
"""Called with the bytes of the input that were tokenized since the last call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedDocument:
    """The token ids of a document by JSON key, empty for empty texts, or its problem."""

    place: Place
    ids: dict[str, np.ndarray]
    num_bytes: int
    """Bytes of its file that were not yet reported while it was encoded."""
    problem: str | None = None
    replaced: str | None = None


class DocumentEncoder(Protocol):
    """What :func:`encode_in_order` runs in its processes."""

    def __call__(self, document: Document, advance: Advance = ...) -> EncodedDocument:
        """The token ids of a document."""

    def waits_for(self, document: Document) -> bool:
        """Whether encoding it needs a warning."""


class Encoder:
    """Encodes text as token ids, checked and in the dtype of the token files.

    ``bos`` is prepended and, with ``append_eod``, the end of document appended to every document
    with text. A text that contains the end of document is a problem, unless
    ``parse_special_tokens``. So is one that is long and cannot be encoded in parts, unless
    ``long_in_one_call``.
    """

    def __init__(
        self,
        tokenizer: MegatronTokenizerBase,
        *,
        append_eod: bool,
        bos: int | None = None,
        parse_special_tokens: bool = False,
        long_in_one_call: bool = False,
    ):
        self.dtype: type[np.integer] = DType.optimal_dtype(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self._vocab_size, self._eod = tokenizer.vocab_size, tokenizer.eod
        self._before = [] if bos is None else [bos]
        self._after = [tokenizer.eod] if append_eod else []
        self._parse_special_tokens = parse_special_tokens
        self._most = math.inf if long_in_one_call else long_texts.WHOLE_CHARACTERS
        self._parts = long_texts.parts_encoder(
            tokenizer, parse_special_tokens=parse_special_tokens, most=self._most
        )

    def __call__(
        self, document: Document, advance: Advance = lambda num_bytes: None
    ) -> EncodedDocument:
        """Encode all texts of a document; ``advance`` is called between the parts of long ones."""
        ids, problem, done = {}, document.problem, 0
        num_characters = sum(map(len, document.texts.values()))
        try:
            for key, text in document.texts.items():
                ids[key] = []
                for num_encoded, part in self._encode(text):
                    ids[key].append(self._checked(part))
                    if num_encoded < len(text):
                        # An estimate, by characters: the document may have several texts.
                        now = document.num_bytes * num_encoded // num_characters
                        advance(max(0, now - done))
                        done = max(now, done)
            ids = {
                key: np.concatenate([self._before, *parts, self._after]).astype(self.dtype)
                if any(map(len, parts))
                else np.empty(0, dtype=self.dtype)
                for key, parts in ids.items()
            }
        except ValueError as error:
            ids, problem = {}, str(error)
        return EncodedDocument(
            place=document.place,
            ids=ids,
            num_bytes=document.num_bytes - done,
            problem=problem,
            replaced=document.replaced,
        )

    def _encode(self, text: str) -> long_texts.Parts:
        if len(text) > long_texts.PART_CHARACTERS:
            if not isinstance(self._parts, str):
                yield from self._parts(text)
                return
            long_texts.require_at_most(self._most, len(text), self._parts)
        if text:
            yield len(text), self._tokenizer.tokenize(text)

    def waits_for(self, document: Document) -> bool:
        """Whether the document is so long that encoding it in one call needs a warning.

        Tokenizers take a whole text and report nothing until they return.
        """
        longest = max(map(len, document.texts.values()), default=0)
        in_one_call = isinstance(self._parts, str) and self._most == math.inf
        return in_one_call and longest > long_texts.WHOLE_CHARACTERS

    def _checked(self, part: list[int]) -> np.ndarray:
        ids = np.array(part, dtype=np.int64)  # a narrower dtype would wrap invalid ids
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            raise ValueError(f"token {outside[0]} is outside the vocabulary of {self._vocab_size}")
        if not self._parse_special_tokens and (ids == self._eod).any():
            raise ValueError(
                f"its text gives the end-of-document token {self._eod}, a boundary where no "
                "document ends; --parse-special-tokens accepts it as one"
            )
        return ids.astype(self.dtype)


def encode_in_order(
    documents: Iterable[Document],
    encode: DocumentEncoder,
    *,
    num_workers: int,
    advance: Advance = lambda num_bytes: None,
) -> Iterator[EncodedDocument]:
    """Encode in ``num_workers`` processes, each with one batch at a time: memory is bounded.

    With 0 of them this process encodes.

    Raises:
        ValueError: from reading a document.
        RuntimeError: if a process died.
    """
    if not num_workers:
        yield from map(encode, documents)
        return
    workers = [_Worker(encode) for _ in range(num_workers)]
    busy: deque[_Worker] = deque()
    try:
        # Round robin, so that results come back in order; a long batch holds up the others.
        for worker, batch in zip(cycle(workers), _batches(documents), strict=False):
            # After a whole round the next worker is the one whose answer is the oldest.
            if len(busy) == num_workers:
                yield from busy.popleft().receive(advance)
            for document in filter(encode.waits_for, batch):
                logger.warning(
                    "%s: %d bytes are tokenized in one call, since this tokenizer may give other "
                    "ids for a text in parts; no progress is shown until it returns",
                    *(document.place, document.num_bytes),
                )
            worker.pipe.send(batch)
            busy.append(worker)
        while busy:
            yield from busy.popleft().receive(advance)
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A process that answers each batch of documents with counts of bytes, then with their ids."""

    def __init__(self, encode: DocumentEncoder):
        # A forked process has the tokenizer already: nothing to load or pickle.
        context = multiprocessing.get_context("fork")
        self.pipe, workers_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(workers_end, self.pipe, encode), daemon=True
        )
        self._process.start()
        workers_end.close()  # or recv() would not raise EOFError when the process dies

    def receive(self, advance: Advance) -> list[EncodedDocument]:
        try:
            while isinstance(answer := self.pipe.recv(), int):
                advance(answer)
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"a tokenizer process died (exit code {self._process.exitcode}; -9 is most often "
                "a lack of memory: give fewer --workers)"
            ) from None
        advance(sum(document.num_bytes for document in answer))
        return answer

    def stop(self) -> None:
        self._process.kill()  # not terminate(): the process ignores SIGTERM
        self._process.join()
        self.pipe.close()


def _serve(pipe: Connection, parents_end: Connection, encode: DocumentEncoder) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides what a signal ends
        signal.signal(number, signal.SIG_IGN)
    parents_end.close()  # or this process would outlive a parent that is killed
    while True:
        try:
            batch = pipe.recv()
        except (EOFError, ConnectionError):
            return
        pipe.send([encode(document, pipe.send) for document in batch])


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += 1 + sum(map(len, document.texts.values()))
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
