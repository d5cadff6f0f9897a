"""Pretraining on one page: set up, then a straight loop of step, report, evaluate, save."""

import itertools
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron_untied.checkpoint import (
    Progress,
    Provenance,
    Start,
    bytes_to_read,
    describe_loading,
    find_start,
    load_checkpoint,
    save_checkpoint,
)
from megatron_untied.checkpoint.collective_errors import Gather, same_on_all_ranks
from megatron_untied.config.run import RunConfig
from megatron_untied.data.datasets import Datasets
from megatron_untied.data.sample_order import describe_samples
from megatron_untied.flops import attention_units
from megatron_untied.phases import Phase
from megatron_untied.planner.disk import Disk
from megatron_untied.planner.machine import this_machine
from megatron_untied.planner.search import choose, describe, is_automatic
from megatron_untied.platform import device
from megatron_untied.sharding.interface import ModelProvider
from megatron_untied.step_progress import StepProgress
from megatron_untied.training.exits import EarlyExit, SignalWatch, watch_training
from megatron_untied.training.initialize import Launch, errors_in_one_line, initialize
from megatron_untied.training.liveness import Heartbeat, Whereabouts, heartbeat_of_setup
from megatron_untied.training.rendezvous import (
    gather_in,
    open_store,
    require_on_first_rank,
    require_same_config,
)
from megatron_untied.training.reporting import Reporter, require_places
from megatron_untied.training.state import TrainState, build_train_state
from megatron_untied.training.step import (
    ForwardStep,
    GetBatch,
    evaluate,
    global_batches,
    require_finite,
    train_step,
)

DatasetsProvider = Callable[[RunConfig, Progress], Datasets]


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
        model_provider: builds the bare model of this rank, which states its phases to the progress
            object that it is given; its weights are drawn here.
        datasets_provider: opens ``config.num_samples(...)`` samples, given config and start.
        get_batch: cuts this rank's shard from a micro-batch.
        forward_step: this rank's part of the loss of a shard.
    """
    with errors_in_one_line():
        store = open_store(launch)
        require_same_config(config, launch, store)
        require_on_first_rank(lambda: require_places(config), launch, store)
        start = find_agreed_start(config, gather_in(store, launch))
    setting_up = SignalWatch(store.clone(), launch.rank, advice=lambda: "nothing was trained")
    with errors_in_one_line(), setting_up:
        groups = initialize(config, launch, store)
        planned = None
        if is_automatic(config):
            planned = choose(config, this_machine(groups))
            config = planned.config
        with heartbeat_of_setup(Phase.DATASETS, config, launch, store):
            datasets = datasets_provider(config, start.progress)
        step_progress = StepProgress(device.record_event)
        train_state = build_train_state(model_provider, config, groups, step_progress)
        report = Reporter(config, launch, start=start.progress)

    def global_batches_of(dataset, consumed_samples=0):
        return global_batches(dataset, config, groups, get_batch, consumed_samples)

    def validation_loss(iteration):
        batches = global_batches_of(datasets.valid)
        some = itertools.islice(batches, config.evaluation.eval_iters)
        units = layer_passes * config.evaluation.eval_iters
        step_progress.begin(f"evaluation after iteration {iteration}", units)
        return evaluate(train_state, some, forward_step=forward_step)

    layer_passes = config.model.num_layers * config.batch.num_micro_batches(groups.dp.size())
    step_units = layer_passes * attention_units(config.memory)
    heartbeat = Heartbeat(
        step_progress,
        Whereabouts(store.clone(), launch.rank, launch.world_size),
        say=report.say,
        every_seconds=config.logging.heartbeat_seconds,
        timeout_seconds=config.distributed.timeout_minutes * 60,
    )
    signals = watch_training(config, store.clone(), launch, report, heartbeat)
    early_exit = EarlyExit(config.loop, signals)
    with report, signals, heartbeat:
        with errors_in_one_line():
            progress = load(config, train_state, start)
            report.open_sinks()
        if start.folder is not None:
            report.say(describe_loading(config.checkpoint, start))
        done = f"{progress.iteration} iterations done"
        if planned is not None:
            report.say(describe(planned))
        report.say(f"{train_state.describe()} | {done}")
        if (
            shortfall := Disk.of(config, launch.world_size, progress.iteration).shortfall()
        ) is not None:
            report.say(shortfall)
        if config.loop.skip_train:
            report.evaluation(progress.iteration, validation_loss(progress.iteration))
            report.end()
            return
        if progress.iteration >= config.loop.train_iters:
            report.say(
                f"nothing to train: the checkpoint is of iteration {progress.iteration} and "
                f"--train-iters is {config.loop.train_iters}; a larger one goes on"
            )
            report.end()
            return
        train_batches = global_batches_of(datasets.train, progress.consumed_samples)
        num_samples = config.batch.global_batch_size
        exit_reason = early_exit.signal()  # it came during the setup
        for iteration in range(progress.iteration + 1, config.loop.train_iters + 1):
            if exit_reason:
                break
            step_progress.begin(f"iteration {iteration}", step_units)
            began = time.perf_counter()
            result = train_step(
                train_state, next(train_batches), num_samples=num_samples, forward_step=forward_step
            )
            device.synchronize()
            seconds = time.perf_counter() - began
            if config.loop.check_for_nan:
                with errors_in_one_line():
                    require_finite(result, iteration)
            consumed_samples = progress.consumed_samples + num_samples
            progress = Progress(iteration=iteration, consumed_samples=consumed_samples)
            report.step(result, progress, seconds=seconds)
            if config.evaluates_after(iteration):
                report.evaluation(iteration, validation_loss(iteration))
            exit_reason = early_exit.reason(iteration)
            if config.checkpoint.save and (exit_reason or config.saves_after(iteration)):
                step_progress.begin(f"checkpoint of iteration {iteration}", phase=Phase.SAVING)
                report.saved(save(config, train_state, progress, start.provenance))
                exit_reason = exit_reason or early_exit.signal()
        report.end(exit_reason)


def find_agreed_start(config: RunConfig, gather: Gather) -> Start:
    """Where the run begins, from small files alone; collective over all ranks of ``gather``.

    Raises:
        ValueError: on every rank: see ``find_start``, or the ranks see other files.
    """
    samples = same_on_all_ranks(
        lambda: describe_samples(config.data, seq_length=config.batch.seq_length, seed=config.seed),
        "what --data-path names",
        gather,
    )
    start = same_on_all_ranks(
        lambda: find_start(config.checkpoint, samples=samples, skip_train=config.loop.skip_train),
        "the checkpoint in --load",
        gather,
    )
    if start.provenance.run_id is not None:
        return start
    run_id = gather(uuid.uuid4().hex)[0]  # all ranks write into the folder that it names
    return replace(start, provenance=replace(start.provenance, run_id=run_id))


def load(config: RunConfig, train_state: TrainState, start: Start) -> Progress:
    """Read the checkpoint of ``start``, if any, with the heartbeat told how far it is; collective.

    Raises:
        ValueError: on every rank, if it cannot become this run's state.
    """
    if start.folder is not None:
        total = bytes_to_read(config.checkpoint, train_state.checkpoint_state)
        train_state.progress.begin(str(start.folder), total, phase=Phase.LOADING)
    return load_checkpoint(
        config.checkpoint,
        train_state.checkpoint_state,
        seed=config.seed,
        start=start,
        advance=train_state.progress.advance,
    )


def save(
    config: RunConfig, train_state: TrainState, progress: Progress, provenance: Provenance
) -> Path:
    """Write a checkpoint with ``config`` beside it; collective over all ranks."""
    return save_checkpoint(
        config.checkpoint.save,
        train_state.checkpoint_state,
        progress,
        run_config=config,
        provenance=provenance,
        save_retain_interval=config.checkpoint.save_retain_interval,
    )
