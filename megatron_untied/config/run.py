"""Configuration of a training run: batch, optimizer, schedule, loop, logging, and all of it.

``arguments.py`` builds these from flags and ``validate.py`` checks them against each other. The
model's part is in ``model.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from megatron_untied.config import (
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    Precision,
    RotaryConfig,
)
from megatron_untied.config.checkpoint import CheckpointConfig
from megatron_untied.config.data import DataConfig
from megatron_untied.config.parameters import TRAIN_ALL, AdaptationConfig

AttentionBackend = Literal[
    "auto",
    "flash",
    "fused",
    "local",
    "flash-attention-4",
    "flash-attention-3",
    "flash-attention-2",
    "torch-flash",
    "cudnn",
]
"""Megatron's names, or the name of a single kernel."""

ATTENTION_BACKENDS: tuple[str, ...] = get_args(AttentionBackend)

TransformerImpl = Literal["local", "transformer_engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Sizes of the global batch and of a micro-batch."""

    seq_length: int
    """Tokens per sample (s), over all context-parallel ranks."""
    micro_batch_size: int
    """Samples per forward and backward (b)."""
    global_batch_size: int
    """Samples per optimizer step, over all data-parallel ranks and micro-batches."""

    def num_micro_batches(self, data_parallel_size: int) -> int:
        """Micro-batches per rank in one optimizer step.

        Args:
            data_parallel_size: ranks that get different samples.
        """
        return self.global_batch_size // (self.micro_batch_size * data_parallel_size)

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step over all ranks.

        Masked tokens are included, as in Megatron's throughput.
        """
        return self.global_batch_size * self.seq_length


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Iterations of a run that have their own sequence length: ``--seq-length-schedule``."""

    first_iteration: int
    """Iterations before it."""
    batch: BatchConfig
    rotary: RotaryConfig
    heads_per_chunk: int | Literal["all", "auto"]
    """As in ParallelConfig; the planner replaces "auto" for each stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizationConfig:
    """AdamW, and how its states are sharded."""

    weight_decay: float = 0.01
    """Not applied to biases and norms."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    """Maximum L2 norm of the gradient of the whole model; 0 disables clipping."""
    use_distributed_optimizer: bool = False
    """Shard fp32 weights and moments over the data- and context-parallel ranks: 12 / ranks
    instead of 12 bytes per parameter."""
    use_torch_fsdp2: bool = False
    """Shard weights and gradients too: 16 / ranks bytes per parameter. The weights of each layer
    are gathered for its forward and again for its backward."""
    optimizer_cpu_offload: bool = False
    """With use_torch_fsdp2: keep these 16 bytes on the host and run AdamW there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate by iteration: linear warmup, then one of five decay styles."""

    lr: float
    """Peak learning rate."""
    min_lr: float = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    lr_decay_iters: int
    """Iteration at which ``min_lr`` is reached."""
    lr_warmup_iters: int = 0
    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warmup."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    lr_wsd_decay_iters: int | None = None
    """WSD: iterations of the final decay, at the end of ``lr_decay_iters``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """Interval and size of evaluations on the validation samples."""

    eval_interval: int = 1000
    eval_iters: int = 100
    """Global batches per evaluation; 0 disables evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """Length of training, and what ends it early."""

    train_iters: int
    skip_train: bool = False
    """Evaluate once and exit."""
    check_for_nan: bool = True
    """Stop at the first loss or gradient norm that is not finite; otherwise skip such a step."""
    rerun_on_nan: bool = False
    """Before stopping run the step again, to tell a flaky device from bad data."""
    check_for_spiky_loss: bool = False
    """Count and report losses of 10 times the largest of the first 100."""
    verify_recompute: int | None = None
    """Interval of the iterations in which recomputed values are compared with those of forward."""
    exit_interval: int | None = None
    """Save and exit at the next multiple of this iteration."""
    exit_duration_in_mins: float | None = None
    exit_signal_handler: bool = False
    """Save and exit after the iteration during which SIGTERM or SIGHUP arrives."""
    save_on_signal_now: bool = False
    """Drop that iteration instead of finishing it, and save the state before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """Reports of rank 0."""

    log_interval: int = 100
    log_throughput: bool = False
    """Add Megatron's throughput field to the log line."""
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    metrics_jsonl: str | None = None
    heartbeat_seconds: float = 60.0
    """Seconds between progress lines within a step; 0 disables them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilingConfig:
    """Iterations that PyTorch's profiler traces, and on which ranks; numbered as in Megatron."""

    profile: bool = False
    profile_step_start: int = 10
    """Iterations before the first one that is traced."""
    profile_step_end: int = 12
    """The last iteration that is traced."""
    profile_ranks: tuple[int, ...] = (0,)

    @property
    def iterations(self) -> range:
        """Iterations to trace, counted from 1; empty without ``profile``."""
        last = self.profile_step_end if self.profile else 0
        return range(self.profile_step_start + 1, last + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedConfig:
    """Backend and timeout of collectives."""

    backend: Literal["nccl", "gloo"]
    timeout_minutes: float = 10.0
    """A collective that takes longer ends the run."""
    enable_ft_package: bool = False
    """Report progress to the rank monitor of NVIDIA's resiliency extension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that a training run depends on, except the world size."""

    model: ModelConfig
    parallel: ParallelConfig
    memory: MemoryConfig
    precision: Precision
    data: DataConfig
    batch: BatchConfig
    optimization: OptimizationConfig
    schedule: ScheduleConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    loop: LoopConfig
    logging: LoggingConfig
    distributed: DistributedConfig
    profiling: ProfilingConfig = ProfilingConfig()
    adaptation: AdaptationConfig = TRAIN_ALL
    attention_backend: AttentionBackend = "auto"
    """Attention kernels to choose from."""
    transformer_impl: TransformerImpl = "local"
    """Implementation of norms and linear layers."""
    seed: int = 1234
    stages: tuple[Stage, ...] = ()
    """Of ``--seq-length-schedule``; empty for one length. The rest of this configuration is that of
    one of them: see :meth:`in_stage`."""

    def stage_of(self, iteration: int) -> int:
        """The stage, from 0, of ``iteration``, counted from 1; iteration 0 is before the first."""
        return sum(stage.first_iteration < iteration for stage in self.stages[1:])

    def in_stage(self, index: int) -> "RunConfig":
        """The same run in stage ``index``; a run of one length is the same in its only one."""
        if not self.stages:
            return self
        stage = self.stages[index]
        return replace(
            self,
            batch=stage.batch,
            model=replace(self.model, rotary=stage.rotary),
            parallel=replace(self.parallel, heads_per_chunk=stage.heads_per_chunk),
        )

    def batches(self, first: int, last: int) -> Iterator[tuple[BatchConfig, int]]:
        """Stage by stage, how many of the iterations ``first`` + 1 to ``last`` have which batch."""
        starts = [stage.first_iteration for stage in self.stages] or [0]
        sizes = [stage.batch for stage in self.stages] or [self.batch]
        for batch, start, end in zip(sizes, starts, [*starts[1:], last], strict=True):
            yield batch, max(0, min(end, last) - max(start, first))

    def num_tokens(self, first: int, last: int) -> int:
        """Tokens of the iterations ``first`` + 1 to ``last``."""
        return sum(batch.tokens * count for batch, count in self.batches(first, last))

    @property
    def schedule_samples(self) -> int:
        """Samples by which an iteration advances the learning rate's schedule.

        Megatron counts it in samples. Here a curriculum may change the batch, but the schedule is
        one of iterations: each counts as many as those of the first stage.
        """
        return (self.stages[0].batch if self.stages else self.batch).global_batch_size

    def num_samples(self, *, iteration: int, consumed_samples: int) -> tuple[int, int, int]:
        """Training, validation and test samples of the whole run.

        Args:
            iteration: iterations done before this run.
            consumed_samples: samples consumed by them, perhaps in batches of another size.
        """
        # Consumed samples are part of the dataset: its order is drawn for the whole run.
        steps = 0 if self.loop.skip_train else max(0, self.loop.train_iters - iteration)
        batches = self.batches(iteration, self.loop.train_iters)
        train = steps and consumed_samples + sum(b.global_batch_size * n for b, n in batches)
        # Every evaluation reads the same samples; test documents are not used.
        return train, self.evaluation.eval_iters * self.batch.global_batch_size, 0

    def evaluates_after(self, iteration: int) -> bool:
        """Whether to evaluate after ``iteration``: at the interval and at the end."""
        return self.evaluation.eval_iters > 0 and self._is_due(
            iteration, self.evaluation.eval_interval
        )

    def saves_after(self, iteration: int) -> bool:
        """Whether to save after ``iteration``: at the interval and at the end.

        An early exit saves too; the loop decides that.
        """
        return self._is_due(iteration, self.checkpoint.save_interval)

    def _is_due(self, iteration: int, interval: int | None) -> bool:
        at_interval = interval is not None and iteration % interval == 0
        return at_interval or iteration == self.loop.train_iters
