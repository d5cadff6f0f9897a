"""Pretraining on one page: set up, then a straight loop of step, report, evaluate, save."""

import itertools
import time
from collections.abc import Callable

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from megatron_untied.checkpoint import Progress, load_checkpoint, save_checkpoint
from megatron_untied.data.datasets import Datasets
from megatron_untied.platform import device
from megatron_untied.training.batch import GetBatch, global_batches
from megatron_untied.training.config import RunConfig
from megatron_untied.training.evaluate import evaluate
from megatron_untied.training.exits import EarlyExit
from megatron_untied.training.initialize import Launch, errors_in_one_line, initialize
from megatron_untied.training.learner import build_learner
from megatron_untied.training.reporter import Reporter
from megatron_untied.training.step import ForwardStep, require_finite, train_step

ModelProvider = Callable[[RunConfig, ProcessGroupCollection], MegatronModule]
DatasetsProvider = Callable[[RunConfig], Datasets]


def pretrain(
    config: RunConfig,
    launch: Launch,
    *,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    get_batch: GetBatch,
    forward_step: ForwardStep,
) -> None:
    """Train the model that ``model_provider`` builds on what ``datasets_provider`` opens.

    Every rank that the launcher started calls this with the same ``config``.

    Args:
        config: the whole run, from ``parse_arguments``.
        launch: this rank's place among the others, from ``read_launch``.
        model_provider: builds the bare model of this rank; its weights are drawn here.
        datasets_provider: opens ``config.num_samples`` samples.
        get_batch: cuts this rank's shard from a micro-batch.
        forward_step: this rank's part of the loss of a shard.
    """
    loop, evaluation, checkpoint = config.loop, config.evaluation, config.checkpoint
    with errors_in_one_line():
        groups = initialize(config, launch)
        datasets = datasets_provider(config)
        learner = build_learner(model_provider(config, groups), config, groups)
        progress = load_checkpoint(checkpoint, learner.state, seed=config.seed)

    def global_batches_of(dataset, consumed_samples=0):
        return global_batches(dataset, config, groups, get_batch, consumed_samples)

    def validation_loss():
        batches = itertools.islice(global_batches_of(datasets.valid), evaluation.eval_iters)
        return evaluate(learner, batches, forward_step=forward_step)

    with Reporter(config, launch, start=progress) as report, EarlyExit(loop) as early_exit:
        report.say(f"{learner.describe()} | starting after iteration {progress.iteration}")
        if loop.skip_train:
            report.evaluation(progress.iteration, validation_loss())
            return
        batches = global_batches_of(datasets.train, progress.consumed_samples)
        num_samples = config.batch.global_batch_size
        for iteration in range(progress.iteration + 1, loop.train_iters + 1):
            began = time.perf_counter()
            result = train_step(
                learner, next(batches), num_samples=num_samples, forward_step=forward_step
            )
            device.synchronize()
            seconds = time.perf_counter() - began
            if loop.check_for_nan:
                require_finite(result, iteration)
            progress = Progress(
                iteration=iteration, consumed_samples=progress.consumed_samples + num_samples
            )
            report.step(result, progress, seconds=seconds)

            is_last = iteration == loop.train_iters
            if evaluation.eval_iters and (is_last or _is_due(iteration, evaluation.eval_interval)):
                report.evaluation(iteration, validation_loss())

            exit_reason = early_exit.reason(iteration)
            is_end = is_last or exit_reason is not None
            if checkpoint.save and (is_end or _is_due(iteration, checkpoint.save_interval)):
                folder = save_checkpoint(
                    checkpoint.save,
                    learner.state,
                    progress,
                    run_config=config,
                    save_retain_interval=checkpoint.save_retain_interval,
                )
                report.say(f"saved {folder}")
            if exit_reason is not None:
                report.say(f"exiting after iteration {iteration}: {exit_reason}")
                return


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0
