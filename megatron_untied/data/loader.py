"""The order in which samples are trained on, and the micro-batches one rank reads of them.

Global batch k of size B holds samples kB .. (k+1)B - 1 whatever the number of ranks: a resumed run
continues at the number of samples it has consumed. Data-parallel ranks take turns within it, a
micro-batch each. Ranks that share a data-parallel rank (tensor and context parallel) read the same.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

FIELDS = ("tokens", "labels", "loss_mask", "positions")


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchSampler:
    """Sample numbers of one data-parallel rank's micro-batches, for ever."""

    num_samples: int
    """Samples in the dataset; after the last comes the first."""
    consumed_samples: int
    """Samples of all ranks already trained on."""
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        while True:
            yield [(first + i) % self.num_samples for i in range(self.micro_batch_size)]
            first += self.micro_batch_size * self.data_parallel_size


def micro_batches(
    dataset: Dataset,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int,
) -> Iterator[dict[str, Tensor]]:
    """An endless iterator over this rank's micro-batches, dicts of host tensors [b, s].

    A global batch is B / (b * data_parallel_size) of them. What comes does not depend on
    ``num_workers`` nor on whether the run was interrupted.

    Raises:
        ValueError: what reading a sample raises, also where a worker reads it.
        OSError: the same.
    """
    sampler = MicroBatchSampler(
        num_samples=len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
    )
    loader = DataLoader(
        _Samples(dataset),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_stack,
        worker_init_fn=end_with_parent,
        # Otherwise the loader draws its seed from the run's own random numbers.
        generator=torch.Generator(),
    )
    with blocked_signals():  # workers are forked here
        return map(_require_batch, iter(loader))


class _Samples(Dataset):
    """A dataset whose errors are values: what a worker raises comes as a worker's traceback."""

    def __init__(self, dataset: Dataset):
        self._dataset = dataset

    def __getitem__(self, index: int) -> dict[str, Tensor] | Exception:
        try:
            return self._dataset[index]
        except (ValueError, OSError) as error:
            return error


def _stack(samples: list[dict[str, Tensor] | Exception]) -> dict[str, Tensor] | Exception:
    errors = [sample for sample in samples if isinstance(sample, Exception)]
    if errors:
        return errors[0]
    return {name: torch.stack([sample[name] for sample in samples]) for name in FIELDS}


def _require_batch(batch: dict[str, Tensor] | Exception) -> dict[str, Tensor]:
    if isinstance(batch, Exception):
        raise batch
    return batch


BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Block the signals in this thread, and in processes forked meanwhile from their first moment.

    Without it a worker could be killed between its fork and :func:`end_with_parent`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(worker: int) -> None:
    """A ``worker_init_fn``: from now on the parent alone can end this process by such a signal.

    The signals stay blocked; a thread takes them and looks at their sender, which a handler cannot.
    That a parent has died without a signal is noticed by PyTorch's own worker loop within seconds.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    signal.set_wakeup_fd(-1)  # the parent's, inherited: it would report this process's signals
    threading.Thread(target=_obey, args=(os.getppid(),), name="signals", daemon=True).start()


def _obey(parent: int) -> None:
    while signal.sigwaitinfo(BLOCKED).si_pid != parent:
        pass
    os._exit(0)
