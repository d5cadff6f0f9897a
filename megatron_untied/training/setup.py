"""Everything before the first step: rendezvous, groups, plan, datasets, model and reporting."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.core.process_groups_config import ProcessGroupCollection

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
from megatron_untied.platform import device
from megatron_untied.sharding.interface import ModelProvider
from megatron_untied.step_progress import StepProgress
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
    plan: Plan | None
    """The plan that chose the automatic settings, if there were any."""
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
        start = find_agreed_start(config, gather_in(store, launch))
        report_progress = None
        if config.distributed.enable_ft_package:
            report_progress = raise_on_all_ranks(open_rank_monitor, gather_in(store, launch))
    # A connection of its own per thread: a blocked call would block the others on the same one.
    signals = SignalWatch(store.clone(), launch.rank, advice=lambda: "nothing was trained")
    with errors_in_one_line(), signals:
        groups = initialize(config, launch, store)
        plan = choose(config, this_machine(groups)) if is_automatic(config) else None
        config = plan.config if plan is not None else config
        # The model makes its own; here a sequence that no kernel can index ends the run before
        # datasets and weights are made.
        kernel = attention_kernel(config)
        with heartbeat_of_setup(Phase.DATASETS, config, launch, store):
            datasets = datasets_provider(config, start.progress)
        progress = StepProgress(device.record_event)  # marks on the stream, without synchronizing
        train_state = build_train_state(model_provider, config, groups, progress)
        report = Reporter(config, launch, start=start.progress)
    heartbeat = Heartbeat(
        progress,
        PeerProgress(store.clone(), launch.rank, launch.world_size),
        say=report.say,
        every_seconds=config.logging.heartbeat_seconds,
        timeout_seconds=config.distributed.timeout_minutes * 60,
        moved=report_progress,
    )
    return Run(
        config=config,
        launch=launch,
        groups=groups,
        start=start,
        plan=plan,
        kernel=kernel,
        datasets=datasets,
        train_state=train_state,
        report=report,
        signals=watch_training(config, store.clone(), launch, report, heartbeat, progress),
        heartbeat=heartbeat,
        layer_passes=config.model.num_layers * config.batch.num_micro_batches(groups.dp.size()),
    )


def find_agreed_start(config: RunConfig, gather: Gather) -> Start:
    """Find the checkpoint to start from, reading small files only.

    Collective over all ranks of ``gather``.

    Raises:
        ValueError: on every rank: as ``find_start``, or the ranks see different files.
    """
    samples = same_on_all_ranks(
        lambda: describe_samples(config.data, seq_length=config.batch.seq_length, seed=config.seed),
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
    if start.provenance.run_id is not None:
        return start
    run_id = gather(uuid.uuid4().hex)[0]  # all ranks write into the folder that it names
    return replace(start, provenance=replace(start.provenance, run_id=run_id))
