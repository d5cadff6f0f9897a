import contextlib
import importlib.machinery
import importlib.util
import socket
import sys
import time
import types
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron_untied.phases import Phase
from megatron_untied.step_progress import LayerProgress, StepProgress
from megatron_untied.training import liveness
from megatron_untied.training.liveness import (
    Heartbeat,
    PeerProgress,
    heartbeat_line,
    is_failed_collective,
)
from tests.support.command_line import command_line, tiny_config
from tests.support.launch import launch


def heartbeat(said: list[str], *, every: float, store=None, rank=0, world_size=1) -> Heartbeat:
    return Heartbeat(
        StepProgress(lambda: None),
        PeerProgress(store or dist.HashStore(), rank, world_size),
        say=said.append,
        every_seconds=every,
        timeout_seconds=600,
    )


@contextlib.contextmanager
def attending(layer: LayerProgress, chunks: int) -> Iterator[None]:
    """In the forward of a layer, after some of its chunks."""
    with layer.phase(Phase.ATTENTION_FORWARD):
        for chunk in range(chunks):
            with layer.chunk(chunk):
                pass
        yield


def test_speaks_in_long_steps_only_and_at_its_interval():
    said = []
    beating = heartbeat(said, every=60)
    progress = beating._progress
    progress.begin("iteration 1", 3.5)
    now = progress.began
    for seconds in range(0, 59, 10):
        beating._beat(now + seconds)
    assert not said
    with attending(progress.for_layer(0, num_layers=1, num_chunks=2), chunks=1):
        for seconds in range(60, 200, 10):
            beating._beat(now + seconds)
    assert len(said) == 3
    assert said[0] == (
        "heartbeat: iteration 1, attention forward, layer 1 of 1, chunk 1 of 2 | 14.3% | "
        "elapsed: 0:01:00 | ETA: 0:06:00 |"
    )
    progress.begin("iteration 2", 3.5)
    progress.began = now + 200
    beating._beat(now + 250)
    assert len(said) == 3


def test_interval_0_says_nothing():
    said = []
    beating = heartbeat(said, every=0)
    beating._beat(time.monotonic() + 10_000)
    assert not said


def test_no_end_is_foreseen_before_any_attention_is_done():
    progress = StepProgress(lambda: None)
    progress.begin("iteration 1", 3.5)
    assert "0.0% | elapsed: 0:02:00 | ETA: unknown |" in heartbeat_line(
        progress.last_completed(), 120
    )


def test_a_rank_that_gets_no_further_says_once_who_is_missing(capsys):
    store = dist.HashStore()
    beating, other = (heartbeat([], every=0, store=store, rank=r, world_size=2) for r in range(2))
    layers = []
    for each in (beating, other):
        each._progress.begin("iteration 1", 1.0)
        layers.append(each._progress.for_layer(4, num_layers=8, num_chunks=2))
    now = time.monotonic()
    with attending(layers[0], chunks=2), attending(layers[1], chunks=1):
        for seconds in (0, 500, 545, 600):
            other._beat(now)
            beating._beat(now + seconds)  # looks at 360 s, warns at 540
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert (
        "rank 1 did not arrive, rank 1 last at iteration 1, attention forward, layer 5 of 8, "
        f"chunk 1 of 2, on {socket.gethostname()}; reported by rank 0 at"
    ) in said[0]


def test_a_rank_without_a_beat_is_named_though_it_is_at_the_same_point(capsys):
    """A node that was cut off while all ranks waited in one collective."""
    store = dist.HashStore()
    ranks = [heartbeat([], every=0, store=store, rank=rank, world_size=3) for rank in range(3)]
    now = time.monotonic()
    for seconds in (0, 400, 545):
        for number, each in enumerate(ranks):
            if number != 2 or seconds < 400:
                each._beat(now + (seconds if number == 0 else 0))
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("warning: rank 2 gave no sign of life, rank 2 last at start, setup, on ")
    # A rank that has left because of an error of its own is no dead node.
    ranks[1]._peers.publish(ranks[1]._progress.last_completed(), ends=True)
    ranks[0]._peers.look()
    assert ranks[0]._diagnosis().startswith("rank 2 gave no sign of life")


def test_a_store_that_does_not_answer_is_said_within_seconds(monkeypatch):
    class CutOff(dist.HashStore):
        def check(self, keys):
            time.sleep(60)

    monkeypatch.setattr(liveness, "STORE_SECONDS", 0.2)
    beating = heartbeat([], every=0, store=CutOff(), world_size=2)
    began = time.monotonic()
    assert beating._diagnosis().startswith("the store of all ranks does not answer ")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ({0: 1, 1: 1}, "ranks 0, 1 are at the same point; reported by rank 0 at iteration 1"),
        (
            {0: 0, 1: 2},
            "rank 0 is behind; reported by rank 0 at iteration 1, data loading; "
            "no report from rank 2; rank 1 last at ",
        ),
        (
            {0: 2, 1: 0, 2: 0},
            "ranks 1, 2 did not arrive, ranks 1, 2 last at iteration 1, data loading",
        ),
        (
            {0: 1},
            "reported by rank 0 at iteration 1, attention forward, layer 1 of 1, "
            "chunk 1 of 2; no report from ranks 1, 2",
        ),
    ],
)
def test_explains_other_ways_to_stop(chunks, text):
    store, places = dist.HashStore(), {}
    for rank, count in chunks.items():
        progress = StepProgress(lambda: None)
        progress.begin("iteration 1", 1.0)
        layer = progress.for_layer(0, 1, 2)
        with attending(layer, count) if count else contextlib.nullcontext():
            places[rank] = progress.last_completed()
        PeerProgress(store, rank, 3).publish(places[rank])
    assert text in PeerProgress(store, 0, 3).diagnose(places[0])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (dist.DistBackendError("NCCL"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Timed out"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("timeout"), False),
    ],
)
def test_knows_a_failed_collective(error, expected):
    assert is_failed_collective(error) is expected


def train_with_a_quick_heartbeat(rank: int) -> None:
    flags = {"context_parallel_size": 2, "heartbeat_seconds": 0.01, "train_iters": 5}
    sys.argv = ["pretrain_gpt.py", *command_line(**flags)]
    pretrain_gpt.main()


def test_a_run_says_how_far_its_steps_are_on_the_first_rank(tmp_path):
    said = launch(train_with_a_quick_heartbeat, 2, tmp_path)
    assert "heartbeat: iteration" in said[0]
    assert "layer 2 of 2" in said[0]
    assert "heartbeat" not in said[1]


class RankMonitorClientError(Exception):
    pass


class RankMonitorClient:
    """Of nvidia-resiliency-ext 0.4: the calls that are made, in the order that it demands."""

    made: list["RankMonitorClient"] = []

    def __init__(self):
        self.beats, self.is_initialized = 0, False
        self.made.append(self)

    def init_workload_monitoring(self):
        self.is_initialized = True

    def send_heartbeat(self):
        assert self.is_initialized
        self.beats += 1


@pytest.fixture
def extension(monkeypatch):
    """A stand-in for the package, which is optional."""
    tolerance = types.ModuleType("nvidia_resiliency_ext.fault_tolerance")
    tolerance.RankMonitorClient, tolerance.RankMonitorClientError = (
        RankMonitorClient,
        RankMonitorClientError,
    )
    package = types.ModuleType("nvidia_resiliency_ext")
    package.fault_tolerance = tolerance
    package.__spec__ = importlib.machinery.ModuleSpec("nvidia_resiliency_ext", None)
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", package)
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext.fault_tolerance", tolerance)
    monkeypatch.setattr(RankMonitorClient, "made", [])
    return tolerance


def test_the_rank_monitor_hears_of_progress_and_not_of_waiting(extension):
    assert tiny_config(enable_ft_package=True).distributed.enable_ft_package
    beating = heartbeat([], every=0)
    beating._on_move = liveness.open_rank_monitor()
    (client,) = RankMonitorClient.made
    now = time.monotonic()
    for seconds in range(5):
        beating._beat(now + seconds)
    assert client.beats == 1
    beating._progress.begin("iteration 1")
    beating._beat(now + 6)
    assert client.beats == 2


def test_a_run_without_the_launcher_of_the_extension_is_refused(extension, monkeypatch):
    def fail(self):
        raise RankMonitorClientError("FT_RANK_MONITOR_IPC_SOCKET should be set")

    monkeypatch.setattr(RankMonitorClient, "init_workload_monitoring", fail)
    with pytest.raises(ValueError, match=r"no rank monitor answers .*start the run with ft_launch"):
        liveness.open_rank_monitor()


@pytest.mark.skipif(
    importlib.util.find_spec("nvidia_resiliency_ext") is not None,
    reason="nvidia-resiliency-ext is installed",
)
def test_a_run_without_the_extension_is_refused():
    with pytest.raises(ValueError, match="needs the package nvidia-resiliency-ext, which is not"):
        tiny_config(enable_ft_package=True)
