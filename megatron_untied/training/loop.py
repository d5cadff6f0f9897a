"""Pretraining on one page: a loop of step, report, evaluate and save.

``setup.py`` prepares everything that the loop uses, ``step.py`` has a step and an evaluation, and
``reporting.py`` prints lines and writes metrics.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron_untied.checkpoint import Progress, describe_loading
from megatron_untied.config.run import RunConfig
from megatron_untied.flops import attention_units
from megatron_untied.planner.automatic import describe
from megatron_untied.planner.disk import Disk
from megatron_untied.planner.kernels import describe_kernel, is_planned
from megatron_untied.planner.machine import this_gpu, this_machine
from megatron_untied.planner.plan import Plan
from megatron_untied.planner.search import describe_stage
from megatron_untied.platform import device
from megatron_untied.sharding.interface import ModelProvider
from megatron_untied.streaming.copy_engine import Wait
from megatron_untied.training.exits import EarlyExit, StepDropped
from megatron_untied.training.guards import StepGuard
from megatron_untied.training.initialize import Launch, errors_in_one_line
from megatron_untied.training.memory_report import memory_against_plan
from megatron_untied.training.profiling import StepProfiler
from megatron_untied.training.saving import CheckpointSaver
from megatron_untied.training.setup import DatasetsProvider, Run, enter_stage, set_up
from megatron_untied.training.step import (
    Batch,
    ForwardStep,
    GetBatch,
    StepResult,
    evaluate,
    global_batches,
    require_disk,
    train_step,
)


def pretrain(
    config: RunConfig,
    launch: Launch,
    *,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    get_batch: GetBatch,
    forward_step: ForwardStep,
) -> None:
    """Train the model of ``model_provider`` on the samples of ``datasets_provider``.

    Every rank that the launcher started calls this with the same ``config``.

    Args:
        config: the whole run, from ``parse_arguments``.
        launch: this rank, from ``read_launch``.
        model_provider: builds the bare model of this rank, which records its phases in the progress
            object that it is given. Its weights are initialized here.
        datasets_provider: opens ``config.num_samples(...)`` samples, given config and start.
        get_batch: cuts this rank's shard from a micro-batch.
        forward_step: computes this rank's part of the loss of a shard.
    """
    run = set_up(config, launch, model_provider=model_provider, datasets_provider=datasets_provider)
    report = run.report
    early_exit = EarlyExit(config.loop, run.signals)
    saver = CheckpointSaver(run.config, run.train_state, run.start, report)
    profiler = StepProfiler(config, launch.rank, run.train_state.progress, say=report.say)
    with report, run.signals, run.heartbeat, profiler, saver:
        progress = load_and_describe(run)
        if config.loop.skip_train:
            evaluate_run(run, get_batch, forward_step, progress.iteration)
            return report.end()
        if progress.iteration >= config.loop.train_iters:
            return report.nothing_to_train()
        describe_sample = getattr(run.datasets.train, "describe_sample", "sample {}".format)
        guard = StepGuard(run.train_state.model, config.loop, describe_sample)
        exit_reason = early_exit.signal()  # one may have arrived while loading
        first, train_batches = progress.iteration + 1, None
        for iteration in range(first, config.loop.train_iters + 1):
            if exit_reason:
                break
            if (stage := config.stage_of(iteration)) != run.stage:
                run, train_batches, first = enter_stage(run, stage), None, iteration
                saver.enter_stage(run.config, run.train_state)
            if train_batches is None:  # the workers of the stage before have ended with it
                train_batches = batches_of_stage(run, progress, get_batch)
            layers = run.config.model.num_layers
            step_units = run.layer_passes * attention_units(run.config.memory, layers)
            run.train_state.progress.begin(f"iteration {iteration}", step_units)
            try:
                with profiler.step(iteration):
                    step = timed_step(run, train_batches, forward_step, guard, iteration)
            except StepDropped:  # on all ranks, before the optimizer has changed anything
                exit_reason = early_exit.signal()
                saver.save(progress, is_last=True)
                break
            consumed_samples = progress.consumed_samples + run.config.batch.global_batch_size
            progress = replace(progress, iteration=iteration, consumed_samples=consumed_samples)
            if iteration <= first + 1:  # the first step makes Adam's moments, the second has them
                compare_memory(run, iteration)
            report.step(step.result, progress, seconds=step.seconds, waits=step.waits)
            device.reset_peak_device_bytes()  # the next step's peak, with an evaluation before it
            saver.poll()
            if config.evaluates_after(iteration):
                evaluate_run(run, get_batch, forward_step, iteration)
            exit_reason = early_exit.reason(iteration)  # one all-reduce of a number
            if config.checkpoint.save and (exit_reason or config.saves_after(iteration)):
                is_last = bool(exit_reason) or iteration == config.loop.train_iters
                saver.save(progress, is_last=is_last)
                # A signal during a save of minutes ends the run before the next step.
                exit_reason = exit_reason or early_exit.signal()
        saver.finish(is_last=True)
        report.end(exit_reason)


def batches_of_stage(run: Run, progress: Progress, get_batch: GetBatch) -> Iterator[list[Batch]]:
    """The global batches after ``progress``, up to the end of the stage that ``run`` is in."""
    config, stop, following = run.config, None, run.stage + 1
    if following < len(config.stages):
        left = config.stages[following].first_iteration - progress.iteration
        stop = progress.consumed_samples + left * config.batch.global_batch_size
    return global_batches(
        run.datasets.train,
        config=config,
        groups=run.groups,
        get_batch=get_batch,
        consumed_samples=progress.consumed_samples,
        stop=stop,
    )


class TimedStep(NamedTuple):
    """A step, and its times on this rank."""

    result: StepResult
    seconds: float
    """With reading the data."""
    waits: dict[Wait, float]
    """Seconds in which compute waited for the host and for disks."""


def timed_step(
    run: Run,
    batches: Iterator[list[Batch]],
    forward_step: ForwardStep,
    guard: StepGuard,
    iteration: int,
) -> TimedStep:
    """One training step; collective over all ranks."""
    began, waits = time.perf_counter(), run.train_state.waits
    if waits is not None:
        waits.take()  # those of an evaluation before
    try:
        result = train_step(
            run.train_state,
            next(batches),
            num_samples=run.config.schedule_samples,
            forward_step=forward_step,
            guard=guard,
            iteration=iteration,
        )
    except StepDropped:
        # All ranks are here. If a disk is the reason, the run ends: nothing more goes to it.
        require_disk(run.train_state)
        raise
    # For the time of the step, and its waits; the loss was read anyway.
    device.synchronize()
    seconds = time.perf_counter() - began
    return TimedStep(result, seconds, waits.take() if waits is not None else {})


def load_and_describe(run: Run) -> Progress:
    """Load the checkpoint to start from, open the metrics sinks, and print what was set up.

    Collective over all ranks.
    """
    config, report = run.config, run.report
    with errors_in_one_line():
        progress = run.train_state.load(config, run.start)
        report.open_sinks()
    if run.start.folder is not None:
        report.say(describe_loading(config.checkpoint, run.start))
    for number, plan in enumerate(run.plans):
        report.say(describe_stage(plan, number) if config.stages else describe(plan))
    report.say(describe_kernel(run.kernel, this_gpu() if device.gpu_properties() else None))
    if run.train_state.disk is not None:
        report.say(run.train_state.disk.describe())
    if run.datasets.description is not None:
        report.say(run.datasets.description)
    report.say(f"{run.train_state.describe()} | {progress.iteration} iterations done")
    # A recipe can write about 1 TB of checkpoints: warn before the first step, not after days.
    shortfall = Disk.of(config, run.launch.world_size, progress.iteration).shortfall()
    if shortfall is not None:
        report.say(shortfall)
    return progress


def compare_memory(run: Run, iteration: int) -> None:
    """Report the device memory of the last step beside the plan's; collective over all ranks."""
    measured = device.device_memory()
    # The same on every rank: no GPU, or a kernel that the planner does not model.
    if measured is None or not is_planned(run.kernel):
        return
    plan = run.plans[run.stage] if run.plans else Plan(run.config, this_machine(run.groups))
    for line in memory_against_plan(plan.peak.num_bytes, measured):
        run.report.say(f"after iteration {iteration}: {line}")


def evaluate_run(
    run: Run,
    get_batch: GetBatch,
    forward_step: ForwardStep,
    iteration: int,
) -> None:
    """Evaluate on the first validation samples and report the loss; collective over all ranks.

    Every evaluation reads the same samples, so that its losses can be compared; with several
    sequence lengths those of the stage's length.
    """
    eval_iters = run.config.evaluation.eval_iters
    name = f"evaluation after iteration {iteration}"
    # Forward only, so one unit per pass of a layer; a training step has several.
    run.train_state.progress.begin(name, run.layer_passes * eval_iters)
    endless = global_batches(run.datasets.valid, run.config, run.groups, get_batch, 0)
    batches = itertools.islice(endless, eval_iters)
    try:
        loss = evaluate(run.train_state, batches, forward_step=forward_step)
    except StepDropped:  # the signal ends the run next
        return
    run.report.evaluation(iteration, loss)
