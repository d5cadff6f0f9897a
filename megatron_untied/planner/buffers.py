"""The workspace of streamed layers: which buffers are alive when.

It is given back before the loss and after each layer's attention in backward. Slots that a layer
still reads stay until it is done.
"""

from dataclasses import dataclass
from functools import cached_property

from megatron_untied.planner.attention import AttentionBuffers
from megatron_untied.planner.causes import Bytes, Cause
from megatron_untied.planner.geometry import Geometry
from megatron_untied.planner.stash import Placement


@dataclass(frozen=True)
class StreamedBuffers:
    """Bytes in the workspace of one Ulysses rank, phase by phase."""

    geometry: Geometry
    rank: int

    def forward(self, layer: int) -> Bytes:
        """While ``layer`` runs forward."""
        place = self.placement
        shared = not place.selective and not place.output_on_host(layer)
        return (
            self._chunks(self._forward)
            + self._slots(shared)
            + self._staging(  # rows also of the last backward
                rows=place.any_on_host, outputs=place.any_on_host, gradients=place.park
            )
        )

    def again(self, layer: int) -> Bytes:
        """While the group of ``layer`` is rebuilt, up to the backward of its first layer."""
        place = self.placement
        runs_again = not place.selective and layer == place.last_of_group(layer)
        chunks = self._chunks(self._forward) if runs_again else Bytes()
        return chunks + self._output_slots(layer) + self._staging_of(layer)

    def to_attention(self, layer: int) -> Bytes:
        """While the tiles of ``layer`` go backward down to attention."""
        return self.again(layer) + self._slots(not self.placement.park)

    def attention_backward(self, layer: int) -> Bytes:
        """While the attention of ``layer`` goes backward, without what kernels allocate."""
        return (
            self._chunks(self._backward(layer))
            + self._output_slots(layer)
            + self._staging_of(layer)
            + self._slots(not self.placement.park)
        )

    def kernel(self, layer: int) -> Bytes:
        """What the backward kernel allocates, and dK and dV that came home before it ended."""
        buffers = self._backward(layer)
        return Bytes({Cause.KERNEL: max(buffers.kernel_bytes, buffers.home_bytes)})

    def home_when_loading(self, layer: int) -> Bytes:
        """DK and dV that are home when the last chunk is projected."""
        return Bytes({Cause.KERNEL: self._backward(layer).home_bytes_when_loading})

    def from_attention(self, layer: int) -> Bytes:
        """While the tiles of ``layer`` go backward from attention: dQ, dK and dV are there."""
        home = Bytes({Cause.SLOTS: self._backward(layer).home_bytes})
        return (
            home + self._output_slots(layer) + self._slots(not self.placement.park)
            + self.after(layer)
        )  # fmt: skip

    def after(self, layer: int) -> Bytes:
        """When the backward of ``layer`` is done."""
        place = self.placement
        return self._staging(rows=place.input_on_host(layer), gradients=place.park)

    @cached_property
    def placement(self) -> Placement:
        """Who keeps what, where."""
        return Placement(self.geometry)

    @cached_property
    def _forward(self) -> AttentionBuffers:
        return AttentionBuffers(self.geometry, self.rank, self.placement).forward()

    def _backward(self, layer: int) -> AttentionBuffers:
        place = self.placement
        runs_again = not place.selective and layer == place.last_of_group(layer)
        on_host = place.output_on_host(layer)
        if (runs_again, on_host) not in self._backwards:
            taken = dict(self._forward.taken) if runs_again else {}
            buffers = AttentionBuffers(self.geometry, self.rank, place, taken)
            self._backwards[runs_again, on_host] = buffers.backward(output_on_host=on_host)
        return self._backwards[runs_again, on_host]

    @cached_property
    def _backwards(self) -> dict[tuple[bool, bool], AttentionBuffers]:
        return {}

    def _chunks(self, buffers: AttentionBuffers) -> Bytes:
        return Bytes({Cause.CHUNKS: buffers.num_bytes})

    def _slots(self, are_there: bool) -> Bytes:
        return Bytes({Cause.SLOTS: self.geometry.output_bytes * are_there})

    def _output_slots(self, layer: int) -> Bytes:
        """Those of an output that was made again and is not kept."""
        place = self.placement
        return self._slots(not place.keeps_output(layer) and not place.output_on_host(layer))

    def _staging_of(self, layer: int) -> Bytes:
        """Tiles between host and device in the backward of ``layer``, or of its group before."""
        place = self.placement
        is_last = layer == place.last_of_group(layer)
        earliest = place.first_of_group(layer) if is_last else layer
        return self._staging(
            rows=place.input_on_host(earliest),
            outputs=place.output_on_host(earliest),
            gradients=place.park,
        )

    def _staging(
        self, *, rows: bool = False, outputs: bool = False, gradients: bool = False
    ) -> Bytes:
        geo = self.geometry
        tokens = geo.tile // geo.num_token_parts  # x samples, of one tensor-parallel rank
        numel = 2 * tokens * geo.m * rows + tokens * geo.h * geo.d * (outputs + gradients)
        return Bytes({Cause.TILES: numel * geo.itemsize})
