"""Tables of all flags: Megatron's, with Megatron's spelling and defaults, and a few of ours.

``FLAGS`` has the supported flags by group. ``NOT_YET`` has flags, or single values of a flag, that
are refused, with the reason; a feature that is implemented moves its line to ``FLAGS``.
``arguments.py`` parses by these tables, and the flags page of the documentation is made from them.
"""

from collections.abc import Callable
from typing import Any, get_args

from megatron_untied.cli.derived import ROPE_SCALING_FACTOR
from megatron_untied.cli.flag_values import (
    all_or,
    amount,
    count,
    folders,
    index,
    integer,
    preset,
    real,
    text,
    tokens,
    window,
)
from megatron_untied.cli.stages import length_weights, schedule
from megatron_untied.config.data import (
    DOCUMENT_BOUNDARIES,
    TOKENIZER_TYPES,
    LongSamples,
    LossOn,
    LossWeighting,
)
from megatron_untied.config.parameters import LORA_TARGETS
from megatron_untied.config.run import ATTENTION_BACKENDS, TransformerImpl
from megatron_untied.presets import preset_names

Flag = tuple[str, dict[str, Any]]


def flag(name: str, kind: Callable = text, default: Any = None, **options: Any) -> Flag:
    """A flag with a value.

    Args:
        name: as on the command line.
        kind: parses the value.
        default: if the flag is not given.
        options: of ``add_argument``; ``dest`` names the value where the flag's name would not do.
    """
    return name, {"type": kind, "default": default, **options}


def switch(name: str, help: str, *, off: str | None = None, default: Any = None) -> Flag:
    """A flag without a value.

    Args:
        name: as on the command line.
        help: for --help.
        off: name of the value that the flag sets to False; None: the flag sets its own to True.
        default: if the flag is not given; None is the other truth value.
    """
    action = "store_false" if off else "store_true"
    default = bool(off) if default is None else default
    return name, {"action": action, "help": help, "default": default} | (
        {"dest": off} if off else {}
    )


A_YEAR_IN_MINUTES = 365 * 24 * 60

# Kinds of the rotary embedding: stretch factors, rotations within the context, YaRN's mscale.
stretch, turns, mscale = real(1.0, 1e6), real(1e-6, 1e6), real(0.0, 100.0)

FLAGS: dict[str, tuple[Flag, ...]] = {
    "model": (
        flag(
            "--model",
            preset,
            metavar="NAME",
            help=f"a published architecture; flags of this group override it: "
            f"{', '.join(preset_names())}",
        ),
        flag("--num-layers", count, help="transformer layers"),
        flag("--hidden-size", count, help="width of the residual stream"),
        flag(
            "--ffn-hidden-size", count, help="width of the MLP (4 x hidden size, 8/3 x with SwiGLU)"
        ),
        flag("--num-attention-heads", count, help="query heads"),
        switch("--group-query-attention", "let several query heads share a key-value head"),
        # Megatron's default. Without the switch every query head has its own key-value head.
        flag("--num-query-groups", count, 1, help="key-value heads, with --group-query-attention"),
        flag("--kv-channels", count, help="width of a head (hidden size / number of heads)"),
        flag(
            "--max-position-embeddings", tokens, help="longest context of the model (--seq-length)"
        ),
        flag("--position-embedding-type", default="rope", choices=["rope", "yarn"]),
        flag("--rotary-base", amount, 10000.0, help="theta of the rotary embedding"),
        flag("--rotary-percent", amount, 1.0, help="fraction of the head width that is rotated"),
        switch("--use-rope-scaling", "Llama 3.1's scaling of the rotary wavelengths"),
        flag(
            "--rope-scaling-factor",
            stretch,
            ROPE_SCALING_FACTOR,
            help="factor of --use-rope-scaling",
        ),
        flag(
            "--rotary-seq-len-interpolation-factor",
            count,
            metavar="N",
            help="divide positions by N (1)",
        ),
        flag(
            "--yarn-rotary-scaling-factor",
            stretch,
            help="yarn: factor by which the context is extended",
        ),
        flag(
            "--yarn-original-max-position-embeddings",
            tokens,
            metavar="N",
            help="yarn: context length of the original model",
        ),
        flag(
            "--yarn-beta-fast",
            turns,
            help="yarn: keep pairs with more rotations within the original context (32)",
        ),
        flag(
            "--yarn-beta-slow",
            turns,
            help="yarn: fully scale pairs with fewer rotations within the original context (1)",
        ),
        flag("--yarn-mscale", mscale, help="yarn: numerator of the attention factor"),
        flag(
            "--yarn-mscale-all-dim",
            mscale,
            help="yarn: denominator of the attention factor (0.1 ln factor + 1)",
        ),
        switch(
            "--no-yarn-correction-range-round-to-int",
            "yarn: do not round the correction range to whole pairs",
            off="yarn_correction_range_round_to_int",
        ),
        flag(
            "--window-size",
            window,
            metavar="LEFT,0",
            help="a query attends to itself and LEFT tokens before it (-1,0: to all)",
        ),
        flag("--normalization", default="LayerNorm", choices=["LayerNorm", "RMSNorm"]),
        flag("--norm-epsilon", real(1e-12, 0.1), 1e-5, help="added to the variance in norms"),
        switch("--swiglu", "gated MLP with SiLU instead of GELU"),
        switch("--disable-bias-linear", "linear layers without bias", off="add_bias_linear"),
        switch("--add-qkv-bias", "bias in the QKV projection, also with --disable-bias-linear"),
        switch("--qk-layernorm", "normalize each head's query and key"),
        switch("--untie-embeddings-and-output-weights", "separate output matrix"),
        flag(
            "--make-vocab-size-divisible-by",
            count,
            128,
            help="padding of the vocabulary in the weights",
        ),
        flag(
            "--init-method-std",
            real(1e-6, 10.0),
            0.02,
            help="standard deviation of the initial weights",
        ),
        # Accepted at 0, so that command lines written for Megatron parse.
        flag(
            "--hidden-dropout",
            real(0.0, 1.0),
            0.0,
            choices=[0.0],
            help="not implemented, must be 0",
        ),
        flag(
            "--attention-dropout",
            real(0.0, 1.0),
            0.0,
            choices=[0.0],
            help="not implemented, must be 0",
        ),
    ),
    "parallelism": (
        flag("--tensor-model-parallel-size", count, 1, help="ranks that share each weight matrix"),
        switch("--sequence-parallel", "shard norms and residuals over the tensor-parallel ranks"),
        flag("--context-parallel-size", count, 1, help="ranks that share each sequence"),
        flag(
            "--cp-comm-type",
            default="a2a",
            choices=["a2a", "p2p", "a2a+p2p"],
            help="all-to-all of heads (Ulysses), a ring, or a ring of Ulysses groups",
        ),
        flag(
            "--hierarchical-context-parallel-sizes",
            count,
            nargs=2,
            metavar=("A", "R"),
            help="a2a+p2p: A Ulysses ranks (a group that exchanges heads), R ring ranks",
        ),
        flag(
            "--cp-heads-per-chunk",
            all_or(count, "all", "auto"),
            "all",
            metavar="U|all|auto",
            dest="heads_per_chunk",
            help="query heads per exchange; fewer take less memory; auto: the most that fit",
        ),
        switch(
            "--cp-overlap",
            "overlap the exchange of the next chunk with attention; auto: below 1Mi tokens",
            default="auto",
        ),
        switch(
            "--no-cp-overlap",
            "do not overlap them: one set of chunk buffers",
            off="cp_overlap",
            default="auto",
        ),
        switch("--use-distributed-optimizer", "shard optimizer states over the DP x CP ranks"),
        switch("--use-torch-fsdp2", "shard weights, gradients and states over the DP x CP ranks"),
        flag(
            "--distributed-backend", choices=["nccl", "gloo"], help="nccl with GPUs, otherwise gloo"
        ),
        flag(
            "--distributed-timeout-minutes",  # limits: arguments.py, where a step's time is known
            amount,
            help="timeout of a collective "
            "(10, or the time of a step at 200 TFLOP/s per GPU if longer)",
        ),
        switch(
            "--enable-ft-package",
            "report progress to nvidia-resiliency-ext; start the run with its ft_launcher",
        ),
    ),
    "memory and precision": (
        switch(
            "--optimizer-cpu-offload",
            "with --use-torch-fsdp2: keep its shards and run AdamW on the host",
        ),
        switch("--bf16", "compute in bf16; main weights, gradients and moments are fp32"),
        flag(
            "--loss-chunk-size",
            all_or(tokens, "auto"),
            "auto",
            metavar="T|auto",
            help="tokens whose logits are materialized at a time; auto: up to 2 GiB of them",
        ),
        flag(
            "--recompute-granularity",
            choices=["full", "selective", "auto"],
            help="stream layers and recompute them; selective keeps attention; auto: what fits, as "
            "is then what is not given of the settings of streamed layers",
        ),
        flag(
            "--attention-output-layers",
            all_or(index, "auto"),
            metavar="N|auto",
            help="selective: keep attention in the last N layers (all) and recompute it in others",
        ),
        flag("--recompute-method", choices=["uniform"], help="checkpoint groups of equal size"),
        flag(
            "--recompute-num-layers",
            all_or(count, "auto"),
            1,
            metavar="K|auto",
            help="layers per checkpoint group",
        ),
        flag(
            "--sequence-tile-size",
            all_or(tokens, "auto"),
            "auto",
            metavar="T|auto",
            help="tokens per tile of a streamed layer; auto: 8192, fewer for wide models",
        ),
        flag(
            "--cpu-offloading-num-layers",
            all_or(index, "all", "auto"),
            0,
            metavar="N|all|auto",
            help="layers whose saved activations are offloaded to the host",
        ),
        flag(
            "--activation-disk",
            folders,
            (),
            metavar="DIR[,DIR...]",
            help="folders on local disks, to which offloaded activations go on from the host",
        ),
        flag(
            "--activation-disk-gib",
            all_or(real(0.0, 1e9), "all", "auto"),
            "auto",
            metavar="N|all|auto",
            help="GiB per rank stored there at most, the rest stays on the host; auto: what the "
            "host does not hold",
        ),
        switch(
            "--no-activation-disk-checksums",
            "do not compare what is read from the disks with the checksum of what was written",
            off="activation_disk_checksums",
        ),
        switch("--park-during-attention", "keep the residual, its gradient, dK and dV on the host"),
        flag(
            "--transformer-impl",
            default="local",
            choices=get_args(TransformerImpl),
            help="implementation of norms and linear layers",
        ),
        flag(
            "--attention-backend",
            default="auto",
            choices=ATTENTION_BACKENDS,
            help="flash, fused (cuDNN), local (matrix products), or the name of one kernel",
        ),
    ),
    "batch and optimizer": (
        flag("--seq-length", tokens, help="tokens per sample: 1048576, or 1Mi, 1024Ki"),
        flag(
            "--seq-length-schedule",
            schedule,
            (),
            metavar="START:LENGTH,...",
            help="lengths by iteration, or by tokens as in 10Gitok:65536; a stage may set the "
            "rotary embedding: 0:8192,200:65536:rotary-base=4e6",
        ),
        switch(
            "--keep-batch-tokens",
            "with --seq-length-schedule: change --global-batch-size so that tokens per step stay",
        ),
        flag("--micro-batch-size", count, help="samples per forward and backward"),
        flag(
            "--global-batch-size", count, help="samples per step (micro batch x data-parallel size)"
        ),
        flag("--lr", real(0.0, 1e30), help="peak learning rate; 0 leaves the weights unchanged"),
        flag("--min-lr", amount, 0.0, help="final learning rate"),
        flag(
            "--lr-decay-style",
            default="linear",
            choices=["constant", "linear", "cosine", "inverse-square-root", "WSD"],
        ),
        flag(
            "--lr-decay-iters", count, help="iteration at which --min-lr is reached (--train-iters)"
        ),
        flag("--lr-warmup-iters", index, 0, help="iterations of linear warmup"),
        flag("--lr-warmup-init", amount, 0.0, help="learning rate at the start of the warmup"),
        flag("--lr-wsd-decay-iters", count, help="WSD: iterations of the final decay"),
        flag(
            "--lr-wsd-decay-style",
            default="exponential",
            choices=["exponential", "linear", "cosine", "minus_sqrt"],
        ),
        flag("--weight-decay", real(0.0, 100.0), 0.01, help="not applied to biases and norms"),
        flag("--adam-beta1", amount, 0.9),
        flag("--adam-beta2", amount, 0.999),
        flag("--adam-eps", real(1e-30, 1.0), 1e-8),
        flag("--clip-grad", amount, 1.0, help="maximum gradient norm; 0 disables clipping"),
        switch(
            "--calculate-per-token-loss",
            "average the loss over tokens; always on, accepted for compatibility",
        ),
        flag("--seed", index, 1234, help="of weights and of the order of samples"),
    ),
    "frozen parameters and adapters": (
        flag(
            "--freeze",
            nargs="+",
            default=(),
            metavar="PATTERN",
            help="do not train parameters whose names match, such as 'decoder.layers.[0-7].*'",
        ),
        flag("--lora-rank", count, metavar="R", help="train low-rank adapters (LoRA) alone"),
        flag("--lora-alpha", real(1e-3, 1e6), 32.0, help="adapters are scaled by alpha / rank"),
        flag(
            "--lora-targets",
            nargs="+",
            default=LORA_TARGETS,
            choices=LORA_TARGETS,
            help="matrices that get an adapter, by their Hugging Face names",
        ),
        flag(
            "--lora-dropout",
            real(0.0, 1.0),
            0.0,
            choices=[0.0],
            help="not implemented, must be 0",
        ),
        flag(
            "--pretrained-checkpoint",
            metavar="DIR",
            help="checkpoints with the weights that adapters are for; --save has the adapters",
        ),
    ),
    "data": (
        flag("--tokenizer-type", choices=TOKENIZER_TYPES),
        flag("--tokenizer-model", help="file or folder of the tokenizer"),
        flag(
            "--vocab-size", count, help="expected size of the tokenizer; required for NullTokenizer"
        ),
        flag(
            "--data-path", nargs="+", default=(), help="prefix, or weight prefix weight prefix ..."
        ),
        flag(
            "--split",
            default="969,30,1",  # Megatron's
            help="proportions of training, validation and test documents",
        ),
        flag(
            "--data-cache-path",
            help="folder for sample indices, local to each node or shared (PREFIX/cache)",
        ),
        flag(
            "--long-document-weight",
            length_weights,
            (),
            metavar="LENGTH:WEIGHT,...",
            help="how often training documents of at least LENGTH tokens are read in an epoch",
        ),
        switch("--mock-data", "random tokens instead of --data-path"),
        flag("--num-workers", integer(0, 1024), 2, help="data workers per rank"),
        switch("--reset-position-ids", "restart positions at every document"),
        switch(
            "--dataloader-inter-document-masking",
            "attend within documents only; needs --reset-position-ids",
        ),
        flag(
            "--document-boundaries",
            default="idx",
            choices=DOCUMENT_BOUNDARIES,
            help="documents from the .idx file, or ended by every end-of-document token",
        ),
        switch("--eod-mask-loss", "exclude end-of-document inputs from the loss"),
        switch(
            "--sft",
            "fine-tune on the chats in --data-path: JSON lines, Parquet, Arrow, or a saved dataset",
        ),
        flag(
            "--loss-on",
            default="completion",
            choices=get_args(LossOn),
            help="sft: completions (turns of the assistant), prompts (all else), or all tokens",
        ),
        flag(
            "--long-samples",
            default="error",
            choices=get_args(LongSamples),
            help="sft: chats that are longer than --seq-length",
        ),
        flag(
            "--loss-weighting",
            default="token",
            choices=get_args(LossWeighting),
            help="sft: trained tokens have equal weights, or chats have",
        ),
    ),
    "loop": (
        flag("--train-iters", count, help="optimizer steps"),
        switch("--skip-train", "evaluate once and exit"),
        flag("--eval-interval", count, 1000, help="iterations between evaluations"),
        flag("--eval-iters", index, 100, help="global batches per evaluation"),
        flag("--exit-interval", count, help="save and exit at the next multiple of this iteration"),
        flag(
            "--exit-duration-in-mins",
            real(1e-3, A_YEAR_IN_MINUTES),
            help="save and exit after this many minutes",
        ),
        switch("--exit-signal-handler", "finish the step, save and exit on SIGTERM or SIGHUP"),
        switch(
            "--save-on-signal-now",
            "with --exit-signal-handler: drop the step in flight and save the state before it",
        ),
        switch(
            "--no-check-for-nan-in-loss-and-grad",
            "skip a step whose loss or gradient is not finite, instead of ending the run",
            off="check_for_nan",
        ),
        switch(
            "--rerun-on-nan",
            "run a step that is not finite once more, to tell a flaky device from bad data",
        ),
        switch(
            "--check-for-spiky-loss",
            "count and report losses of 10 times the largest of the first 100",
        ),
        flag(
            "--verify-recompute",
            count,
            metavar="N",
            help="every N iterations, compare recomputed values with those of forward",
        ),
    ),
    "checkpoint": (
        flag("--save", help="folder to save to"),
        flag("--save-interval", count, help="iterations between checkpoints"),
        switch(
            "--async-save",
            "write checkpoints while training goes on, from a copy in host memory",
        ),
        switch(
            "--no-exit-on-failed-save",
            "warn if a checkpoint cannot be written, and train on until the next one",
            off="exit_on_failed_save",
        ),
        switch(
            "--save-into-existing",
            "allow --save to have checkpoints of another run; they are not deleted",
        ),
        flag("--load", help="folder to load from"),
        flag("--ckpt-step", index, help="iteration to load, instead of the latest"),
        flag(
            "--save-retain-interval",
            count,
            help="delete older checkpoints of this run, except multiples of this",
        ),
        flag(
            "--most-recent-k",
            count,
            metavar="K",
            help="keep the last K checkpoints of this run, and multiples of --save-retain-interval",
        ),
        switch("--finetune", "load the weights only and start at iteration 0"),
        switch("--no-load-optim", "do not load the optimizer states", off="load_optim"),
        switch(
            "--override-opt_param-scheduler",
            "load Adam's moments but use this run's learning rate schedule and weight decay",
        ),
        switch(
            "--use-checkpoint-opt_param-scheduler",
            "use the checkpoint's learning rate schedule and weight decay",
        ),
        switch(
            "--reset-data-position",
            "restart the training samples; weights, moments and schedule continue",
        ),
        switch("--no-load-rng", "do not load the random states", off="load_rng"),
        switch(
            "--exit-on-missing-checkpoint",
            "exit with an error if --load has no checkpoint, also if it is the folder of --save",
        ),
        switch("--use-checkpoint-args", "take the architecture from the checkpoint in --load"),
    ),
    "logging": (
        flag("--log-interval", count, 100, help="iterations between log lines"),
        switch("--log-throughput", "Megatron's throughput field in the log line"),
        flag("--tensorboard-dir", help="folder for TensorBoard events"),
        flag("--wandb-project", help="Weights & Biases project"),
        flag(
            "--metrics-jsonl",
            metavar="FILE",
            help="write metrics of every iteration, one JSON object per line",
        ),
        flag(
            "--heartbeat-seconds",
            real(0.0, 86400.0),
            60.0,
            metavar="S",
            help="seconds between progress lines within a step; 0 disables them",
        ),
        switch("--profile", "trace steps with PyTorch's profiler, into --tensorboard-dir"),
        flag("--profile-step-start", index, 10, help="steps before the first traced one"),
        flag("--profile-step-end", count, 12, help="the last step to trace"),
        flag("--profile-ranks", index, (0,), nargs="+", metavar="R", help="ranks to trace"),
        switch(
            "--use-pytorch-profiler",
            "the profiler of --profile; always on, accepted for compatibility",
        ),
    ),
}

OTHER_SPELLINGS = {
    "--override-opt-param-scheduler": "--override-opt_param-scheduler",
    "--use-checkpoint-opt-param-scheduler": "--use-checkpoint-opt_param-scheduler",
}
"""Alternative spellings that Megatron accepts."""

SWITCHES = frozenset(
    name for group in FLAGS.values() for name, options in group if "action" in options
)
"""Flags without a value."""

NOT_YET: dict[str, str] = {
    # Planned features.
    "--attention-backend unfused": "use local, attention by matrix products",
    # Megatron's flags for features that the design excludes.
    "--pipeline-model-parallel-size": "not implemented; use tensor, context and data parallelism",
    "--expert-model-parallel-size": "there are no mixture-of-experts layers",
    "--num-experts": "there are no mixture-of-experts layers",
    "--fp16": "use --bf16, or neither for fp32",
    "--fp8-format": "use --bf16, or neither for fp32",
    "--overlap-grad-reduce": "gradients are reduced after the last micro-batch; with "
    "--use-torch-fsdp2 in every micro-batch, beside its backward",
    "--overlap-param-gather": "parameters are gathered before the next step begins; with "
    "--use-torch-fsdp2 the next layer's are always gathered beside a layer",
    "--train-samples": "use --train-iters",
    "--rotary-interleaved": "pairs are rotated across the halves of a head",
    "--no-rope-freq": "every layer has rotary embedding",
    "--multi-latent-attention": "multi-latent attention is not implemented",
    "--rerun-mode": "use --rerun-on-nan, which repeats a step that is not finite once",
    "--check-for-large-grads": "gradients that are not finite end the run; see --clip-grad",
    "--rampup-batch-size": "the batch size is constant",
}
