"""What ends a run before its last iteration; all ranks decide the same."""

import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from megatron_untied.platform import device
from megatron_untied.training.config import LoopConfig


class EarlyExit:
    """Watches the clock and SIGTERM while it is entered."""

    def __init__(self, loop: LoopConfig):
        self._loop = loop
        self._began = time.monotonic()
        self._terminated = False

    def __enter__(self) -> "EarlyExit":
        if self._loop.exit_signal_handler:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._loop.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._previous)

    def reason(self, iteration: int) -> str | None:
        """Why to end after ``iteration``, or None to go on; collective over all ranks."""
        if self._anywhere(self._loop.exit_signal_handler, self._terminated):
            return "SIGTERM"
        limit = self._loop.exit_duration_in_mins
        minutes = (time.monotonic() - self._began) / 60
        if self._anywhere(limit is not None, limit is not None and minutes > limit):
            return f"--exit-duration-in-mins {limit:g}"
        interval = self._loop.exit_interval
        if interval is not None and iteration % interval == 0:
            return f"--exit-interval {interval}"
        return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True

    @staticmethod
    def _anywhere(watched: bool, here: bool) -> bool:
        """Whether ``here`` on any rank; clocks differ and signals may reach one rank only."""
        if not watched:
            return False
        ranks = torch.tensor(int(here), device=device.current_device())
        dist.all_reduce(ranks)
        return bool(ranks)
