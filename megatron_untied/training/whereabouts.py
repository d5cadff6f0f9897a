"""Where every rank is, told to the others: who is it that they wait for?"""

import json
from dataclasses import asdict, dataclass

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
        """Every rank's last place; a rank that has told none is left out."""
        keys = {rank: f"place of {rank}" for rank in range(self.world_size)}
        try:
            there = {rank: key for rank, key in keys.items() if self.store.check([key])}
            return {rank: Place(**json.loads(self.store.get(key))) for rank, key in there.items()}
        except dist.DistError:
            return {}

    def explain(self, here: Place) -> str:
        """Which ranks have not come as far as this one, or as far as the others."""
        places = self.ask() | {self.rank: here}
        first = min(place.order for place in places.values())
        late = [rank for rank, place in places.items() if place.order == first]
        unheard = [rank for rank in range(self.world_size) if rank not in places]
        silent = f"; nothing is known of {_listed(unheard)}" if unheard else ""
        if len(late) == len(places):
            return f"{_listed(late)} have come equally far, to {here}{silent}"
        of_late = "; ".join(f"rank {rank} at {places[rank]}" for rank in late[:SHOWN])
        more = f" and {len(late) - SHOWN} more" if len(late) > SHOWN else ""
        if self.rank in late:
            far = max(places, key=lambda rank: places[rank].order)
            return f"late: {of_late}{more}, this one among them; rank {far} is at {places[far]}"
        return f"has not arrived: {of_late}{more}. Rank {self.rank} is at {here}{silent}"


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:SHOWN]))}{more}"
