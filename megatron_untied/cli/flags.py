"""The flags: Megatron's, spelled as Megatron spells them, and a few of ours.

Two tables and no logic. ``FLAGS`` are honored, by group, with Megatron's defaults. ``NOT_YET`` are
flags, or single values of a flag, that are refused with the reason: when a feature lands, its line
goes and a line in ``FLAGS`` comes. ``arguments.py`` turns what was given into a ``RunConfig``.
"""

from collections.abc import Callable
from typing import Any, get_args

from megatron_untied.cli.derived import ROPE_SCALING_FACTOR
from megatron_untied.cli.flag_values import (
    all_or,
    amount,
    count,
    index,
    integer,
    preset,
    real,
    text,
    tokens,
    window,
)
from megatron_untied.config.data import DOCUMENT_BOUNDARIES, TOKENIZER_TYPES
from megatron_untied.config.run import ATTENTION_BACKENDS, TransformerImpl
from megatron_untied.presets import preset_names

Flag = tuple[str, dict[str, Any]]


def flag(name: str, kind: Callable = text, default: Any = None, **options: Any) -> Flag:
    """A flag that takes a value; ``dest`` names the value where the flag's own name would not."""
    return name, {"type": kind, "default": default, **options}


def switch(name: str, help: str, *, off: str | None = None) -> Flag:
    """A flag without a value: turns its own name on, or the value named ``off`` off."""
    action = "store_false" if off else "store_true"
    return name, {"action": action, "help": help, "default": bool(off)} | (
        {"dest": off} if off else {}
    )


A_YEAR_IN_MINUTES = 365 * 24 * 60

stretch, turns, mscale = real(1.0, 1e6), real(1e-6, 1e6), real(0.0, 100.0)

FLAGS: dict[str, tuple[Flag, ...]] = {
    "model": (
        flag(
            "--model",
            preset,
            metavar="NAME",
            help=f"a published architecture, which the flags of this group change: "
            f"{', '.join(preset_names())}",
        ),
        flag("--num-layers", count, help="transformer layers"),
        flag("--hidden-size", count, help="width of the residual stream"),
        flag("--ffn-hidden-size", count, help="width of the MLP (4 x hidden, with SwiGLU 8/3 x)"),
        flag("--num-attention-heads", count, help="query heads"),
        switch("--group-query-attention", "several query heads share a key-value head"),
        flag("--num-query-groups", count, 1, help="key-value heads, with --group-query-attention"),
        flag("--kv-channels", count, help="width of a head (hidden size / heads)"),
        flag("--max-position-embeddings", tokens, help="longest context (the sequence length)"),
        flag("--position-embedding-type", default="rope", choices=["rope", "yarn"]),
        flag("--rotary-base", amount, 10000.0, help="theta of the rotary embedding"),
        flag("--rotary-percent", amount, 1.0, help="part of the head width that is rotated"),
        switch("--use-rope-scaling", "Llama 3.1's scaling of the rotary wave lengths"),
        flag(
            "--rope-scaling-factor",
            stretch,
            ROPE_SCALING_FACTOR,
            help="stretch of --use-rope-scaling",
        ),
        flag(
            "--rotary-seq-len-interpolation-factor",
            count,
            metavar="N",
            help="positions are divided by N (1)",
        ),
        flag("--yarn-rotary-scaling-factor", stretch, help="yarn: stretch of the context"),
        flag(
            "--yarn-original-max-position-embeddings",
            tokens,
            metavar="N",
            help="yarn: context that the model was trained at before",
        ),
        flag(
            "--yarn-beta-fast",
            turns,
            help="yarn: keep pairs that turn as often in it (32)",
        ),
        flag(
            "--yarn-beta-slow",
            turns,
            help="yarn: stretch pairs that turn as often in it (1)",
        ),
        flag("--yarn-mscale", mscale, help="yarn: numerator of the attention factor"),
        flag(
            "--yarn-mscale-all-dim",
            mscale,
            help="yarn: its denominator (0.1 ln stretch + 1)",
        ),
        switch(
            "--no-yarn-correction-range-round-to-int",
            "yarn: the ramp between kept and stretched may start and end inside a pair",
            off="yarn_correction_range_round_to_int",
        ),
        flag(
            "--window-size",
            window,
            metavar="LEFT,0",
            help="a query sees itself and LEFT tokens before it (-1,0: all of them)",
        ),
        flag("--normalization", default="LayerNorm", choices=["LayerNorm", "RMSNorm"]),
        flag("--norm-epsilon", real(1e-12, 0.1), 1e-5, help="added to the variance under the root"),
        switch("--swiglu", "gated MLP with SiLU, instead of GELU"),
        switch("--disable-bias-linear", "linear layers without bias", off="add_bias_linear"),
        switch("--add-qkv-bias", "bias in the QKV projection, whatever the other layers have"),
        switch("--qk-layernorm", "normalize each head's query and key"),
        switch("--untie-embeddings-and-output-weights", "an output matrix of its own"),
        flag("--make-vocab-size-divisible-by", count, 128, help="padding of the weights only"),
        flag(
            "--init-method-std",
            real(1e-6, 10.0),
            0.02,
            help="standard deviation of the first weights",
        ),
        flag("--hidden-dropout", real(0.0, 1.0), 0.0, choices=[0.0], help="there is none"),
        flag("--attention-dropout", real(0.0, 1.0), 0.0, choices=[0.0], help="there is none"),
    ),
    "parallelism": (
        flag("--tensor-model-parallel-size", count, 1),
        switch("--sequence-parallel", "split norms and residuals over the tensor-parallel ranks"),
        flag("--context-parallel-size", count, 1, help="ranks that share each sequence"),
        flag(
            "--cp-comm-type",
            default="a2a",
            choices=["a2a", "p2p", "a2a+p2p"],
            help="trade sequence for heads (Ulysses), a ring, or a ring of Ulysses groups",
        ),
        flag(
            "--hierarchical-context-parallel-sizes",
            count,
            nargs=2,
            metavar=("A", "P"),
            help="for a2a+p2p: a ring of P groups of A neighboring ranks",
        ),
        flag(
            "--cp-heads-per-chunk",
            all_or(count, "all", "auto"),
            "all",
            metavar="U|all|auto",
            dest="heads_per_chunk",
            help="query heads exchanged at a time: fewer need less memory; auto: as fits",
        ),
        switch("--no-cp-overlap", "exchange between chunks, not during them", off="cp_overlap"),
        switch("--use-distributed-optimizer", "spread optimizer states over dp x cp ranks"),
        switch("--use-torch-fsdp2", "spread weights, gradients and states over dp x cp ranks"),
        flag("--distributed-backend", choices=["nccl", "gloo"], help="nccl with GPUs, else gloo"),
        flag(
            "--distributed-timeout-minutes",
            amount,
            help="longest collective (10, or the time of a step at 200 TFLOP/s a GPU if longer)",
        ),
    ),
    "memory and precision": (
        switch("--optimizer-cpu-offload", "with --use-torch-fsdp2: what it spreads is on the host"),
        switch("--bf16", "compute in bf16; main weights, gradients and moments stay fp32"),
        flag(
            "--loss-chunk-size", tokens, metavar="T", help="tokens whose logits are alive at once"
        ),
        flag(
            "--recompute-granularity",
            choices=["full", "selective", "auto"],
            help="stream layers; selective also keeps the attention output; auto: as fits",
        ),
        flag("--recompute-method", choices=["uniform"], help="groups of equal size"),
        flag("--recompute-num-layers", count, 1, help="keep every so many layers' input"),
        flag("--sequence-tile-size", tokens, 8192, metavar="T", help="tokens of a streamed tile"),
        flag(
            "--cpu-offloading-num-layers",
            all_or(index, "all"),
            0,
            metavar="N|all",
            help="layers that keep on the host",
        ),
        switch("--park-during-attention", "move what attention does not need to the host"),
        flag("--transformer-impl", default="local", choices=get_args(TransformerImpl)),
        flag(
            "--attention-backend",
            default="auto",
            choices=ATTENTION_BACKENDS,
            help="flash, fused (cuDNN), local (matrix products), or one kernel by name",
        ),
    ),
    "batch and optimizer": (
        flag("--seq-length", tokens, help="tokens of a sample: 1048576, or 1Mi, 1024Ki"),
        flag("--micro-batch-size", count, help="samples of one forward and backward"),
        flag("--global-batch-size", count, help="samples of a step (micro batch x data-parallel)"),
        flag("--lr", real(0.0, 1e30), help="highest learning rate; 0 changes no weight"),
        flag("--min-lr", amount, 0.0),
        flag(
            "--lr-decay-style",
            default="linear",
            choices=["constant", "linear", "cosine", "inverse-square-root", "WSD"],
        ),
        flag("--lr-decay-iters", count, help="iteration of the lowest rate (--train-iters)"),
        flag("--lr-warmup-iters", index, 0),
        flag("--lr-warmup-init", amount, 0.0),
        flag("--lr-wsd-decay-iters", count, help="WSD: iterations of the final decay"),
        flag(
            "--lr-wsd-decay-style",
            default="exponential",
            choices=["exponential", "linear", "cosine", "minus_sqrt"],
        ),
        flag("--weight-decay", real(0.0, 100.0), 0.01, help="not on biases and norms"),
        flag("--adam-beta1", amount, 0.9),
        flag("--adam-beta2", amount, 0.999),
        flag("--adam-eps", real(1e-30, 1.0), 1e-8),
        flag("--clip-grad", amount, 1.0, help="largest gradient norm; 0 does not clip"),
        switch("--calculate-per-token-loss", "the loss is a mean over all tokens, as always here"),
        flag("--seed", index, 1234),
    ),
    "data": (
        flag("--tokenizer-type", choices=TOKENIZER_TYPES),
        flag("--tokenizer-model", help="file or folder of the tokenizer"),
        flag(
            "--vocab-size", count, help="tokens of the tokenizer, to check; NullTokenizer needs it"
        ),
        flag(
            "--data-path", nargs="+", default=(), help="prefix, or weight prefix weight prefix ..."
        ),
        flag(
            "--split", default="969,30,1", help="train, validation and test parts of the documents"
        ),
        flag(
            "--data-cache-path",
            help="folder for the sample indices, on every node or shared (PREFIX/cache)",
        ),
        switch("--mock-data", "random tokens instead of --data-path"),
        flag("--num-workers", integer(0, 1024), 2, help="processes that prepare samples"),
        switch("--reset-position-ids", "positions start again at every document"),
        switch(
            "--dataloader-inter-document-masking",
            "tokens see their own document only; needs --reset-position-ids",
        ),
        flag(
            "--document-boundaries",
            default="idx",
            choices=DOCUMENT_BOUNDARIES,
            help="documents are those of the .idx file, or end at every end-of-document token",
        ),
        switch("--eod-mask-loss", "no loss where the input is the end-of-document token"),
    ),
    "loop": (
        flag("--train-iters", count, help="optimizer steps"),
        switch("--skip-train", "only evaluate"),
        flag("--eval-interval", count, 1000, help="iterations between evaluations"),
        flag("--eval-iters", index, 100, help="global batches of an evaluation"),
        flag("--exit-interval", count, help="save and exit at an iteration divisible by this"),
        flag(
            "--exit-duration-in-mins",
            real(1e-3, A_YEAR_IN_MINUTES),
            help="save and exit after so many minutes",
        ),
        switch("--exit-signal-handler", "finish the step, save and exit on SIGTERM or SIGHUP"),
        switch(
            "--no-check-for-nan-in-loss-and-grad", "train on, whatever comes", off="check_for_nan"
        ),
    ),
    "checkpoint": (
        flag("--save", help="folder to save to"),
        flag("--save-interval", count, help="iterations between checkpoints"),
        switch(
            "--save-into-existing",
            "save into a folder with another run's checkpoints too; none of them is deleted",
        ),
        flag("--load", help="folder to load from"),
        flag("--ckpt-step", index, help="iteration to load, instead of the latest"),
        flag("--save-retain-interval", count, help="keep only checkpoints at multiples of this"),
        switch("--finetune", "load weights only and start at iteration 0"),
        switch("--no-load-optim", "leave the optimizer's states", off="load_optim"),
        switch(
            "--override-opt_param-scheduler",
            "keep Adam's moments, take this run's learning rate schedule and weight decay",
        ),
        switch(
            "--use-checkpoint-opt_param-scheduler",
            "take the checkpoint's learning rate schedule and weight decay",
        ),
        switch(
            "--reset-data-position",
            "begin the training samples anew; weights, moments and schedule go on",
        ),
        switch("--no-load-rng", "leave the random states", off="load_rng"),
        switch(
            "--exit-on-missing-checkpoint",
            "stop if --load is the folder of --save and holds no checkpoint",
        ),
        switch("--use-checkpoint-args", "the architecture comes from the checkpoint in --load"),
    ),
    "logging": (
        flag("--log-interval", count, 100, help="iterations between log lines"),
        switch("--log-throughput", "Megatron's throughput field in the log line"),
        flag("--tensorboard-dir"),
        flag("--wandb-project"),
        flag("--metrics-jsonl", metavar="FILE", help="one JSON object a line: every iteration"),
        flag(
            "--heartbeat-seconds",
            real(0.0, 86400.0),
            60.0,
            metavar="S",
            help="in a step longer than S seconds, say every S seconds how far it is; 0 never",
        ),
    ),
}

OTHER_SPELLINGS = {
    "--override-opt-param-scheduler": "--override-opt_param-scheduler",
    "--use-checkpoint-opt-param-scheduler": "--use-checkpoint-opt_param-scheduler",
}
"""Flags that Megatron spells in two ways."""

SWITCHES = frozenset(
    name for group in FLAGS.values() for name, options in group if "action" in options
)
"""Flags that take no value."""

NOT_YET: dict[str, str] = {
    # Our features on their way.
    "--verify-recompute": "recomputed values are not compared yet",
    "--sft": "there is no fine-tuning dataset yet",
    "--seq-length-schedule": "the sequence length is constant",
    "--attention-backend unfused": "local is attention in matrix products",
    "--async-save": "checkpoints are written before training goes on",
    "--profile": "there is no profiler yet",
    # Megatron's that people reach for and that the design leaves out or that wait for a reason.
    "--pipeline-model-parallel-size": "the design has no pipeline: tensor x context x data only",
    "--expert-model-parallel-size": "there are no mixture-of-experts layers",
    "--num-experts": "there are no mixture-of-experts layers",
    "--fp16": "give --bf16, or neither for fp32",
    "--fp8-format": "give --bf16, or neither for fp32",
    "--overlap-grad-reduce": "gradients are reduced after the last micro-batch",
    "--overlap-param-gather": "parameters are gathered before the next step begins",
    "--train-samples": "give --train-iters",
    "--rotary-interleaved": "a rotated pair is an entry of each half of a head",
    "--no-rope-freq": "every layer rotates",
    "--multi-latent-attention": "keys and values have heads of their own",
    "--rampup-batch-size": "the batch size is constant",
}
