"""Silences what megatron-core and torch say on every start and nobody can act on."""

import logging
import warnings


def quiet_megatron_core() -> None:
    """Takes effect on imports of megatron.core that come after."""
    # Transformer Engine and Apex are optional here; what needs one of them says so itself.
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed", category=UserWarning)
    # It calls collectives by names that torch 2.13 has begun to retire.
    warnings.filterwarnings(
        "ignore", message=r"`torch.distributed.*deprecated", category=FutureWarning
    )
    # Its optimizer asks every shard for a gradient, which torch keeps for leaves only.
    warnings.filterwarnings(
        "ignore", message=".*grad attribute of a Tensor that is not a leaf", category=UserWarning
    )
    # On a CPU its "GPU" generator is the CPU's own, and it warns at every fork of the two.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def quiet_fully_shard() -> None:
    """Takes effect on full sharding that runs later."""
    # The embedding of one sample returns a view. It would matter to an in-place operation that
    # autograd records: there is none, streamed layers write through an alias.
    warnings.filterwarnings(
        "ignore", message=r"FSDP2-wrapped module .* returned a view", category=UserWarning
    )
