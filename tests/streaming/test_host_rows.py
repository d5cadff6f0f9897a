"""Residuals on the host pass the device tile by tile, and autograd as stand-ins."""

import pytest
import torch

from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.residual import Rows
from megatron_untied.streaming.copy_engine import CopyEngine, CpuStreams
from megatron_untied.streaming.host_arena import HostArena, allocate_pageable
from megatron_untied.streaming.host_tensors import HostRows
from megatron_untied.tiling import tiles_of
from tests.support.simulated_streams import LateStreams

SHAPE = torch.Size((11, 2, 3))  # [n, b, m]
CPU = torch.device("cpu")


class Factory:
    """Rows of one arena and one workspace, whose copies run as late as they may."""

    def __init__(self, streams=LateStreams):
        self.arena = HostArena(CopyEngine(streams()), allocate_pageable)
        self.workspace = Workspace()

    def host(self, values=None) -> HostRows:
        rows = HostRows(SHAPE, torch.float32, CPU, self.arena, self.workspace)
        if values is not None:
            rows.fill(values).wait()
        return rows

    def rows(self, on_host: bool, values=None) -> Rows:
        if on_host:
            return self.host(values)
        return Rows(torch.zeros(SHAPE) if values is None else values.clone())


def some_values(seed=0):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("source", [False, True])
@pytest.mark.parametrize("target", [False, True])
def test_a_tile_is_read_before_its_successor_is_written(source, target, size):
    make, values, tiles = Factory(), some_values(), tiles_of(SHAPE[0], size)
    x, y = make.rows(source, values), make.rows(target)
    for into in (y, x):  # into other rows, then in place
        for tile, (read, written) in zip(tiles, x.updates(tiles, into), strict=True):
            assert torch.equal(read, values[tile.local])
            written.copy_(read * 2)
    assert torch.equal(y.on_device(), values * 2)
    assert torch.equal(x.on_device(), values * 2)
    assert not make.arena.engine.device_tensors  # every copy was waited for


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_gradient_is_updated_beside_a_residual_that_is_read(size):
    make, tiles = Factory(), tiles_of(SHAPE[0], size)
    x, g = make.host(some_values(0)), make.host(some_values(1))
    for _ in range(2):
        updates = g.updates(tiles, g, "gradient_tiles")
        for tile, x_tile, (read, left) in zip(tiles, x.tiles(tiles), updates, strict=True):
            assert torch.equal(x_tile, some_values(0)[tile.local])
            torch.add(read, x_tile, out=left)
    expected = some_values(1) + some_values(0) + some_values(0)
    assert torch.equal(g.on_device(), expected)
    assert set(make.workspace.held) == {"row_tiles", "gradient_tiles"}


def test_the_device_holds_two_tiles_or_one():
    make = Factory()
    for size, held in ((3, 2 * 3), (100, 11)):
        make.workspace.release()
        for _ in make.host(some_values()).tiles(tiles_of(SHAPE[0], size)):
            pass
        assert make.workspace.num_bytes == held * 2 * 3 * 4


def test_rows_are_one_list_of_tokens_for_the_loss():
    make, values = Factory(), some_values()
    rows = make.host(values).flat()
    assert rows.shape == (22, 3)
    found = torch.cat([x.clone() for x in rows.tiles(tiles_of(22, 5))])
    assert torch.equal(found, values.view(22, 3))


def test_a_stand_in_carries_its_rows_and_no_data():
    rows = Factory(CpuStreams).host(some_values())
    tensor = rows.as_tensor()
    assert (tensor.shape, tensor.dtype) == (SHAPE, torch.float32)
    assert tensor.untyped_storage().nbytes() == 4
    assert Rows.of(tensor.view_as(tensor)) is rows
    assert Rows.of(tensor.detach().requires_grad_()) is rows
    assert (tensor + 1).isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"):
        tensor.add_(1)


def test_the_memory_lives_as_long_as_its_stand_ins():
    make = Factory(CpuStreams)
    tensors = [make.host(some_values()).as_tensor().view(SHAPE) for _ in range(2)]
    used = make.arena.used_bytes
    del tensors[0]
    assert make.arena.used_bytes == used // 2
    Rows.of(tensors[0]).release()
    assert make.arena.used_bytes == 0
    with pytest.raises(AssertionError, match="was released"):
        Rows.of(tensors[0]).on_device()
