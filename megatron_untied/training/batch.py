"""From the samples of a dataset to the micro-batches that one rank computes on."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.utils.data import Dataset

from megatron_untied.checkpoint.agreement import on_every_rank
from megatron_untied.context_parallel.sequence import SequenceInfo
from megatron_untied.data.loader import micro_batches
from megatron_untied.training.config import RunConfig
from megatron_untied.training.initialize import errors_in_one_line


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """This rank's shard of a micro-batch, on its device."""

    tokens: Tensor
    """[b, s/p] int64."""
    labels: Tensor
    """[b, s/p] int64: the token after each, which may be the next rank's first."""
    loss_mask: Tensor
    """[b, s/p] fp32: 1 where the label counts, 0 where it does not."""
    sequence: SequenceInfo = field(default_factory=SequenceInfo)
    """Positions of these tokens, and documents of the whole sequences."""


GetBatch = Callable[[dict[str, Tensor], RunConfig, ProcessGroupCollection], Batch]
"""(whole micro-batch, tensors [b, s] on the host; config; groups) -> this rank's shard of it."""


def global_batches(
    dataset: Dataset,
    config: RunConfig,
    groups: ProcessGroupCollection,
    get_batch: GetBatch,
    consumed_samples: int,
) -> Iterator[list[Batch]]:
    """For ever: what this rank computes on in one optimizer step, its micro-batches in order.

    Collective over all ranks with every item: a sample that one rank cannot read ends all of them,
    with its message in one line.
    """
    samples = micro_batches(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=config.batch.micro_batch_size,
        data_parallel_rank=groups.dp.rank(),
        data_parallel_size=groups.dp.size(),
        num_workers=config.data.num_workers,
    )
    num_micro_batches = config.batch.num_micro_batches(groups.dp.size())

    def read() -> list[Batch]:
        some = itertools.islice(samples, num_micro_batches)
        return [get_batch(one, config, groups) for one in some]

    while True:
        with errors_in_one_line():
            batches = on_every_rank(read)
        yield batches


def count_valid_tokens(batches: list[Batch], group: dist.ProcessGroup) -> int:
    """Tokens that count in the loss, over all ``batches`` of all ranks of ``group``; collective."""
    total = sum(batch.loss_mask.count_nonzero() for batch in batches)
    dist.all_reduce(total, group=group)
    return int(total)
