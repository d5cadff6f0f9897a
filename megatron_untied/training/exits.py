"""What ends a run before its last iteration; all ranks decide the same."""

import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_untied.platform import device
from megatron_untied.step_progress import Place
from megatron_untied.training.config import LoopConfig, RunConfig
from megatron_untied.training.heartbeat import Heartbeat
from megatron_untied.training.initialize import Launch
from megatron_untied.training.reporter import Reporter
from megatron_untied.training.signals import SignalWatch


class EarlyExit:
    """Looks at the clock and at postponed signals."""

    def __init__(self, loop: LoopConfig, signals: SignalWatch):
        self._loop, self._signals = loop, signals
        self._began = time.monotonic()

    def signal(self) -> str | None:
        """The signal that any rank has postponed, or None; collective over all ranks."""
        if not self._loop.exit_signal_handler:
            return None
        number = _most(self._signals.postponed)
        return signal.Signals(number).name if number else None

    def reason(self, iteration: int) -> str | None:
        """Why to end after ``iteration``, or None to go on; collective over all ranks."""
        if name := self.signal():
            return name
        limit, interval = self._loop.exit_duration_in_mins, self._loop.exit_interval
        minutes = (time.monotonic() - self._began) / 60
        if limit is not None and _most(minutes > limit):  # clocks differ
            return f"--exit-duration-in-mins {limit:g}"
        if interval is not None and iteration % interval == 0:
            return f"--exit-interval {interval}"
        return None


def _most(number: int) -> int:
    """The greatest ``number`` of all ranks; collective."""
    most = torch.tensor(int(number), device=device.current_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def watch_training(
    config: RunConfig, store: dist.Store, launch: Launch, report: Reporter, heartbeat: Heartbeat
) -> SignalWatch:
    """The watch over a training loop; with ``--exit-signal-handler`` signals wait for its step."""

    def announce(signaled: str) -> None:
        place, time_left = heartbeat.time_left()
        report.say(f"{signaled}: {what_follows(place, config.checkpoint.save, time_left)}")

    return SignalWatch(
        store,
        launch.rank,
        advice=report.summary.resume_advice,
        announce=announce if config.loop.exit_signal_handler else None,
    )


def what_follows(place: Place, save: str | None, time_left: timedelta | None) -> str:
    """What a postponed signal leads to and when, for a run that is at ``place``.

    Args:
        place: where this rank is.
        save: the folder of checkpoints, if there is one.
        time_left: of the step, if it can be told.
    """
    if place.step == Place().step:
        return "exiting before the first iteration"
    then = "then exiting"
    if not place.step.startswith("checkpoint"):
        then = f"then saving to {save} and exiting" if save else "then exiting without --save"
    left = f"; about {time_left} left in it" if time_left is not None else ""
    return f"finishing {place.step}, {then}{left}"
