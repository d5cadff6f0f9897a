"""Print the flags that turn a run into a rehearsal: the same features at sizes for two CPU cores.

    python tools/rehearsal_flags.py FLAGS

The first line is the number of ranks. Every further line is a word to put behind FLAGS, those of
pretrain_gpt.py. Each kind of parallelism that the run has stays, over two ranks; layers, widths,
the sequence and its tiles shrink; a few iterations train, with a checkpoint halfway. The launchers
in examples/ call this for --rehearse.
"""

import argparse
import sys
from collections.abc import Sequence

from megatron_untied.checkpoint.run_config import read_model_config
from megatron_untied.cli.arguments import defaults, parse_flags, with_preset
from megatron_untied.config import ModelConfig, ParallelConfig
from megatron_untied.planner.weights import num_parameters

NUM_LAYERS = 4
MODEL = f"--num-layers {NUM_LAYERS} --hidden-size 64 --ffn-hidden-size 128 --kv-channels 8"
RUN = (
    "--seq-length 512 --micro-batch-size 1 --global-batch-size 2 "
    "--train-iters 4 --lr-decay-iters 4 --lr-warmup-iters 1 --distributed-backend gloo "
    "--attention-backend auto --transformer-impl local"
)
MOST_WEIGHTS = 10**8
"""Of a checkpoint that CPUs can train."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the number of ranks and the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s FLAGS",
        allow_abbrev=False,
    )
    _, training = parser.parse_known_args(argv)
    try:
        num_ranks, flags = rehearsal(training)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print("\n".join([str(num_ranks), *flags]))


def rehearsal(argv: Sequence[str]) -> tuple[int, list[str]]:
    """Ranks, and flags to put behind ``argv``.

    Raises:
        ValueError: flags that cannot be, or a checkpoint too large for CPUs.
    """
    given = with_preset(parse_flags(argv))
    values = defaults() | given
    flags = RUN.split()
    if values["use_checkpoint_args"]:
        num_layers = _small_checkpoint(values["load"], values["ckpt_step"]).num_layers
    else:
        num_layers, flags = NUM_LAYERS, [*MODEL.split(), *flags]
    if values["tokenizer_type"] == "NullTokenizer" and not values["use_checkpoint_args"]:
        flags += ["--vocab-size", "1000"]
    limits = {"recompute_num_layers": 2, "eval_iters": 1, "loss_chunk_size": 96,
              "sequence_tile_size": 96, "lr_wsd_decay_iters": 1, "eval_interval": 2}  # fmt: skip
    limits |= {"cpu_offloading_num_layers": num_layers, "attention_output_layers": num_layers}
    for name, most in limits.items():
        if isinstance(given.get(name), int):  # not "auto" or "all"
            flags += ["--" + name.replace("_", "-"), str(min(given[name], most))]
    if values["save"]:
        flags += ["--save-interval", "2"]
    for name in ("metrics_jsonl", "wandb_project"):  # not among those of a real run
        if values[name]:
            flags += ["--" + name.replace("_", "-"), f"{values[name]}-rehearsal"]
    num_ranks, parallel = _parallel(values)
    return num_ranks, flags + parallel


def _parallel(values: dict) -> tuple[int, list[str]]:
    """At most two tensor-parallel, Ulysses and ring ranks; each attends with as many heads."""
    names = "cp_comm_type", "context_parallel_size", "hierarchical_context_parallel_sizes"
    num_ulysses, num_ring = ParallelConfig(**{n: values[n] for n in names}).num_ulysses_and_ring
    t, a, p = (min(n, 2) for n in (values["tensor_model_parallel_size"], num_ulysses, num_ring))
    flags = ["--tensor-model-parallel-size", str(t), "--context-parallel-size", str(a * p)]
    if values["hierarchical_context_parallel_sizes"]:
        flags += ["--hierarchical-context-parallel-sizes", str(a), str(p)]
    if isinstance(u := values["heads_per_chunk"], int):
        flags += ["--cp-heads-per-chunk", str(max(1, u // num_ulysses) * a)]
    return t * a * p, flags


def _small_checkpoint(load: str, iteration: int | None) -> ModelConfig:
    model = read_model_config(load, iteration)
    weights = num_parameters(model)
    if weights > MOST_WEIGHTS:
        raise ValueError(
            f"the checkpoint in {load} has {weights:,} weights, and a rehearsal trains at "
            f"most {MOST_WEIGHTS:,} on CPUs; give a tiny checkpoint, or a folder that does not "
            "exist for random weights"
        )
    return model


if __name__ == "__main__":
    main()
