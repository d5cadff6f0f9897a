"""The flags of a short run of the tiny model, to change one at a time."""

from collections.abc import Mapping

from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.config.run import RunConfig
from tests.support.tiny_model import TINY

MODEL_FLAGS = {
    "--num-layers": TINY.num_layers,
    "--hidden-size": TINY.hidden_size,
    "--num-attention-heads": TINY.num_attention_heads,
    "--group-query-attention": True,
    "--num-query-groups": TINY.num_query_groups,
    "--kv-channels": TINY.kv_channels,
    "--ffn-hidden-size": TINY.ffn_hidden_size,
    "--swiglu": TINY.swiglu,
    "--normalization": TINY.normalization,
    "--disable-bias-linear": not TINY.add_bias_linear,
    "--untie-embeddings-and-output-weights": TINY.untie_embeddings_and_output_weights,
}
RUN_FLAGS = {
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": TINY.vocab_size - 1,  # NullTokenizer adds an end of document
    "--seq-length": 64,
    "--micro-batch-size": 1,
    "--global-batch-size": 4,
    "--train-iters": 10,
    "--lr": "1e-3",
    "--mock-data": True,
    "--num-workers": 0,
    "--log-interval": 5,
    "--eval-iters": 0,
}


def command_line(**changes: object) -> list[str]:
    """Argument list of the tiny run; ``seq_length=32`` sets a flag, ``mock_data=None`` drops it."""
    changed = {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    if changed.get("--activation-disk") and changed.get("--activation-disk-gib") is None:
        changed["--activation-disk-gib"] = "all"  # any host holds a tiny run
    return words(MODEL_FLAGS | RUN_FLAGS | changed)


def words(flags: Mapping[str, object]) -> list[str]:
    """Flags as words: ``True`` is a flag without a value, ``None`` no flag."""
    argv = []
    for name, value in flags.items():
        if value is not None:
            argv += [name] if value is True else [name, *str(value).split()]
    return argv


def tiny_config(world_size: int = 1, **changes: object) -> RunConfig:
    """The checked configuration of the tiny run with some flags changed."""
    return parse_arguments(command_line(**changes), world_size=world_size)
