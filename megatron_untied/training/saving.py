"""Saving the checkpoints of a run, and what happens when one cannot be written."""

import contextlib
from collections.abc import Iterator

from megatron_untied.checkpoint import BackgroundSave, Progress, Start
from megatron_untied.checkpoint.replicas import require_equal_replicas
from megatron_untied.config.run import RunConfig
from megatron_untied.training.initialize import UserError, errors_in_one_line
from megatron_untied.training.reporting import Reporter
from megatron_untied.training.state import TrainState


class CheckpointSaver:
    """Saves the train state of one run and reports each checkpoint; nothing without ``--save``.

    With ``--async-save`` a checkpoint is written while training goes on, one at a time: the next
    waits for the one before, so there is never more than one copy of the state on the host. Leaving
    the context with a :class:`UserError`, which all ranks raise, finishes it too.
    """

    def __init__(self, config: RunConfig, train_state: TrainState, start: Start, report: Reporter):
        self._config, self._train_state, self._report = config, train_state, report
        self._provenance = start.provenance
        self._saved: Progress | None = start.progress  # what a checkpoint has already
        self._pending: BackgroundSave | None = None

    def enter_stage(self, config: RunConfig, train_state: TrainState) -> None:
        """Save with the settings of another stage from now on."""
        self._config, self._train_state = config, train_state

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UserError):
            self.finish()

    def save(self, progress: Progress, *, is_last: bool) -> None:
        """Save the state after ``progress``, unless it is saved; collective over all ranks.

        Args:
            progress: of the run.
            is_last: no training follows that a later checkpoint could save.

        Raises:
            UserError: on every rank, if the checkpoint cannot be written and the run is to stop, or
                if ranks differ in what should be equal.
        """
        if self._config.checkpoint.save is None:
            return
        if progress != self._saved:
            self.finish()
            with errors_in_one_line():
                require_equal_replicas(self._train_state.checkpoint_state)
            with self._failures_reported(progress, is_last):
                begun = self._train_state.save(self._config, progress, self._provenance)
                self._saved = progress
                if isinstance(begun, BackgroundSave):
                    self._pending = begun
                else:
                    self._report.saved(begun)
        if is_last:
            self.finish(is_last=True)

    def poll(self) -> None:
        """Finish the save in the background if its files are written; collective over all ranks.

        One all-reduce while there is such a save. Raises as :meth:`save`.
        """
        if self._pending is not None and self._pending.has_ended():
            self.finish()

    def finish(self, *, is_last: bool = False) -> None:
        """Wait for the save in the background, if there is one; collective over all ranks.

        Raises as :meth:`save`.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with self._failures_reported(pending.progress, is_last):
            self._report.saved(pending.finish())

    @contextlib.contextmanager
    def _failures_reported(self, progress: Progress, is_last: bool) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._saved = None
            failed = (
                f"the checkpoint of iteration {progress.iteration} was not saved: {error}; "
                f"{self._report.summary.resume_advice()}"
            )
            if is_last or self._config.checkpoint.exit_on_failed_save:
                raise UserError(f"error: {failed}") from error
            self._report.say(f"warning: {failed}")
