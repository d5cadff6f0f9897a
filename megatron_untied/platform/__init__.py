"""Where a run's machine is decided: CUDA with nccl, or a plain CPU with gloo.

``cpu_bridge`` is the only code that bends megatron-core; ``quiet`` silences what nobody can act on;
``device`` answers the few questions whose answer differs between the two machines. Nothing above
this package asks which one it is.
"""

from megatron_untied.platform import cpu_bridge, device, quiet

__all__ = ["cpu_bridge", "device"]

cpu_bridge.install()
quiet.quiet_megatron_core()
quiet.quiet_fully_shard()
