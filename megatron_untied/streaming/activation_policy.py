"""Which activations each layer saves: on the device, the host, or a disk. Integers only."""

from dataclasses import dataclass

from megatron_untied.config import MemoryConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPolicy:
    """What one layer saves for its backward."""

    group: range
    """The layers of its checkpoint group: the first saves its input, the last is the first whose
    backward runs. Layers are counted from 0."""
    has_backward: bool
    """False before the first layer of which something is trained: it saves nothing."""
    saves_input: bool
    keeps_output: bool
    """Whether attention output and log-sum-exps are kept from forward to backward; else attention
    is recomputed."""
    saves_output: bool
    """Whether they are saved at all: those that are kept, and others while the group is
    recomputed."""
    input_on_host: bool
    """Where the input is, if it is saved."""
    output_on_host: bool
    """Whether the attention output goes to the host, saved or not: backward holds the slots of its
    gradient beside it on the device."""
    lse_on_host: bool
    """Whether the log-sum-exps wait for backward on the host."""
    goes_to_disk: bool
    """Whether input and attention output go on to the disk, as long as it has room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationPolicy:
    """What the layers of one model save for their backward."""

    park: bool
    """Whether O, dO, and the sums of dK and dV pass through the host even if nothing is saved."""
    layers: tuple[LayerPolicy, ...]

    @property
    def with_backward(self) -> range:
        """The layers that have one."""
        first = sum(not layer.has_backward for layer in self.layers)
        return range(first, len(self.layers))

    @classmethod
    def of(
        cls, memory: MemoryConfig, num_layers: int, first_with_backward: int = 0
    ) -> "ActivationPolicy":
        """The policy of ``num_layers`` layers under the flags in ``memory``."""
        size, first_kept = memory.recompute_num_layers, memory.first_kept_output(num_layers)
        layers = []
        offloaded = range(first_with_backward, memory.cpu_offloading_num_layers)
        saving = [
            index
            for index in offloaded
            if (index - first_with_backward) % size == 0 or index >= first_kept
        ]
        # The last two would come back before their memory was needed.
        to_disk = saving[:-2] if memory.activation_disk else ()
        for index in range(num_layers):
            has_backward = index >= first_with_backward
            first = index - (index - first_with_backward) % size if has_backward else index
            group = range(first, min(first + size, num_layers) if has_backward else first + 1)
            on_host = has_backward and index < memory.cpu_offloading_num_layers
            keeps_output = has_backward and index >= first_kept
            # The backward of a group's last layer comes at once: an output that is recomputed for
            # it is used without being saved.
            saves_output = has_backward and (keeps_output or index != group[-1])
            layers.append(
                LayerPolicy(
                    group=group,
                    has_backward=has_backward,
                    saves_input=has_backward and index == first,
                    keeps_output=keeps_output,
                    saves_output=saves_output,
                    input_on_host=on_host,
                    output_on_host=on_host or memory.park_during_attention,
                    lse_on_host=on_host and saves_output,
                    goes_to_disk=index in to_disk,
                )
            )
        return cls(park=memory.park_during_attention, layers=tuple(layers))
