"""Saving the checkpoints of a run, and what happens when one cannot be written."""

from dataclasses import dataclass

from megatron_untied.checkpoint import Progress, Provenance
from megatron_untied.config.run import RunConfig
from megatron_untied.training.initialize import UserError
from megatron_untied.training.reporting import Reporter
from megatron_untied.training.state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaver:
    """Saves the train state of one run and reports each checkpoint."""

    config: RunConfig
    train_state: TrainState
    provenance: Provenance
    report: Reporter

    def save(self, progress: Progress, *, is_last: bool) -> None:
        """Save the state after ``progress``; collective over all ranks.

        Args:
            progress: of the run.
            is_last: no training follows that a later checkpoint could save.

        Raises:
            UserError: on every rank, if the checkpoint cannot be written and the run is to stop.
        """
        try:
            self.report.saved(self.train_state.save(self.config, progress, self.provenance))
        except OSError as error:
            failed = (
                f"the checkpoint of iteration {progress.iteration} was not saved: {error}; "
                f"{self.report.summary.resume_advice()}"
            )
            if is_last or self.config.checkpoint.exit_on_failed_save:
                raise UserError(f"error: {failed}") from error
            self.report.say(f"warning: {failed}")
