"""Filters warnings of megatron-core and torch that appear on every start and need no action."""

import logging
import warnings


def quiet_megatron_core() -> None:
    """Filter megatron-core's warnings; must run before it is imported."""
    # Transformer Engine and Apex are optional; a flag that needs one of them raises an error.
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed", category=UserWarning)
    # Megatron-core calls collectives by names that torch 2.13 deprecates.
    warnings.filterwarnings(
        "ignore", message=r"`torch.distributed.*deprecated", category=FutureWarning
    )
    # Its optimizer reads .grad of every shard, and torch keeps gradients of leaves only.
    warnings.filterwarnings(
        "ignore", message=".*grad attribute of a Tensor that is not a leaf", category=UserWarning
    )
    # On a CPU its "GPU" generator is the CPU's own: it warns whenever it forks both.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def quiet_fully_shard() -> None:
    """Filter a warning of FSDP2."""
    # The embedding of one sample returns a view. Only an in-place operation that autograd records
    # could break it, and there is none: streamed layers write through an alias.
    warnings.filterwarnings(
        "ignore", message=r"FSDP2-wrapped module .* returned a view", category=UserWarning
    )
