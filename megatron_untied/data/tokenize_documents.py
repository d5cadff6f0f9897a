"""Turns documents into token ids on several processes, in the order of the documents."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection

import numpy as np
from megatron.core.datasets.indexed_dataset import DType
from megatron.core.tokenizers import MegatronTokenizerBase

from megatron_untied.data.documents import Document

_BATCH_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedDocument:
    """The token ids of a document by JSON key; empty where there is no text."""

    ids: dict[str, np.ndarray]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Text to token ids, checked and in the dtype they are stored in."""

    tokenizer: MegatronTokenizerBase
    append_eod: bool

    @property
    def dtype(self) -> type[np.integer]:
        """The smallest dtype that Megatron stores this vocabulary in."""
        return DType.optimal_dtype(self.tokenizer.vocab_size)

    def __call__(self, document: Document) -> EncodedDocument:
        """Raises ValueError, with the place of the document, if a text cannot be encoded."""
        try:
            ids = {key: self._encode(text) for key, text in document.texts.items()}
        except ValueError as error:
            raise ValueError(f"{document.where}: {error}") from error
        return EncodedDocument(ids=ids, num_bytes=document.num_bytes)

    def _encode(self, text: str) -> np.ndarray:
        text.encode("utf-8")  # raises what is wrong with lone surrogates; tokenizers do not say
        ids = self.tokenizer.tokenize(text) if text else []
        if ids and not 0 <= min(ids) <= max(ids) < self.tokenizer.vocab_size:
            raise ValueError(
                f"token {max(ids) if min(ids) >= 0 else min(ids)} is outside the vocabulary of "
                f"{self.tokenizer.vocab_size}"
            )
        if ids and self.append_eod:
            ids = [*ids, self.tokenizer.eod]
        return np.array(ids, dtype=self.dtype)


def encode_in_order(
    documents: Iterable[Document], encode: Encoder, *, num_workers: int
) -> Iterator[EncodedDocument]:
    """Encode on ``num_workers`` processes; each holds one batch, so memory stays bounded.

    Raises:
        ValueError: what reading or encoding a document raised.
        RuntimeError: if a process died.
    """
    workers = [_Worker(encode) for _ in range(num_workers)]
    busy: deque[_Worker] = deque()
    try:
        for worker, batch in zip(cycle(workers), _batches(documents), strict=False):
            if len(busy) == num_workers:
                yield from busy.popleft().receive()
            worker.send(batch)
            busy.append(worker)
        while busy:
            yield from busy.popleft().receive()
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A process that answers every batch of documents with its ids or its ValueError."""

    def __init__(self, encode: Encoder):
        # A fork has the tokenizer already: nothing to load, nothing to pickle.
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._pipe, encode), daemon=True
        )
        self._process.start()
        theirs.close()

    def send(self, batch: list[Document]) -> None:
        self._pipe.send(batch)

    def receive(self) -> list[EncodedDocument]:
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"a tokenizer process died (exit code {self._process.exitcode}; -9 is most often "
                "a lack of memory: give fewer --workers)"
            ) from None
        if isinstance(answer, ValueError):
            raise answer
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, parents_end: Connection, encode: Encoder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt ends
    parents_end.close()  # or this process would outlive a parent that is killed
    while True:
        try:
            batch = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = [encode(document) for document in batch]
        except ValueError as error:
            answer = ValueError(str(error))
        pipe.send(answer)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, num_bytes = [], 0
    for document in documents:
        batch.append(document)
        num_bytes += document.num_bytes
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
