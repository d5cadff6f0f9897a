"""Signals and the processes that prepare samples: only their own rank ends them.

A launcher, a terminal or Slurm signals every process of a job. A rank that finishes its step first
still needs its workers, so a worker ignores these signals unless its parent sends them.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

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
