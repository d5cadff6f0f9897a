"""The random generators of one rank: Python's, numpy's, torch's and megatron-core's."""

import io
import random
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from megatron_untied.checkpoint.checksums import Part, whole_file
from megatron_untied.checkpoint.directory import require_content, write_durably

PREFIX = "random_"
FILE = PREFIX + "{rank:05d}.pt"
"""Name of the file with the generators of a rank, in the checkpoint's folder."""


def save_random_state(folder: Path, rank: int) -> dict[Part, int]:
    """Write the states of this rank's generators to a file of its own; returns its checksum."""
    kind, keys, *rest = numpy.random.get_state()
    state = {
        "python": random.getstate(),
        # As a tensor: torch.load(weights_only=True) refuses numpy arrays.
        "numpy": (kind, torch.from_numpy(keys.astype(numpy.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        # Dropout inside tensor-parallel regions draws from these, not from the default generator.
        "megatron": get_cuda_rng_tracker().get_states(),
    }
    buffer = io.BytesIO()  # tens of KB; write_durably takes bytes
    torch.save(state, buffer)
    path = folder / FILE.format(rank=rank)
    write_durably(path, buffer.getvalue())
    return whole_file(path, buffer.getvalue())


def read_random_state(folder: Path, rank: int) -> dict[str, Any]:
    """The states that :func:`save_random_state` wrote.

    Raises:
        ValueError: the file is missing or damaged.
    """
    path = folder / FILE.format(rank=rank)
    if not path.is_file():
        raise ValueError(f"{path} is missing; give --no-load-rng to continue without it")
    require_content(path)
    try:
        # Generator states are host tensors. weights_only: nothing in the file is executed.
        state = torch.load(path, map_location="cpu", weights_only=True)
        # Into generators of its own: a state that does not fit is met before anything changes.
        random.Random().setstate(state["python"])
        numpy.random.RandomState().set_state(_of_numpy(state))
        torch.Generator().set_state(state["torch"])
        for of_name in (state["megatron"] | {"": state["cuda"]}).values():
            # Of a GPU, or of a run on CPUs, which has none.
            assert of_name is None or of_name.dtype == torch.uint8
        return state
    except Exception as error:  # a damaged pickle can raise any exception
        raise ValueError(f"{path} is damaged; give --no-load-rng to continue without it") from error


def load_random_state(folder: Path, rank: int) -> None:
    """Restore the states of this rank's generators."""
    state = read_random_state(folder, rank)
    random.setstate(state["python"])
    numpy.random.set_state(_of_numpy(state))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["megatron"])


def _of_numpy(state: dict[str, Any]) -> tuple:
    kind, keys, *rest = state["numpy"]
    return kind, keys.numpy().astype(numpy.uint32), *rest


def seed_generators(seed: int) -> None:
    """Seed every generator; tensor-parallel ranks differ where megatron-core requires it."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # numpy refuses larger seeds
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
