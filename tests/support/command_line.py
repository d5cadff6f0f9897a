"""The flags of a tiny run, to change one at a time."""

from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.config.run import RunConfig

TINY = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--num-attention-heads": "8",
    "--group-query-attention": True,
    "--num-query-groups": "4",
    "--ffn-hidden-size": "96",
    "--swiglu": True,
    "--normalization": "RMSNorm",
    "--disable-bias-linear": True,
    "--untie-embeddings-and-output-weights": True,
    "--seq-length": "64",
    "--micro-batch-size": "1",
    "--global-batch-size": "4",
    "--train-iters": "10",
    "--lr": "1e-3",
    "--mock-data": True,
    "--num-workers": "0",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "250",
    "--log-interval": "5",
    "--eval-iters": "0",
}


def command_line(**changes: object) -> list[str]:
    """Argument list of the tiny run; ``seq_length=32`` sets a flag, ``mock_data=None`` drops it."""
    flags = TINY | {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    argv = []
    for name, value in flags.items():
        if value is not None:
            argv += [name] if value is True else [name, *str(value).split()]
    return argv


def tiny_config(world_size: int = 1, **changes: object) -> RunConfig:
    """The checked configuration of the tiny run with some flags changed."""
    return parse_arguments(command_line(**changes), world_size=world_size)
