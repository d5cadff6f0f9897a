"""Settings left to the planner ("auto"): the fastest that fit the memory of a machine.

Tile, chunk of the loss and overlap alone need no machine: :func:`.geometry.by_sizes`. Where others
are open too, all of them are chosen together. What layers save is tried way by way (parking,
checkpoint groups, and for each the most attention outputs that fit and the fewest layers on the
host); the buffers of chunks and tiles are as large as then fit.
"""

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from megatron_untied.config import MemoryConfig
from megatron_untied.config.flag_names import flag_of
from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.head_schedule import legal_heads_per_chunk
from megatron_untied.planner.geometry import by_sizes
from megatron_untied.planner.machine import Machine
from megatron_untied.planner.plan import Plan, fits, peak_bytes
from megatron_untied.platform.device import GIB
from megatron_untied.streaming.host_arena import PAGE_BYTES

SIZES = (
    ("parallel", "heads_per_chunk"),
    ("parallel", "cp_overlap"),
    ("memory", "sequence_tile_size"),
    ("memory", "loss_chunk_size"),
)
SAVED = (
    ("memory", "recompute_granularity"),
    ("memory", "attention_output_layers"),
    ("memory", "recompute_num_layers"),
    ("memory", "cpu_offloading_num_layers"),
    ("memory", "park_during_attention"),
)
DISK = ("memory", "activation_disk_gib")
OPEN = (*SIZES, *SAVED, DISK)
"""Parts and fields of a configuration that may be "auto"."""
_WHOLE_GIB, _PARTS_OF_GIB = 16, 16
"""Above so many a limit of disks is rounded up to such parts of one."""
_WITHOUT_MACHINE = ("cp_overlap", "sequence_tile_size", "loss_chunk_size")


def has_open_sizes(config: RunConfig) -> bool:
    """Whether a value is left to the planner with which sizes of chunks and tiles are chosen."""
    values = (getattr(getattr(config, part), name) for part, name in SIZES + SAVED
              if name not in _WITHOUT_MACHINE)  # fmt: skip
    return "auto" in values


def is_automatic(config: RunConfig) -> bool:
    """Whether a value is left to the planner, which needs a machine for it."""
    return has_open_sizes(config) or config.memory.activation_disk_gib == "auto"


def opened(config: RunConfig) -> RunConfig:
    """``config`` with everything that may be "auto" left to the planner."""
    for part, name in OPEN if config.memory.activation_disk else SIZES + SAVED:
        config = replace(config, **{part: replace(getattr(config, part), **{name: "auto"})})
    return config


def choose(config: RunConfig, machine: Machine) -> Plan:
    """The plan of ``config`` with the fastest values that fit in place of "auto".

    Raises:
        ValueError: if none fits, with the smallest peak and the memory that there is.
    """
    found = ranked(config, machine, only_fastest=True)
    if found:
        return found[0]
    raise ValueError(
        f"no automatic setting fits: the nearest takes {sizes(nearest(config, machine))}; "
        "tools/plan_memory.py lists other flags that make it fit"
    )


def ranked(
    config: RunConfig, machine: Machine, *, only_fastest: bool = False, below: float = math.inf
) -> list[Plan]:
    """Plans that fit, fastest first: one for every way to save activations that ``config`` allows.

    Args:
        config: may have "auto".
        machine: to fit.
        only_fastest: skip what cannot be faster than a plan that was found.
        below: skip what cannot take fewer seconds.
    """
    found: list[Plan] = []
    order = itertools.count()  # of equal seconds the first
    # Best first. What a way takes at least is known better step by step: with all outputs kept,
    # with those that memory might hold, with those that the least sizes leave room for, exactly.
    queue: list[tuple[float, int, int, Plan, Plan]] = []

    def push(bound: Plan, step: int, way: Plan, best: Plan) -> None:
        heapq.heappush(queue, (seconds_of(bound), next(order), step, way, best))

    for way in ways_to_save(Plan(config, machine, every_layer=False)):
        fastest = min((each for _, each in _sizes(way)), key=lambda x: seconds_of(_placed(x)))
        push(_placed(fastest), 0, way, fastest)
    while queue and queue[0][0] < below:
        _, _, step, way, best = heapq.heappop(queue)
        if step == 0:
            placed = with_fewest_on_host(_kept(best, None))
            if placed is not None:
                placed = with_least_on_disk(placed)
                push(placed, 3, way, placed)
            else:
                push(_with_room_for_outputs(way, best), 1, way, best)
        elif step == 1:
            placed = _with_most_kept(_with_least_sizes(way))
            if placed is not None:
                push(_placed(best, placed.config.memory.attention_output_layers), 2, way, placed)
        elif step == 2:
            placed = with_least_on_disk(_with_fastest_sizes(way, best))
            push(placed, 3, way, placed)
        else:
            best = replace(best, config=_settled(best.config), every_layer=True)
            if all(best.config != plan.config for plan in found):
                found.append(best)
            if only_fastest:
                break
    return found


def _with_room_for_outputs(way: Plan, fastest: Plan) -> Plan:
    """``fastest`` with no fewer outputs kept than the memory could hold that nothing else needs."""
    layers, machine = way.config.model.num_layers, way.machine
    least = _placed(_with_least_sizes(way), 0, layers)
    room = machine.host_bytes - least.host.total()
    room += max(0, machine.device_bytes - peak_bytes(least))
    if (disk := least.activation_disk) is not None:
        room += min(machine.disk_bytes - disk.rank_bytes, layers * least.geometry.output_bytes)
    # A group that is recomputed holds its outputs too, in memory that kept ones have left by then.
    group = way.config.memory.recompute_num_layers
    kept = max(0, room // least.geometry.output_bytes) + group
    return _placed(fastest, min(layers, int(kept)))


def fits_somehow(plan: Plan) -> bool:
    """Whether ``plan``, whose configuration may have "auto", fits with any values in its place."""
    return any(use_of_least(way)[0] for way in ways_to_save(plan))


def _with_sizes(config: RunConfig) -> RunConfig:
    """As a run takes it: sizes stay open only where the planner chooses more than the disk."""
    return config if has_open_sizes(config) else by_sizes(config)


def ways_to_save(plan: Plan) -> list[Plan]:
    """``plan`` with granularity, groups and parking set wherever they are open.

    With an open limit of disks there is each way without them, which may be faster, and with them.
    Attention outputs that are kept and layers on the host stay open. "selective" stands for "full"
    too, which keeps none.
    """
    plan = replace(plan, config=_with_sizes(plan.config))
    memory, layers = plan.config.memory, plan.config.model.num_layers
    given, sizes = memory.recompute_granularity, [memory.recompute_num_layers]
    if sizes == ["auto"]:
        # Inputs of groups, and of the layers of one group, are fewest at the square root.
        sizes = sorted({size for size in (1, 2, 4, math.isqrt(layers - 1) + 1) if size <= layers})
    park = memory.park_during_attention
    parks = [False, True] if park == "auto" else [park]
    ways = []
    if given is None or (given == "auto" and not needs_streamed_layers(memory)):
        ways.append(without_streaming(plan))
    disks = [0.0, "auto"] if memory.activation_disk_gib == "auto" else [memory.activation_disk_gib]
    if given is not None:
        ways += [
            plan.with_settings(
                "memory",
                recompute_granularity="selective" if given == "auto" else given,
                recompute_num_layers=size,
                park_during_attention=park,
                activation_disk_gib=disk,
            )
            for disk, size, park in itertools.product(disks, sizes, parks)
        ]
    return ways


def needs_streamed_layers(memory: MemoryConfig) -> bool:
    """Whether ``memory`` has settings that only layers with recomputation take."""
    off = {"cpu_offloading_num_layers": 0, "park_during_attention": False}
    off |= {"recompute_num_layers": 1, "attention_output_layers": None}
    return any(getattr(memory, name) not in (value, "auto") for name, value in off.items())


def without_streaming(plan: Plan) -> Plan:
    """``plan`` without streamed layers."""
    return plan.with_settings(
        "memory",
        recompute_granularity=None,
        attention_output_layers=None,
        recompute_num_layers=1,
        park_during_attention=False,
        cpu_offloading_num_layers=0,
        activation_disk_gib=None,
    )


def legal_chunks(config: RunConfig) -> list[int]:
    """Every value of ``--cp-heads-per-chunk``, smallest first."""
    heads = config.model.num_attention_heads // config.parallel.tensor_model_parallel_size
    return legal_heads_per_chunk(heads, config.parallel.num_ulysses_and_ring[0])


def seconds_of(plan: Plan) -> float:
    """Of a step, rounded so that differences without meaning are none."""
    return round(plan.time.seconds, 3)


Places = tuple[int, ...]
"""How many steps each size is below its largest value."""


def _size_values(plan: Plan) -> tuple[list, list, list]:
    """Chunks of heads, overlap, and pairs of tile and loss chunk, each in falling order."""
    config, sized = plan.config, by_sizes(plan.config)
    parallel, memory = config.parallel, config.memory
    chunks, overlaps = [parallel.heads_per_chunk], [sized.parallel.cp_overlap]
    if chunks == ["auto"]:
        legal = legal_chunks(config)
        halves = {-(-len(legal) >> power) for power in range(len(legal).bit_length())}
        chunks = [legal[per_rank - 1] for per_rank in sorted(halves | {1}, reverse=True)]
    if parallel.cp_overlap == "auto" and parallel.num_ulysses_and_ring[0] > 1:
        overlaps = [True, False]
    tile_size, loss_chunk = sized.memory.sequence_tile_size, sized.memory.loss_chunk_size
    tiles = [
        (
            max(256, tile_size // part) if memory.sequence_tile_size == "auto" else tile_size,
            max(256, loss_chunk // part) if memory.loss_chunk_size == "auto" else loss_chunk,
        )
        for part in (1, 2, 4)
    ]
    return chunks, overlaps, list(dict.fromkeys(tiles))


def _sizes(plan: Plan) -> list[tuple[Places, Plan]]:
    """``plan`` with every value of the sizes that are open; the last takes least of the device."""
    values = _size_values(plan)
    every = itertools.product(*(range(len(each)) for each in values))
    return [(places, _with_sizes_at(plan, values, places)) for places in every]


def _with_sizes_at(plan: Plan, values: tuple[list, list, list], places: Places) -> Plan:
    chunk, overlap, (tile_size, loss_chunk) = map(list.__getitem__, values, places)
    config = plan.config
    parallel = replace(config.parallel, heads_per_chunk=chunk, cp_overlap=overlap)
    memory = replace(config.memory, sequence_tile_size=tile_size, loss_chunk_size=loss_chunk)
    return replace(plan, config=replace(config, parallel=parallel, memory=memory))


def _with_least_sizes(plan: Plan) -> Plan:
    return _with_sizes_at(plan, _size_values(plan), (-1, -1, -1))


def _placed(plan: Plan, kept: int | None = None, on_host: int = 0) -> Plan:
    """``plan`` with so many outputs kept (None: all) and layers on the host, if they are open."""
    memory, values = plan.config.memory, {}
    if memory.attention_output_layers == "auto":
        all_kept = None if memory.recompute_granularity == "selective" else 0
        values["attention_output_layers"] = all_kept if kept is None else kept
    if memory.cpu_offloading_num_layers == "auto":
        values["cpu_offloading_num_layers"] = on_host
    return plan.with_settings("memory", **values) if values else plan


def use_of_least(way: Plan) -> tuple[bool, float]:
    """Whether ``way`` fits with the smallest sizes, and what share of the memory it takes, about.

    With no outputs kept or all of them, whichever takes less.
    """
    least, layers = _with_least_sizes(way), way.config.model.num_layers
    device_bytes, host_bytes = (
        max(1, x) for x in (way.machine.device_bytes, way.machine.host_bytes)
    )
    shares = []
    # An output that is recomputed may take more of the device than one that is kept on the host.
    for kept in (0, None) if way.config.memory.park_during_attention else (0,):
        plan = _kept(least, kept)
        every = _placed(plan, on_host=layers)
        on_device, on_host = peak_bytes(every), every.host.total()
        share = on_host / host_bytes
        if plan.config.memory.cpu_offloading_num_layers == "auto":  # one may serve for the other
            share = (on_device + on_host) / (device_bytes + host_bytes)
        share = max(share, on_device / device_bytes)
        if with_fewest_on_host(plan, any_number=True, every=every) is not None:
            return True, share
        shares.append(share)
    return False, min(shares)


def _kept(plan: Plan, kept: int | None) -> Plan:
    """``plan`` with so many outputs kept, if that is open; layers on the host stay open."""
    if plan.config.memory.attention_output_layers != "auto":
        return plan
    return plan.with_settings("memory", attention_output_layers=kept)


def _with_fastest_sizes(way: Plan, best: Plan) -> Plan:
    """``best``, which has the least sizes, with the fastest that fit and as many outputs kept."""
    kept, too_large = best.config.memory.attention_output_layers, []
    options = sorted(_sizes(way), key=lambda each: (seconds_of(_placed(each[1], kept)), each[0]))
    for places, option in options:
        # Sizes that are no smaller in anything than some that do not fit do not fit either.
        if any(all(map(int.__le__, places, failed)) for failed in too_large):
            continue
        placed = with_fewest_on_host(_kept(option, kept))
        if placed is not None:
            return min(best, placed, key=seconds_of)
        too_large.append(places)
    return best


def _with_most_kept(plan: Plan) -> Plan | None:
    """``plan`` with as many attention outputs kept as fit; None: not even none of them fits."""
    best = with_fewest_on_host(_kept(plan, None))
    if best is not None or plan.config.memory.attention_output_layers != "auto":
        return best
    if with_fewest_on_host(_kept(plan, 0), any_number=True) is None:
        return None
    low, high = 0, plan.config.model.num_layers
    # Where every layer is on the host its bytes are a line, and this the last that fits.
    none, every = (_placed(plan, kept, high).host.total() for kept in (0, high))
    guess = int((plan.machine.host_bytes - none) / max(every - none, 1) * high)
    guesses = iter((guess, guess + 1))
    while high - low > 1:
        middle = next(guesses, (low + high) // 2)
        if not low < middle < high:
            continue
        fit = with_fewest_on_host(_kept(plan, middle), any_number=True) is not None
        low, high = (middle, high) if fit else (low, middle)
    return with_fewest_on_host(_kept(plan, low))


def with_fewest_on_host(
    plan: Plan, *, any_number: bool = False, every: Plan | None = None
) -> Plan | None:
    """``plan`` with as few layers on the host as the GPU needs, if open; None: none fits.

    Args:
        plan: everything else is settled.
        any_number: all of them, if that fits, which is known at once.
        every: ``plan`` with all of them, if the caller has it.
    """
    if plan.config.memory.cpu_offloading_num_layers != "auto":
        return plan if fits(plan) else None
    layers = plan.config.model.num_layers
    none, every = _placed(plan, on_host=0), every or _placed(plan, on_host=layers)
    if not fits(every, with_host=False):
        return None
    if any_number and every.fits_host:
        return every
    if none.fits_device:
        return none if none.fits_host else None
    # ``more`` with ``high`` layers on the host fits the device, ``fewer`` with ``low`` does not.
    low, high, fewer, more = 0, layers, none, every
    while high - low > 1:
        # The peak falls by the same for each layer as long as it stays in the same phase, so a
        # straight line finds the number in two plans, where bisection takes one per bit.
        excess = fewer.peak.num_bytes - plan.machine.device_bytes
        share = excess / (fewer.peak.num_bytes - more.peak.num_bytes)
        middle = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
        placed = _placed(plan, on_host=middle)
        if placed.fits_device:
            high, more = middle, placed
        else:
            low, fewer = middle, placed
    return more if more.fits_host else None


def with_least_on_disk(plan: Plan) -> Plan:
    """``plan`` with no more on disks than the host needs, if open; all else is settled."""
    if plan.config.memory.activation_disk_gib != "auto":
        return plan

    def limited(num_bytes: int) -> Plan:
        gib = num_bytes / GIB
        if gib > _WHOLE_GIB:  # for people
            gib = math.ceil(gib * _PARTS_OF_GIB) / _PARTS_OF_GIB
        return plan.with_settings("memory", activation_disk_gib=gib)

    if (none := limited(0)).fits_host:
        return none
    low, high = 0, plan.activation_disk.rank_bytes
    least = max(PAGE_BYTES, high >> 8)
    while high - low > least:
        middle = low + (high - low) // 2
        low, high = (low, middle) if limited(middle).fits_host else (middle, high)
    # What such a limit lets through is often less, as slots are large.
    return limited(limited(high).activation_disk.rank_bytes)


def nearest(config: RunConfig, machine: Machine) -> Plan:
    """Of plans that do not fit, the one that lacks the fewest bytes of GPU and host together."""
    layers, plans = config.model.num_layers, []
    for way in ways_to_save(Plan(config, machine)):
        least = _with_least_sizes(way)
        plans += [_placed(least, *each) for each in itertools.product((0, None), (0, layers))]

    def lacking(plan: Plan) -> float:
        on_host = plan.host.total() - plan.machine.host_bytes
        return max(0, peak_bytes(plan) - plan.machine.device_bytes) + max(0, on_host)

    least = with_least_on_disk(min(plans, key=lambda plan: (lacking(plan), peak_bytes(plan))))
    return replace(least, config=_settled(least.config))


def _settled(config: RunConfig) -> RunConfig:
    """``config`` without "auto", and with the plainest of flags that mean the same."""
    memory = config.memory
    kept, granularity = memory.attention_output_layers, memory.recompute_granularity
    if granularity == "selective" and kept in (0, config.model.num_layers):
        granularity, kept = "full" if kept == 0 else granularity, None
        memory = replace(memory, recompute_granularity=granularity, attention_output_layers=kept)
    return by_sizes(replace(config, memory=memory))


def flags_of(config: RunConfig, fields: Iterable[tuple[str, str]]) -> list[str]:
    """The words that set ``fields`` of ``config``; those of streamed layers only if they are."""
    streamed = config.memory.recompute_granularity is not None
    words = []
    for part, name in fields:
        flag, value = flag_of(f"{part}.{name}"), getattr(getattr(config, part), name)
        needs_streaming = (part, name) in (*SAVED, DISK) or name == "sequence_tile_size"
        if value is None or (needs_streaming and not streamed):
            continue
        if name == "cp_overlap":  # neither switch leaves it open
            words.append(flag if value else "--no-cp-overlap")
        elif isinstance(value, bool):
            words += [flag] if value else []
        else:
            words += [flag, *map(str, value if isinstance(value, tuple) else [value])]
    return words


def describe(plan: Plan) -> str:
    """One line on what was chosen, in flags."""
    found = "planned" if plan.fits else "no automatic setting fits, the nearest is"
    disk = f" | {plan.activation_disk.describe()}" if plan.activation_disk else ""
    assumed = f" | assumed: {plan.machine.gpu.assumed}" if plan.machine.gpu.assumed else ""
    return f"{found}: {settings(plan)} | {sizes(plan)}{disk}{assumed}"


def settings(plan: Plan) -> str:
    """The settings that may be automatic."""
    config = plan.config
    plain = ", no recomputation" if config.memory.recompute_granularity is None else ""
    return " ".join(flags_of(by_sizes(config), OPEN)) + plain


def sizes(plan: Plan) -> str:
    """The peak and the host memory, with what there is after the reserve."""
    machine, disk = plan.machine, ""
    if plan.activation_disk is not None and not math.isinf(machine.disk_bytes):
        used = plan.activation_disk.rank_bytes / GIB
        disk = f", {used:.1f} of {machine.disk_bytes / GIB:.1f} GiB on disks"
    return (
        f"{plan.peak.num_bytes / GIB:.1f} of {machine.device_bytes / GIB:.1f} GiB per GPU, "
        f"{plan.host.total() / GIB:.1f} of {machine.host_bytes / GIB:.1f} GiB of host memory per "
        f"rank{disk}"
    )
