"""Reads the micro-batches of one rank from a dataset.

Global batch k of size B holds samples kB .. (k+1)B - 1 for any number of ranks, so a resumed run
continues at the number of samples it has consumed. Within it data-parallel ranks alternate by
micro-batch, or samples are dealt so that ranks have even attention work, if that is known. Tensor-
and context-parallel ranks of one data-parallel rank read the same.
"""

import contextlib
import functools
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_untied.config.problems import in_one_line

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Times in a row that workers are replaced before one of them has read anything."""
LOST_BATCH = (ConnectionError, FileNotFoundError, EOFError)
"""What reading a batch raises that was made, but lies in the memory of a worker that has ended."""
FIELDS = ("tokens", "labels", "loss_mask", "positions", "number")


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchSampler:
    """Sample numbers, one micro-batch of a data-parallel rank at a time, without end or a stop."""

    num_samples: int
    """Samples in the dataset; the first follows the last."""
    consumed_samples: int
    """Samples already trained on, over all ranks."""
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int
    global_batch_size: int = 0
    """Used with ``attention_work``."""
    attention_work: np.ndarray | None = None
    """Of each sample; None for samples of equal work."""
    stop: int | None = None
    """Samples after the last micro-batch, such as where those of another length begin."""
    taken: int = 0
    """Micro-batches from ``consumed_samples`` on that are left out."""

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(self._all(), self.taken, None)

    def _all(self) -> Iterator[list[int]]:
        if self.attention_work is not None:
            yield from self._dealt()
        # From the samples over all ranks, so any other number of ranks continues at the same place.
        first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        while self.stop is None or first < self.stop:
            yield [(first + i) % self.num_samples for i in range(self.micro_batch_size)]
            first += self.micro_batch_size * self.data_parallel_size

    def _dealt(self) -> Iterator[list[int]]:
        """Deal each global batch by falling work, back and forth over the ranks.

        So ranks have neighbors in this order at one time, and even sums over all micro-batches.
        """
        first, b = self.consumed_samples, self.micro_batch_size
        while True:
            batch = np.arange(first, first + self.global_batch_size) % self.num_samples
            by_work = batch[np.argsort(-self.attention_work[batch], kind="stable")]
            rounds = by_work.reshape(-1, self.data_parallel_size)
            rounds[1::2] = rounds[1::2, ::-1]
            yield from rounds[:, self.data_parallel_rank].reshape(-1, b).tolist()
            first += self.global_batch_size


def micro_batches(
    dataset: Dataset,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int,
    global_batch_size: int = 0,
    stop: int | None = None,
) -> Iterator[dict[str, Tensor]]:
    """This rank's micro-batches, dicts of host tensors [b, s]; without end, or up to ``stop``.

    ``number`` is that of each sample in the dataset, int64 [b].

    A global batch is B / (b * data_parallel_size) of them; B is needed for a dataset that has
    ``attention_work``. The order depends neither on
    ``num_workers`` nor on interruptions of the run. A worker that is killed, such as by the kernel
    for memory, is replaced with a warning, and no sample is missed or repeated.

    Raises:
        ValueError: from reading a sample, in this process or in a worker.
        OSError: as ValueError; or workers end again and again.
    """
    sampler = MicroBatchSampler(
        num_samples=len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        global_batch_size=global_batch_size,
        attention_work=getattr(dataset, "attention_work", None),
        stop=stop,
    )
    start = functools.partial(_start_workers, dataset, num_workers)
    return _read(sampler, start, start(sampler))


def _start_workers(
    dataset: Dataset, num_workers: int, sampler: MicroBatchSampler
) -> Iterator[dict[str, Tensor] | Exception]:
    loader = DataLoader(
        _Samples(dataset),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_stack,
        worker_init_fn=end_with_parent,
        # By default the loader draws a seed from the run's generator, and so changes its state.
        generator=torch.Generator(),
    )
    handler = signal.getsignal(signal.SIGCHLD)
    with blocked_signals():  # iter() forks the workers
        batches = iter(loader)
    # The loader's own handler raises at whatever the training thread is doing when a worker ends,
    # perhaps a collective that others then wait in. It is noticed when the next batch is read.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)
    return batches


def _read(
    sampler: MicroBatchSampler,
    start: Callable[[MicroBatchSampler], Iterator[dict[str, Tensor] | Exception]],
    batches: Iterator[dict[str, Tensor] | Exception],
) -> Iterator[dict[str, Tensor]]:
    """The micro-batches of ``batches``, and of what ``start`` makes when its workers end."""
    taken = failures = 0
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (RuntimeError, *LOST_BATCH) as error:
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            failures += 1
            reason = in_one_line(error) or type(error).__name__
            ended = f"a data worker of --num-workers ended ({reason}), most often for "
            if failures > MAX_FAILURES:
                lack = "a lack of host memory; give fewer --num-workers"
                raise ChildProcessError(f"{ended}{lack}") from None
            logger.warning("%sa lack of host memory; others go on in its place", ended)
            # The others are replaced too: what they had read ahead is read again.
            batches = start(replace(sampler, taken=taken))
            continue
        if isinstance(batch, Exception):
            raise batch
        taken, failures = taken + 1, 0
        yield batch


@dataclass(frozen=True)
class _Samples(Dataset):
    """Returns errors as values: DataLoader would wrap a worker's in the text of a traceback."""

    dataset: Dataset

    def __getitem__(self, index: int) -> dict[str, Tensor] | Exception:
        try:
            return self.dataset[index] | {"number": torch.tensor(index)}
        except (ValueError, OSError) as error:
            return error


def _stack(samples: list[dict[str, Tensor] | Exception]) -> dict[str, Tensor] | Exception:
    errors = [sample for sample in samples if isinstance(sample, Exception)]
    if errors:
        return errors[0]
    # b times [s] -> [b, s], and [] -> [b]. A copy, in a worker into the shared memory that the
    # parent reads.
    return {name: torch.stack([sample[name] for sample in samples]) for name in FIELDS}


BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Block the signals in this thread, and in processes forked meanwhile from their start.

    Otherwise a signal could kill a worker between its fork and :func:`end_with_parent`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(worker: int) -> None:
    """A ``worker_init_fn``: afterwards only the parent can end this process by such a signal.

    A launcher may signal all processes of a group at once, while the parent still needs its workers
    to finish a step. The signals stay blocked; a thread receives them with their sender, which a
    handler does not get. PyTorch's own worker loop ends within seconds of the parent's death.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    signal.set_wakeup_fd(-1)  # the parent's, inherited: it would report this process's signals
    threading.Thread(
        target=_wait_for_parent, args=(os.getppid(),), name="signals", daemon=True
    ).start()


def _wait_for_parent(parent: int) -> None:
    while signal.sigwaitinfo(BLOCKED).si_pid != parent:
        pass
    os._exit(0)  # sys.exit would end only this thread
