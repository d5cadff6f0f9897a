"""An executor whose requests run only when one of them is waited for, in an adversarial order."""

import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from typing_extensions import override


class LateThreads(Executor):
    """Stands for the threads of a disk; everything runs in the thread that waits.

    Whoever waits for a request gets it at once or after others of random choice, so a request that
    nobody waits for may come at any time, or never.
    """

    def __init__(self, seed: int = 0):
        self._pending: dict[Future, Callable[[], Any]] = {}
        self._random = random.Random(seed)

    @override
    def submit(self, work: Callable, /, *args: Any) -> Future:
        future = _LateFuture(self)

        def run() -> None:
            try:
                future.set_result(work(*args))
            except Exception as error:
                future.set_exception(error)

        self._pending[future] = run
        return future

    def run_until(self, future: Future) -> None:
        while future in self._pending:
            others = list(self._pending)
            chosen = self._random.choice([future, self._random.choice(others)])
            self._pending.pop(chosen)()


class _LateFuture(Future):
    def __init__(self, threads: LateThreads):
        super().__init__()
        self._threads = threads

    @override
    def result(self, timeout: float | None = None) -> Any:
        self._threads.run_until(self)
        return super().result(timeout)
