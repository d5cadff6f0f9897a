"""Which layer keeps what, and where: integers only."""

from dataclasses import dataclass

from megatron_untied.config import MemoryConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationPolicy:
    """What the layers of one model keep for their backward. Layers are counted from 0."""

    num_layers: int
    selective: bool
    """Whether attention outputs are kept, and not only inputs."""
    layers_per_group: int
    host_layers: int
    """The first so many layers keep on the host."""
    park: bool
    """O, dO, and the sums of dK and dV go through the host even if nothing has to be kept."""

    @classmethod
    def of(cls, memory: MemoryConfig, num_layers: int) -> "ActivationPolicy":
        """What ``memory`` asks for."""
        return cls(
            num_layers=num_layers,
            selective=memory.recompute_granularity == "selective",
            layers_per_group=memory.recompute_num_layers,
            host_layers=memory.cpu_offloading_num_layers,
            park=memory.park_during_attention,
        )

    def keeps_input(self, layer: int) -> bool:
        """Whether forward keeps the input of ``layer``: the first of a group."""
        return layer == self.first_of_group(layer)

    def first_of_group(self, layer: int) -> int:
        """The layer whose input the group of ``layer`` starts from."""
        return layer - layer % self.layers_per_group

    def last_of_group(self, layer: int) -> int:
        """The layer of the group whose backward comes first."""
        return min(self.first_of_group(layer) + self.layers_per_group, self.num_layers) - 1

    def input_on_host(self, layer: int) -> bool:
        """Whether the input of ``layer``, if it is kept, is on the host."""
        return layer < self.host_layers

    def output_on_host(self, layer: int) -> bool:
        """Whether the attention output of ``layer`` goes to the host, kept or not.

        Beside it on the device backward has slots of its gradient.
        """
        return self.park or self.input_on_host(layer)

    def keeps_output(self, layer: int) -> bool:
        """Whether the output of ``layer`` is kept: always, or while its group is recomputed."""
        return self.selective or layer != self.last_of_group(layer)

    def lse_on_host(self, layer: int) -> bool:
        """Whether log-sum-exps of ``layer`` wait for its backward on the host."""
        return self.keeps_output(layer) and self.input_on_host(layer)
