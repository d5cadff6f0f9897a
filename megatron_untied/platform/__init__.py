"""Hides the machine from the other packages: CUDA with nccl, or a plain CPU with gloo.

Importing it runs ``cpu_bridge``, which makes megatron-core importable without CUDA, and ``quiet``,
which filters warnings that a user cannot act on. ``device`` has the few functions that differ
between the two machines; ``fused_ops`` makes single operations on a CPU of what CUDA runs as one
kernel; ``host_names`` checks DNS. The packages above do not test for CUDA themselves.
"""

from megatron_untied.platform import cpu_bridge, device, quiet

__all__ = ["cpu_bridge", "device"]

# Order matters: the bridge has to be in place before the first import of megatron.core.
cpu_bridge.install()
quiet.quiet_megatron_core()
quiet.quiet_fully_shard()
