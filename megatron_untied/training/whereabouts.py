"""Where every rank is, told to the others: who is it that they wait for?"""

import json
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

from megatron_untied.step_progress import Place

SHOWN = 8


@dataclass(slots=True)
class Whereabouts:
    """The place of every rank, in the store that they share."""

    store: dist.Store
    rank: int
    world_size: int
    _told: Place | None = None
    _heard: dict[int, Place] = field(default_factory=dict)

    def tell(self, place: Place) -> None:
        """Let the others know; costs one message to the store, and none if nothing is new."""
        if place == self._told or self.world_size == 1:
            return
        try:
            self.store.set(f"place of {self.rank}", json.dumps(asdict(place)))
        except dist.DistError:  # its host is gone, which the next collective finds out as well
            return
        self._told = place

    def ask(self) -> dict[int, Place]:
        """Every rank's last place; a rank that has told none is left out.

        Once the store is gone it is what was heard before.
        """
        keys = {rank: f"place of {rank}" for rank in range(self.world_size)}
        try:
            there = {rank: key for rank, key in keys.items() if self.store.check([key])}
            for rank, key in there.items():
                self._heard[rank] = Place(**json.loads(self.store.get(key)))
        except dist.DistError:
            pass
        return self._heard

    def explain(self, here: Place) -> str:
        """Which ranks have not come as far as this one, or as far as the others."""
        places = self.ask() | {self.rank: here}
        first = min(place.order for place in places.values())
        late = [rank for rank, place in places.items() if place.order == first]
        unheard = [rank for rank in range(self.world_size) if rank not in places]
        me = f"rank {self.rank}, which tells this, is at {here}"
        if unheard:
            me += f"; nothing is known of {listed_ranks(unheard)}"
        if self.rank not in late:
            return f"{listed_ranks(late)} did not arrive, {_last(late, places)}; {me}"
        if len(late) < len(places):
            ahead = max(places, key=lambda rank: places[rank].order)
            return f"{listed_ranks(late)} came late; {me}; {_last([ahead], places)}"
        if len(places) > 1:
            me = f"{listed_ranks(late)} came equally far; {me}"
        return me


def _last(ranks: list[int], places: dict[int, Place]) -> str:
    """Where some ranks were when they last told, each place once."""
    at: dict[str, list[int]] = {}
    for rank in ranks:
        at.setdefault(str(places[rank]), []).append(rank)
    return "; ".join(f"{listed_ranks(its)} last at {place}" for place, its in at.items())


def listed_ranks(ranks: list[int]) -> str:
    """In words; the first few of many."""
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:SHOWN]))}{more}"
