"""Everything before the first step: rendezvous, groups, plan, datasets, model and reporting."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from megatron_untied import model
from megatron_untied.checkpoint import Progress, Start, find_start
from megatron_untied.checkpoint.collective_errors import (
    Gather,
    raise_on_all_ranks,
    same_on_all_ranks,
)
from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.kernels import AttentionKernel
from megatron_untied.data.datasets import Datasets
from megatron_untied.data.sample_order import describe_samples
from megatron_untied.model import attention_kernel
from megatron_untied.phases import Phase
from megatron_untied.planner.automatic import choose, is_automatic
from megatron_untied.planner.machine import this_machine
from megatron_untied.planner.plan import Plan
from megatron_untied.planner.search import describe_stage, plan_stages
from megatron_untied.platform import device
from megatron_untied.sharding.interface import ModelProvider
from megatron_untied.step_progress import StepProgress
from megatron_untied.streaming.disk import ActivationDisk, require_folders
from megatron_untied.training.exits import SignalWatch, watch_training
from megatron_untied.training.initialize import Launch, errors_in_one_line, initialize
from megatron_untied.training.liveness import (
    Heartbeat,
    PeerProgress,
    heartbeat_of_setup,
    open_rank_monitor,
)
from megatron_untied.training.metrics import require_output_paths
from megatron_untied.training.rendezvous import (
    gather_in,
    open_store,
    require_on_first_rank,
    require_same_config,
)
from megatron_untied.training.reporting import Reporter
from megatron_untied.training.state import TrainState, build_train_state

DatasetsProvider = Callable[[RunConfig, Progress], Datasets]
"""(config, what is done already) -> the samples of the whole run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One rank of a run that is set up; no weights are loaded yet."""

    config: RunConfig
    """Complete: the planner has replaced automatic settings."""
    launch: Launch
    groups: ProcessGroupCollection
    start: Start
    """The checkpoint to load, and the identity of the run."""
    stage: int
    """The stage of ``--seq-length-schedule``, from 0, that ``config`` is in."""
    plans: tuple[Plan, ...]
    """The plan of each stage; of a run of one length, the one that chose automatic settings."""
    kernel: AttentionKernel
    """For attention, as the model has one, with what was passed over for it."""
    datasets: Datasets
    train_state: TrainState
    report: Reporter
    signals: SignalWatch
    heartbeat: Heartbeat
    layer_passes: int
    """Passes of a micro-batch through a layer in one step, forward only; on one rank."""


def set_up(
    config: RunConfig,
    launch: Launch,
    *,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
) -> Run:
    """Set up this rank of a run; collective over all ranks.

    What can fail because of flags or files comes first, before the process group and the model, so
    that it fails within seconds and on all ranks.
    """
    with errors_in_one_line():
        store = open_store(launch)
        require_same_config(config, launch, store)  # first: all that follows depends on flags
        require_on_first_rank(lambda: require_output_paths(config), launch, store)
        gather = gather_in(store, launch)
        raise_on_all_ranks(lambda: require_folders(config.memory.activation_disk), gather)
        start = find_agreed_start(config, gather)
        report_progress = None
        if config.distributed.enable_ft_package:
            report_progress = raise_on_all_ranks(open_rank_monitor, gather)
    # A connection of its own per thread: a blocked call would block the others on the same one.
    signals = SignalWatch(store.clone(), launch.rank, advice=lambda: "nothing was trained")
    with errors_in_one_line(), signals:
        groups = initialize(config, launch, store)
        config, plans = plan_run(config, groups)
        # The model makes its own; here a sequence that no kernel can index ends the run before
        # datasets and weights are made.
        stage = config.stage_of(start.progress.iteration)
        kernels = [attention_kernel(config.in_stage(i)) for i in range(len(config.stages) or 1)]
        config = config.in_stage(stage)
        with heartbeat_of_setup(Phase.DATASETS, config, launch, store):
            datasets = datasets_provider(config, start.progress)
        progress = StepProgress(device.record_event)  # marks on the stream, without synchronizing
        train_state = build_train_state(model_provider, config, groups, progress)
        if train_state.disk is not None:
            planned = plans or (Plan(config, this_machine(groups)),)
            open_activation_disk(train_state.disk, planned)
        report = Reporter(config, launch, start=start.progress)
    heartbeat = Heartbeat(
        progress,
        PeerProgress(store.clone(), launch.rank, launch.world_size),
        say=report.say,
        every_seconds=config.logging.heartbeat_seconds,
        timeout_seconds=config.distributed.timeout_minutes * 60,
        moved=report_progress,
    )
    signals = watch_training(config, store.clone(), launch, report, heartbeat, progress)
    if train_state.disk is not None:
        train_state.disk.on_failure = signals.drop.request
    return Run(
        config=config,
        launch=launch,
        groups=groups,
        start=start,
        stage=stage,
        plans=plans,
        kernel=kernels[stage],
        datasets=datasets.at_length(config.batch.seq_length),
        train_state=train_state,
        report=report,
        signals=signals,
        heartbeat=heartbeat,
        layer_passes=config.model.num_layers * config.batch.num_micro_batches(groups.dp.size()),
    )


def open_activation_disk(disk: ActivationDisk, plans: Sequence[Plan]) -> None:
    """Reserve on the disks what the largest of the plans says; collective over all ranks.

    From then on a failing disk ends the step on all ranks, which is dropped where it is.

    Raises:
        OSError: on every rank, if a folder has no room for it.
    """
    disk.postpones_failures = True
    num_bytes = max(plan.activation_disk.rank_bytes for plan in plans)
    raise_on_all_ranks(lambda: disk.open(num_bytes))


def plan_run(
    config: RunConfig, groups: ProcessGroupCollection
) -> tuple[RunConfig, tuple[Plan, ...]]:
    """``config`` with the planner's values in place of "auto", and the plans; collective.

    Every stage of a run with several lengths is planned, since the last one may begin after days.

    Raises:
        ValueError: on every rank: no automatic setting fits, or a stage does not.
    """
    disks = config.memory.activation_disk
    if not config.stages:
        plans = (choose(config, this_machine(groups, disks)),) if is_automatic(config) else ()
        return plans[0].config if plans else config, plans
    plans = tuple(plan_stages(config, this_machine(groups, disks)))
    for number, plan in enumerate(plans):
        try:
            fits, described = plan.fits, describe_stage(plan, number)
        except ValueError as error:  # the kernel cannot index the sequence
            raise ValueError(f"--seq-length-schedule, stage {number + 1}: {error}") from error
        if not fits:
            raise ValueError(
                f"--seq-length-schedule: {described} does not fit; tools/plan_memory.py with these "
                "flags lists others that make it fit"
            )
    stages = tuple(
        replace(stage, heads_per_chunk=plan.config.parallel.heads_per_chunk)
        for stage, plan in zip(config.stages, plans, strict=True)
    )
    settled = plans[0].config  # all plans have the same, but for heads per exchange
    config = replace(config, stages=stages, memory=settled.memory, parallel=settled.parallel)
    return config, plans


def enter_stage(run: Run, stage: int) -> Run:
    """The run in ``stage``, with the model and the reports changed in place; on all ranks."""
    config = run.config.in_stage(stage)
    kernel, state = attention_kernel(config), run.train_state
    model.enter_stage(unwrap_model(state.model), config, kernel)
    device.release_cached_memory()
    run.report.enter_stage(config)
    run.report.say(describe_stage(run.plans[stage], stage))
    # Checkpoints carry the architecture, and the rotary embedding is part of it.
    stored = replace(state.checkpoint_state, model_config=config.model)
    micro_batches = config.batch.num_micro_batches(run.groups.dp.size())
    return replace(
        run,
        config=config,
        stage=stage,
        kernel=kernel,
        datasets=run.datasets.at_length(config.batch.seq_length),
        train_state=replace(state, checkpoint_state=stored),
        layer_passes=config.model.num_layers * micro_batches,
    )


def find_agreed_start(config: RunConfig, gather: Gather) -> Start:
    """Find the checkpoint to start from, reading small files only.

    Collective over all ranks of ``gather``.

    Raises:
        ValueError: on every rank: as ``find_start``, or the ranks see different files.
    """
    samples = same_on_all_ranks(
        lambda: describe_samples(
            config.data, seq_length=config.batch.seq_length, seed=config.seed, stages=config.stages
        ),
        "what --data-path names",
        gather,
    )
    start = same_on_all_ranks(
        lambda: find_start(
            config.checkpoint,
            samples=samples,
            skip_train=config.loop.skip_train,
            adaptation=config.adaptation,
        ),
        "the checkpoint in --load",
        gather,
    )
    done = start.progress
    if config.stages and not config.loop.skip_train:
        batches = config.batches(done.data_start, done.iteration)
        expected = sum(batch.global_batch_size * count for batch, count in batches)
        if expected != done.consumed_samples:
            raise ValueError(
                f"{start.folder} has consumed {done.consumed_samples} samples, and its "
                f"{done.iteration} iterations of --seq-length-schedule have {expected}; give the "
                "schedule and batch that it was trained with, or --reset-data-position"
            )
    if start.provenance.run_id is not None:
        return start
    run_id = gather(uuid.uuid4().hex)[0]  # all ranks write into the folder that it names
    return replace(start, provenance=replace(start.provenance, run_id=run_id))
