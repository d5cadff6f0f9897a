"""What layers keep for their backward, where, and how much of it is on the device.

See ``streaming/stash.py``; the host's part is in :mod:`.host`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_untied.planner.causes import Bytes, Cause
from megatron_untied.planner.geometry import Geometry


@dataclass(frozen=True)
class Placement:
    """Which layer keeps what, where."""

    geometry: Geometry

    @property
    def selective(self) -> bool:
        """Whether attention outputs are kept."""
        return self.geometry.config.memory.recompute_granularity == "selective"

    @property
    def park(self) -> bool:
        """Whether the host takes what attention does not need while it runs."""
        return self.geometry.config.memory.park_during_attention

    @property
    def any_on_host(self) -> bool:
        """Whether some layer's input is read from the host."""
        return self.park or self.geometry.config.memory.cpu_offloading_num_layers > 0

    def keeps_input(self, layer: int) -> bool:
        """Whether forward keeps the input of ``layer``: the first of a group."""
        return layer == self.first_of_group(layer)

    def first_of_group(self, layer: int) -> int:
        """The layer whose input the group of ``layer`` starts from."""
        return layer - layer % self.geometry.config.memory.recompute_num_layers

    def last_of_group(self, layer: int) -> int:
        """The layer of the group whose backward comes first."""
        end = self.first_of_group(layer) + self.geometry.config.memory.recompute_num_layers
        return min(end, self.geometry.num_layers) - 1

    def input_on_host(self, layer: int) -> bool:
        """Whether the input of ``layer`` is kept on the host, if it is kept."""
        return layer < self.geometry.config.memory.cpu_offloading_num_layers

    def output_on_host(self, layer: int) -> bool:
        """Whether the attention output of ``layer`` goes to the host."""
        return self.park or self.input_on_host(layer)

    def keeps_output(self, layer: int) -> bool:
        """Whether ``layer`` keeps its output: all, or while a group is rebuilt all but its last."""
        return self.selective or layer != self.last_of_group(layer)

    def kept_forward(self, layer: int) -> Bytes:
        """On the device when the forward of ``layer`` ends."""
        return self._device(
            inputs=[i for i in range(layer + 1) if self.keeps_input(i)],
            outputs=range(layer + 1) if self.selective else (),
        )

    def kept_backward(self, layer: int) -> Bytes:
        """On the device when the backward of ``layer`` begins: its group is whole by then."""
        first = self.first_of_group(layer)
        own = range(first, layer + 1)
        earlier = [i for i in range(first) if self.keeps_input(i)]
        outputs = range(layer + 1) if self.selective else own
        return self._device(inputs=[*earlier, *own], outputs=outputs)

    def lse_on_device(self, layer: int) -> bool:
        """Whether log-sum-exps that ``layer`` keeps wait on the device."""
        return not (self.keeps_output(layer) and self.input_on_host(layer))

    def _device(self, inputs: Sequence[int], outputs: Sequence[int]) -> Bytes:
        geo = self.geometry
        num_inputs = sum(not self.input_on_host(i) for i in inputs)
        num_outputs = sum(self.keeps_output(i) and not self.output_on_host(i) for i in outputs)
        kept = num_inputs * geo.residual_bytes + num_outputs * geo.output_bytes
        return Bytes({Cause.KEPT: kept + sum(map(self.lse_on_device, outputs)) * geo.lse_bytes})
