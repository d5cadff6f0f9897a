"""Saving the checkpoints of a run, and what happens when one cannot be written."""

from megatron_untied.checkpoint import Progress, Start
from megatron_untied.config.run import RunConfig
from megatron_untied.training.initialize import UserError
from megatron_untied.training.reporting import Reporter
from megatron_untied.training.state import TrainState


class CheckpointSaver:
    """Saves the train state of one run and reports each checkpoint; nothing without ``--save``."""

    def __init__(self, config: RunConfig, train_state: TrainState, start: Start, report: Reporter):
        self._config, self._train_state, self._report = config, train_state, report
        self._provenance = start.provenance
        self._saved = start.progress  # what a checkpoint has already

    def save(self, progress: Progress, *, is_last: bool) -> None:
        """Save the state after ``progress``, unless it is saved; collective over all ranks.

        Args:
            progress: of the run.
            is_last: no training follows that a later checkpoint could save.

        Raises:
            UserError: on every rank, if the checkpoint cannot be written and the run is to stop.
        """
        if self._config.checkpoint.save is None or progress == self._saved:
            return
        try:
            self._report.saved(self._train_state.save(self._config, progress, self._provenance))
            self._saved = progress
        except OSError as error:
            failed = (
                f"the checkpoint of iteration {progress.iteration} was not saved: {error}; "
                f"{self._report.summary.resume_advice()}"
            )
            if is_last or self._config.checkpoint.exit_on_failed_save:
                raise UserError(f"error: {failed}") from error
            self._report.say(f"warning: {failed}")
