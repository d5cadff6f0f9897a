"""Flags that make a run fit: those that trade time for memory."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_untied.config import MemoryConfig
from megatron_untied.config.run import RunConfig
from megatron_untied.planner.automatic import (
    OPEN,
    choose,
    legal_chunks,
    needs_streamed_layers,
)
from megatron_untied.planner.geometry import by_sizes
from megatron_untied.planner.plan import Plan, fits


@dataclass(frozen=True, kw_only=True)
class Change:
    """Other values in one part of the configuration, and the flags that set them."""

    flags: str = ""
    """Empty for the values that are there already, and for those that "auto" finds."""
    part: str = "memory"
    values: dict[str, Any] = field(default_factory=dict)


_UNCHANGED = Change()


def search(plan: Plan) -> tuple[list[str], Plan] | None:
    """The flags to change and the fastest plan that fits with them; None if nothing does.

    Of equally fast plans it is the one with the fewest changes. A setting of ``plan`` that is
    "auto" stays so: the plan returned is the one that a run with these flags chooses.
    """
    given = plan.config
    plan = replace(plan, config=by_sizes(given))
    options = _options(plan.config)
    quick = replace(plan, every_layer=False)
    candidates = []
    for places in itertools.product(*(range(len(changes)) for changes in options)):
        candidate, flags = quick, []
        for changes, place in zip(options, places, strict=True):
            change = changes[place]
            candidate = candidate.with_settings(change.part, **change.values)
            flags += [change.flags] if change.flags else []
        memory = candidate.config.memory
        if memory.recompute_granularity is not None or not needs_streamed_layers(memory):
            seconds = round(candidate.time.seconds, 3)
            candidates.append((seconds, len(flags), places, flags, candidate))
    too_large: list[tuple[int, ...]] = []
    for _, _, places, flags, candidate in sorted(candidates, key=lambda found: found[:3]):
        # The values of an option take less and less memory, so a candidate that is not further in
        # any option than one that did not fit does not fit either. Memory is the slow part.
        if any(all(map(int.__le__, places, failed)) for failed in too_large):
            continue
        if not fits(candidate, with_host=False):
            too_large.append(places)
        elif candidate.fits_host:
            return flags, choose(_with_auto_of(given, candidate.config), plan.machine)
    return None


def _with_auto_of(given: RunConfig, found: RunConfig) -> RunConfig:
    """``found`` with "auto" wherever ``given`` has it."""
    settled = by_sizes(given)
    for part, name in OPEN:
        was, start, is_now = (getattr(getattr(x, part), name) for x in (given, settled, found))
        # One that sizes gave and that a flag changes is no longer open.
        if was == "auto" and start in ("auto", is_now):
            found = replace(found, **{part: replace(getattr(found, part), **{name: "auto"})})
    return found


def _options(config: RunConfig) -> list[list[Change]]:
    """By setting: the value that is there, then others that take less and less of the device."""
    memory, parallel, layers = config.memory, config.parallel, config.model.num_layers
    groups = [n for n in (2, 4, 8) if memory.recompute_num_layers < n <= layers]
    on_host = [n for n in (layers // 2, layers) if n > memory.cpu_offloading_num_layers]
    legal = legal_chunks(config)
    middle = legal[(len(legal) - 1) // 2]
    if parallel.heads_per_chunk == "auto":
        chunks = [
            Change(part="parallel", values={"heads_per_chunk": u})
            for u in sorted({legal[0], middle, legal[-1]}, reverse=True)
        ]
    else:
        current = legal[-1] if parallel.heads_per_chunk == "all" else parallel.heads_per_chunk
        smaller = sorted({u for u in (legal[0], middle) if u < current}, reverse=True)
        chunks = [_UNCHANGED] + [
            Change(
                part="parallel", values={"heads_per_chunk": u}, flags=f"--cp-heads-per-chunk {u}"
            )
            for u in smaller
        ]
    overlaps = parallel.cp_overlap and parallel.num_ulysses_and_ring[0] > 1
    loss_chunk = memory.loss_chunk_size or config.batch.seq_length
    options = [
        [_UNCHANGED] + [
            Change(part=part, values={name: value}, flags=flag.format(value)) for value in values
        ]
        for part, name, flag, values in (
            ("memory", "recompute_num_layers", "--recompute-num-layers {}", groups),
            ("memory", "cpu_offloading_num_layers", "--cpu-offloading-num-layers {}", on_host),
            ("memory", "park_during_attention", "--park-during-attention",
             [] if memory.park_during_attention else [True]),
            ("parallel", "cp_overlap", "--no-cp-overlap", [False] if overlaps else []),
            ("memory", "sequence_tile_size", "--sequence-tile-size {}",
             [2048] if memory.sequence_tile_size > 2048 else []),
            ("memory", "loss_chunk_size", "--loss-chunk-size {}",
             [n for n in (8192, 2048) if n < loss_chunk][-1:]),
        )
    ]  # fmt: skip
    sharding = [_UNCHANGED, *_more_sharding(config)]
    return [list(_granularities(memory)), *options, chunks, sharding]


def _granularities(memory: MemoryConfig) -> Iterator[Change]:
    """None only where it is given; "selective" before "full", which takes less of the device."""
    given = memory.recompute_granularity
    names = [None, "selective", "full"] if given in (None, "auto") else ["selective", "full"]
    for name in names:
        is_named = given not in (name, "auto")
        yield Change(
            values={"recompute_granularity": name},
            flags=f"--recompute-granularity {name}" if is_named else "",
        )


def _more_sharding(config: RunConfig) -> Iterator[Change]:
    """Full sharding, then the optimizer on the host too; neither with Megatron's own layers."""
    optimization = config.optimization
    if config.transformer_impl != "local":
        return
    values = {"use_torch_fsdp2": True, "use_distributed_optimizer": False}
    flags = "--use-torch-fsdp2"
    if optimization.use_distributed_optimizer:
        flags += " instead of --use-distributed-optimizer"
    if not optimization.use_torch_fsdp2:
        yield Change(part="optimization", values=values, flags=flags)
    if not optimization.optimizer_cpu_offload:
        offload = "--optimizer-cpu-offload"
        yield Change(
            part="optimization",
            values=values | {"optimizer_cpu_offload": True},
            flags=offload if optimization.use_torch_fsdp2 else f"{flags} {offload}",
        )
