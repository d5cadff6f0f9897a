"""What a training run does, as values; ``RunConfig`` is all of it.

The architecture and its memory are in :mod:`megatron_untied.config`. ``arguments.py`` builds
these from flags, ``validate.py`` checks them against each other.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_untied.config import MemoryConfig, ModelConfig, ParallelConfig, Precision
from megatron_untied.config.checkpoint import CheckpointConfig
from megatron_untied.config.data import DataConfig

AttentionBackend = Literal[
    "auto",
    "flash",
    "fused",
    "local",
    "flash-attention-3",
    "flash-attention-2",
    "torch-flash",
    "cudnn",
]
"""Megatron's words, or the name of one kernel."""

ATTENTION_BACKENDS: tuple[str, ...] = get_args(AttentionBackend)

TransformerImpl = Literal["local", "transformer_engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How many tokens one optimizer step sees, and how many of them at a time."""

    seq_length: int
    """Tokens of one sample (s), over all context-parallel ranks."""
    micro_batch_size: int
    """Samples of one forward and backward (b)."""
    global_batch_size: int
    """Samples of one optimizer step, over all data-parallel ranks and micro-batches."""

    def num_micro_batches(self, data_parallel_size: int) -> int:
        """Forwards and backwards that each rank does for one optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * data_parallel_size)

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step, masked ones included."""
        return self.global_batch_size * self.seq_length


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizationConfig:
    """AdamW, and how its states are spread over ranks."""

    weight_decay: float = 0.01
    """Not applied to biases and norms."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest L2 norm of the gradient of the whole model; 0 does not clip."""
    use_distributed_optimizer: bool = False
    """Spread the fp32 weights and moments over the data- and context-parallel ranks: 12 bytes a
    parameter become 12 / (ranks)."""
    use_torch_fsdp2: bool = False
    """Spread weights and gradients too: 16 / (ranks) bytes a parameter, and each layer's weights
    are gathered for its forward and again for its backward."""
    optimizer_cpu_offload: bool = False
    """With use_torch_fsdp2: keep those 16 bytes on the host, where AdamW runs too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The learning rate of every iteration: linear warmup, then one of five shapes."""

    lr: float
    """The highest learning rate."""
    min_lr: float = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    lr_decay_iters: int
    """The iteration at which ``min_lr`` is reached."""
    lr_warmup_iters: int = 0
    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warmup."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    lr_wsd_decay_iters: int | None = None
    """WSD: the last so many of ``lr_decay_iters`` anneal, those before are constant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """How often the loss on held-out samples is measured."""

    eval_interval: int = 1000
    eval_iters: int = 100
    """Global batches of one evaluation; 0 never evaluates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """How long to train, and what ends it early."""

    train_iters: int
    skip_train: bool = False
    """Only evaluate."""
    check_for_nan: bool = True
    """Stop at the first loss or gradient norm that is not finite."""
    exit_interval: int | None = None
    """Save and exit at an iteration divisible by this."""
    exit_duration_in_mins: float | None = None
    exit_signal_handler: bool = False
    """Save and exit after the iteration during which SIGTERM or SIGHUP arrives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """What is reported, by rank 0 alone."""

    log_interval: int = 100
    log_throughput: bool = False
    """Add Megatron's own throughput field to the log line."""
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    metrics_jsonl: str | None = None
    heartbeat_seconds: float = 60.0
    """Every so many seconds of a step a line says how far it is; 0 says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedConfig:
    """How ranks find and wait for each other."""

    backend: Literal["nccl", "gloo"]
    timeout_minutes: float = 10.0
    """A collective that takes longer ends the run, and so does a rank that gets no further."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything a training run depends on, except how many ranks it is given."""

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
    attention_backend: AttentionBackend = "auto"
    """Which attention kernels may be chosen from."""
    transformer_impl: TransformerImpl = "local"
    """Whose norms and linear layers the model is made of."""
    seed: int = 1234

    def num_samples(self, *, iteration: int, consumed_samples: int) -> tuple[int, int, int]:
        """Training, validation and test samples of a run that begins after ``iteration``.

        ``consumed_samples`` before it count too: their batches may have had another size. Every
        evaluation reads the same samples; the test documents are not used.
        """
        steps = 0 if self.loop.skip_train else max(0, self.loop.train_iters - iteration)
        train = steps and consumed_samples + steps * self.batch.global_batch_size
        return train, self.evaluation.eval_iters * self.batch.global_batch_size, 0

    def evaluates_after(self, iteration: int) -> bool:
        """Whether the held-out loss is measured then: at the interval and at the end."""
        return self.evaluation.eval_iters > 0 and self._is_due(
            iteration, self.evaluation.eval_interval
        )

    def saves_after(self, iteration: int) -> bool:
        """Whether a checkpoint is due then: at the interval and at the end."""
        return self._is_due(iteration, self.checkpoint.save_interval)

    def _is_due(self, iteration: int, interval: int | None) -> bool:
        at_interval = interval is not None and iteration % interval == 0
        return at_interval or iteration == self.loop.train_iters
