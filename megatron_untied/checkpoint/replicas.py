"""Checks that ranks that hold the same values hold the same bits.

Data-parallel ranks hold equal weights, tensor-parallel ranks equal norms, and without sharding all
of them equal moments. A flipped bit on one of them is no error by itself: training goes on, with
ranks that compute different functions, and a checkpoint keeps the values of one of them.
"""

import socket
from collections import defaultdict

import torch
from torch import Tensor

from megatron_untied.checkpoint.collective_errors import gather_objects
from megatron_untied.checkpoint.state import CheckpointState, tensors_of
from megatron_untied.config.problems import first_few
from megatron_untied.dtypes import bit_checksum
from megatron_untied.sharding.tensor_slice import TensorSlice


def require_equal_replicas(state: CheckpointState) -> None:
    """Compare by checksum every part of the state that more than one rank holds.

    Collective over all ranks. Reads this rank's weights and moments once, and gathers a few numbers
    for each parameter.

    Raises:
        ValueError: on every rank, with the first part that differs and the ranks that hold each
            version of it, the most frequent one first.
    """
    sums: dict[tuple[str, TensorSlice], Tensor] = {}
    held = [
        (name, shard.name, tensor, shard.slices)
        for shard in state.shards.shards(with_moments=state.shards.has_moments)
        for name, tensor in tensors_of(shard)
    ]
    for name, tensor in state.shards.working_copies():
        held.append((f"the copy of {name} that is computed with", name, tensor, None))
    for name, parameter, tensor, slices in held:
        for part in state.layouts[parameter].global_slices(tensor, slices):
            place = TensorSlice(part.offsets, tuple(part.tensor.shape))
            sums[name, place] = bit_checksum(part.tensor)
    # On the device each is a few kernels; one transfer for all.
    places, values = list(sums), torch.stack([*sums.values()]).tolist() if sums else []
    by_rank = gather_objects((socket.gethostname(), dict(zip(places, values, strict=True))))
    versions = defaultdict(lambda: defaultdict(list))
    for rank, (host, own) in enumerate(by_rank):
        for place, value in own.items():
            versions[place][value].append(f"{rank} ({host})")
    differing = {place: found for place, found in versions.items() if len(found) > 1}
    if differing:
        (name, place), found = next(iter(differing.items()))
        groups = sorted(found.values(), key=len, reverse=True)
        listed = ", another on ".join(f"ranks {first_few(group, 8)}" for group in groups)
        raise ValueError(
            f"ranks hold different values of {name} at {place.offsets}, and of "
            f"{len(differing) - 1} other parts that should be equal: one version on {listed}. "
            "Memory or a link is damaged: nothing was saved; leave out that device and resume from "
            "an earlier checkpoint"
        )
