"""How far a reader goes from a layer to the all-to-all and to the attention kernel.

Measured where it happens: the functions of the package on the stack, from the layer's forward on.
"""

import traceback
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

import megatron_untied
from megatron_untied.config import MemoryConfig, ParallelConfig
from megatron_untied.context_parallel.kernels import AttentionKernel
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import batch, make_model, parallel_groups, tiny

PACKAGE = str(Path(megatron_untied.__file__).parent)


def path_below_the_layer() -> list[tuple[str, str]]:
    """(file, function) from ``StreamedTransformerLayer.forward`` to the caller's caller."""
    frames = [
        f
        for f in traceback.extract_stack()[:-2]
        if f.filename.startswith(PACKAGE) and not f.name.startswith("<")  # <listcomp> is a line
    ]
    layer = f"{PACKAGE}/streaming/layer.py"
    first = next(i for i, f in enumerate(frames) if f.filename == layer and f.name == "forward")
    return [(f.filename.removeprefix(PACKAGE), f.name) for f in frames[first:]]


def paths(group) -> dict[str, list[tuple[str, str]]]:
    found = {}

    def recording(name, function):
        def call(*args, **kwargs):
            if name not in found:  # the first is in the first layer's forward
                found[name] = path_below_the_layer()
            return function(*args, **kwargs)

        return call

    parallel = ParallelConfig(context_parallel_size=2, heads_per_chunk=2)
    groups = parallel_groups(parallel)
    config = tiny()
    memory = MemoryConfig(recompute_granularity="full")
    model = make_model(config, parallel, memory, groups=groups)
    layout = model.decoder.layers[0].self_attention.context.layout
    data = {name: layout.shard(x) for name, x in batch(config, 24, 1).items()}
    with (
        patch.object(dist, "all_to_all_single", recording("exchange", dist.all_to_all_single)),
        patch.object(AttentionKernel, "forward", recording("kernel", AttentionKernel.forward)),
    ):
        model(**data).backward()
    return found


def test_the_way_from_the_layer_is_short():
    found, _ = run_on_ranks(paths, 2)
    to_exchange, to_kernel = found["exchange"], found["kernel"]
    assert len(to_exchange) <= 7, to_exchange
    assert len({file for file, _ in to_exchange}) <= 3, to_exchange
    # The kernel's own forward is one function and one file more.
    assert len(to_kernel) + 1 <= 6, to_kernel
    assert len({file for file, _ in to_kernel}) + 1 <= 3, to_kernel
