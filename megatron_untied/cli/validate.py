"""Checks of a configuration as a whole: arithmetic on its values and the world size.

Every rank checks the same values before any collective, so all ranks fail alike. A message has the
flag and its value, the constraint, and a valid value.
"""

import difflib
import functools
import math
from collections.abc import Iterator
from fnmatch import fnmatchcase

from megatron_untied.cli.stages import stage_problems
from megatron_untied.config import AdaptationConfig, ModelConfig, ParallelConfig, RotaryConfig
from megatron_untied.config.checkpoint import CheckpointConfig
from megatron_untied.config.data import parse_blend
from megatron_untied.config.parameters import LORA_TARGETS, TRAIN_ALL, parameters
from megatron_untied.config.problems import model_problems
from megatron_untied.config.run import RunConfig, ScheduleConfig
from megatron_untied.context_parallel.sequence import SequenceLayout


def validate(config: RunConfig, world_size: int) -> None:
    """Raise one ``ValueError`` that lists all problems, one per line."""
    found = list(problems(config, world_size))
    if found:
        raise ValueError("\n".join(found))


def problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a message per problem of ``config`` on ``world_size`` ranks.

    Checks whose arithmetic needs valid sizes are skipped after a message about those sizes.
    """
    yield from _ranks(config, world_size)
    wrong_model = list(model_problems(config.model))
    yield from wrong_model
    if wrong_model:
        return  # sizes of 0 would divide below
    yield from _yarn(config.model.rotary)
    yield from _memory(config)
    yield from _adaptation(config)
    yield from _tensor_parallel(config)
    wrong_sizes = list(_hierarchical_sizes(config.parallel))
    yield from wrong_sizes
    if not wrong_sizes:
        yield from _context_parallel(config)
        yield from _heads_per_chunk(config)
    yield from _sharding(config)
    yield from _batch(config, world_size)
    yield from _schedule(config.schedule)
    yield from _schedule_of_checkpoint(config.checkpoint)
    if config.loop.skip_train and not config.evaluation.eval_iters:
        yield "--skip-train only evaluates, but --eval-iters is 0; give --eval-iters 1 or more"
    if config.loop.rerun_on_nan and not config.loop.check_for_nan:
        yield (
            "--rerun-on-nan repeats a step before the run ends at it, and "
            "--no-check-for-nan-in-loss-and-grad skips the step instead; give one of them"
        )
    yield from _optimizer(config)
    yield from _profiling(config, world_size)
    if not wrong_sizes:
        yield from stage_problems(config, functools.partial(_stage, world_size=world_size))
    if config.stages and len(parse_blend(config.data.data_path).prefixes) > 1:
        if parse_blend(config.data.data_path).weights is None:
            yield (
                "--seq-length-schedule: several files without weights are mixed by their numbers "
                "of samples, which depend on the length; give WEIGHT PREFIX WEIGHT PREFIX"
            )


def _stage(config: RunConfig, world_size: int) -> Iterator[str]:
    """What depends on the length, the batch and the rotary embedding."""
    yield from _yarn(config.model.rotary)
    yield from _context_parallel(config)
    yield from _batch(config, world_size)


def _ranks(config: RunConfig, world_size: int) -> Iterator[str]:
    # What remains of the world size is the data-parallel size.
    t = config.parallel.tensor_model_parallel_size
    p = config.parallel.context_parallel_size
    if world_size % (t * p):
        yield (
            f"{world_size} ranks are not a multiple of tensor parallel {t} x context parallel {p}; "
            f"start a multiple of {t * p} ranks, or lower --tensor-model-parallel-size or "
            "--context-parallel-size"
        )


def _yarn(rotary: RotaryConfig) -> Iterator[str]:
    if rotary.scaling == "yarn" and rotary.beta_slow >= rotary.beta_fast:
        yield (
            f"--yarn-beta-slow {rotary.beta_slow} must be below --yarn-beta-fast "
            f"{rotary.beta_fast}; the defaults are 1 and 32"
        )


def _memory(config: RunConfig) -> Iterator[str]:
    offloaded, layers = config.memory.cpu_offloading_num_layers, config.model.num_layers
    if offloaded != "auto" and offloaded > layers:
        yield (
            f"--cpu-offloading-num-layers {offloaded} is more than --num-layers {layers}; "
            f"use {layers}, or all"
        )
    if config.memory.activation_disk and not offloaded:
        yield (
            "--activation-disk has no effect with --cpu-offloading-num-layers 0: what is offloaded "
            f"to the host goes on to the disk; give {layers}, or all"
        )
    kept, granularity = config.memory.attention_output_layers, config.memory.recompute_granularity
    if granularity == "full" and kept not in (None, 0):
        yield (
            f"--attention-output-layers {kept} keeps attention outputs, and "
            "--recompute-granularity full recomputes all of them; give selective"
        )
    elif kept not in (None, "auto") and kept > layers:
        yield (
            f"--attention-output-layers {kept} is more than --num-layers {layers}; use {layers}, "
            "or leave it out"
        )
    group = config.memory.recompute_num_layers
    if group != "auto" and group > layers:
        yield (
            f"--recompute-num-layers {group} is more than "
            f"--num-layers {layers}; use {layers} to keep the input of the first layer only"
        )


def _adaptation(config: RunConfig) -> Iterator[str]:
    adaptation, model, checkpoint = config.adaptation, config.model, config.checkpoint
    given = "--freeze" if adaptation.freeze else "--lora-rank"
    if adaptation == TRAIN_ALL:
        return
    if config.memory.recompute_granularity is None:
        yield f"{given} needs streamed layers; give --recompute-granularity selective"
    if config.transformer_impl != "local":
        yield (
            f"{given} works in megatron-core's own linear layers; leave out --transformer-impl "
            f"{config.transformer_impl}"
        )
    if adaptation.lora_rank is not None:
        yield from _lora(adaptation, model, checkpoint)
        return
    names = list(parameters(model))
    for pattern in adaptation.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            yield (
                f"--freeze {pattern} matches no parameter; names are those of checkpoints, such as "
                f"{', '.join(near or names[:3])}"
            )
    found = parameters(model, 1, adaptation)
    if not any(its.is_trained for its in found.values()):
        yield f"--freeze {' '.join(adaptation.freeze)} leaves nothing to train; freeze less"
    # Megatron-core's frozen linear layer gives its bias no gradient.
    for name, its in found.items():
        bias = name.removesuffix("weight") + "bias"
        if "linear_qkv" in name and not its.is_trained and bias in found and found[bias].is_trained:
            yield (
                f"--freeze leaves {bias} trained without its weight, which is not implemented; "
                "freeze '*.linear_qkv.*'"
            )
            return


def _lora(
    adaptation: AdaptationConfig, model: ModelConfig, checkpoint: CheckpointConfig
) -> Iterator[str]:
    if adaptation.freeze:
        yield "--freeze has no effect with --lora-rank, which trains adapters alone; leave it out"
    if "gate_proj" in adaptation.lora_targets and not model.swiglu:
        if adaptation.lora_targets != LORA_TARGETS:  # the default means: those that there are
            yield "--lora-targets gate_proj is the gate of --swiglu; leave it out"
    if checkpoint.save and not checkpoint.pretrained_checkpoint:
        yield (
            "--save writes the adapters of --lora-rank without the weights that they are for; give "
            "--pretrained-checkpoint, the folder of the weights"
        )
    if checkpoint.finetune:
        yield (
            "--finetune --load takes whole models, and --lora-rank trains adapters of one; give "
            "--pretrained-checkpoint instead of --load, and leave out --finetune"
        )


def _tensor_parallel(config: RunConfig) -> Iterator[str]:
    model, t = config.model, config.parallel.tensor_model_parallel_size
    if config.parallel.sequence_parallel and t == 1:
        yield (
            "--sequence-parallel shards tokens over tensor-parallel ranks, but there is only 1; "
            "leave it out, or give --tensor-model-parallel-size 2"
        )
    # megatron-core asserts the same when it builds a layer, without the flags' names.
    for name, size in (
        ("num-attention-heads", model.num_attention_heads),
        ("num-query-groups", model.num_query_groups),
        ("ffn-hidden-size", model.ffn_hidden_size),
    ):
        if size % t:
            yield (
                f"--{name} {size} is not divisible by --tensor-model-parallel-size {t}; "
                f"use {_divisor(size, t)} tensor-parallel ranks"
            )


def _hierarchical_sizes(parallel: ParallelConfig) -> Iterator[str]:
    sizes, p = parallel.hierarchical_context_parallel_sizes, parallel.context_parallel_size
    if parallel.cp_comm_type != "a2a+p2p":
        if sizes is not None:
            yield (
                f"--hierarchical-context-parallel-sizes {sizes[0]} {sizes[1]} has no effect with "
                f"--cp-comm-type {parallel.cp_comm_type}; use it with a2a+p2p"
            )
        return
    if sizes is None:
        num_ulysses = _divisor(p, max(1, p // 2))  # the largest group that leaves a ring
        yield (
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A R, a ring of R "
            f"groups of A ranks, such as {num_ulysses} {p // num_ulysses}"
        )
    elif math.prod(sizes) != p:
        num_ulysses = _divisor(p, sizes[0])
        yield (
            f"--hierarchical-context-parallel-sizes {sizes[0]} {sizes[1]} are {math.prod(sizes)} "
            f"ranks, but --context-parallel-size is {p}; use {num_ulysses} {p // num_ulysses}"
        )


def _context_parallel(config: RunConfig) -> Iterator[str]:
    parallel, s = config.parallel, config.batch.seq_length
    if config.model.window_size is not None and parallel.cp_comm_type != "a2a":
        yield (
            f"--window-size {config.model.window_size - 1},0 needs whole sequences on each rank; "
            f"--cp-comm-type {parallel.cp_comm_type} shards it in blocks, use a2a"
        )
    p = parallel.context_parallel_size
    t = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    layout = SequenceLayout.of(parallel)
    # A rank's tokens are cut once more by sequence parallelism, whose collectives need equal parts.
    divisor = math.lcm(layout.divisor, p * t)
    if s % divisor:
        over = f"{p} context-parallel" + (f" x {t} sequence-parallel" if t > 1 else "")
        # A causal ring gives each rank two blocks, to balance the work.
        blocks = " with two blocks each" if layout.num_ring > 1 else ""
        yield (
            f"--seq-length {s} is not divisible over {over} ranks{blocks}; "
            f"use {_multiple(s, divisor)}"
        )


def _heads_per_chunk(config: RunConfig) -> Iterator[str]:
    # u: query heads per exchange, over all ranks of a Ulysses group.
    u, num_ulysses = config.parallel.heads_per_chunk, config.parallel.num_ulysses_and_ring[0]
    if u in ("all", "auto"):
        return
    if u % num_ulysses:
        yield (
            f"--cp-heads-per-chunk {u} is not a multiple of the {num_ulysses} ranks of a Ulysses "
            "group, which attend to equal numbers of heads; "
            f"use {_multiple(u, num_ulysses)}"
        )
    t = config.parallel.tensor_model_parallel_size
    heads_per_rank = config.model.num_attention_heads // t
    most = -(-heads_per_rank // num_ulysses) * num_ulysses  # rounded up: ranks may idle
    if u > most:
        yield (
            f"--cp-heads-per-chunk {u} is more than the {heads_per_rank} query heads per "
            f"tensor-parallel rank; use {most} or all for a single exchange"
        )


def _sharding(config: RunConfig) -> Iterator[str]:
    optimization = config.optimization
    if optimization.optimizer_cpu_offload and not optimization.use_torch_fsdp2:
        yield (
            "--optimizer-cpu-offload needs --use-torch-fsdp2, whose optimizer can run on the host; "
            "give that instead of --use-distributed-optimizer, or leave out the offload"
        )
    if not optimization.use_torch_fsdp2:
        return
    if optimization.use_distributed_optimizer:
        yield (
            "--use-torch-fsdp2 shards all that --use-distributed-optimizer shards, and weights and "
            "gradients too; give one of them"
        )
    if config.transformer_impl != "local":
        yield (
            f"--use-torch-fsdp2 builds the model on the meta device, but --transformer-impl "
            f"{config.transformer_impl} allocates its layers; give --transformer-impl local"
        )


def _batch(config: RunConfig, world_size: int) -> Iterator[str]:
    batch, parallel = config.batch, config.parallel
    model_ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    data_parallel_size = max(1, world_size // model_ranks)  # too few ranks: see _ranks
    one_pass = batch.micro_batch_size * data_parallel_size
    if batch.global_batch_size % one_pass:
        yield (
            f"--global-batch-size {batch.global_batch_size} is not a multiple of "
            f"--micro-batch-size {batch.micro_batch_size} x {data_parallel_size} data-parallel "
            f"ranks; use {_multiple(batch.global_batch_size, one_pass)}"
        )
    # Rotary embedding works at any length: the limit guards against one by mistake.
    if batch.seq_length > config.model.max_position_embeddings:
        yield (
            f"--seq-length {batch.seq_length} is above --max-position-embeddings "
            f"{config.model.max_position_embeddings}; give --max-position-embeddings "
            f"{batch.seq_length}"
        )


def _optimizer(config: RunConfig) -> Iterator[str]:
    optimization, lr = config.optimization, config.schedule.lr
    for name, beta in (("1", optimization.adam_beta1), ("2", optimization.adam_beta2)):
        if beta >= 1:  # the bias correction divides by 1 - beta^step
            yield f"--adam-beta{name} {beta} must be below 1, such as 0.9"
    # AdamW multiplies weights by 1 - lr * weight_decay.
    if lr * optimization.weight_decay >= 1:
        yield (
            f"--weight-decay {optimization.weight_decay} at --lr {lr} changes the sign of weights "
            "in a step; their product must be below 1, use --weight-decay 0.1"
        )


def _schedule(schedule: ScheduleConfig) -> Iterator[str]:
    for name, value in (("min-lr", schedule.min_lr), ("lr-warmup-init", schedule.lr_warmup_init)):
        if value > schedule.lr:  # a decay or a warmup would go the other way
            yield f"--{name} {value} is above --lr {schedule.lr}; use {schedule.lr / 10}"
    if schedule.lr_warmup_iters >= schedule.lr_decay_iters:  # megatron-core asserts it
        yield (
            f"--lr-warmup-iters {schedule.lr_warmup_iters} is not below --lr-decay-iters "
            f"{schedule.lr_decay_iters} (default: --train-iters); "
            f"use {schedule.lr_decay_iters // 10}"
        )
    if schedule.lr_decay_style != "WSD":
        return
    # Warmup and the final decay must not overlap; the constant part between them may be empty.
    annealing, available = schedule.lr_wsd_decay_iters, schedule.lr_decay_iters
    if annealing is None:
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-iters, such as {max(1, available // 10)}"
    elif annealing > available - schedule.lr_warmup_iters:
        yield (
            f"--lr-wsd-decay-iters {annealing} is more than the iterations between warmup and "
            f"--lr-decay-iters; use at most {available - schedule.lr_warmup_iters}"
        )


def _schedule_of_checkpoint(checkpoint: CheckpointConfig) -> Iterator[str]:
    if not checkpoint.use_checkpoint_opt_param_scheduler:
        return
    flag = "--use-checkpoint-opt_param-scheduler"
    # megatron-core's scheduler asserts this when it is built, after the model.
    if checkpoint.override_opt_param_scheduler:
        yield f"{flag} and --override-opt_param-scheduler cannot be combined; give one of them"
    if checkpoint.finetune or not checkpoint.load_optim:
        other = "--finetune" if checkpoint.finetune else "--no-load-optim"
        yield f"{flag} has no effect with {other}, which restarts the schedule; give one of them"


def _profiling(config: RunConfig, world_size: int) -> Iterator[str]:
    profiling = config.profiling
    if not profiling.profile:
        return
    if config.logging.tensorboard_dir is None:
        yield "--profile writes a trace per rank into --tensorboard-dir; give that folder too"
    if not profiling.iterations:
        start = profiling.profile_step_start
        yield (
            f"--profile-step-end {profiling.profile_step_end} is not above --profile-step-start "
            f"{start}, so no step is traced; use {start + 1}"
        )
    for rank in profiling.profile_ranks:
        if rank >= world_size:
            yield f"--profile-ranks {rank} is not one of the ranks 0 to {world_size - 1}"


def _multiple(value: int, of: int) -> int:
    """The greatest multiple of ``of`` up to ``value``, or ``of``."""
    return max(of, value - value % of)


def _divisor(value: int, below: int) -> int:
    """The greatest divisor of ``value`` up to ``below``."""
    return next(n for n in range(below, 0, -1) if value % n == 0)
