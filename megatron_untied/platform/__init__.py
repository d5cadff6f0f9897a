"""Hides the machine from the other packages: CUDA with nccl, or a plain CPU with gloo.

Importing it runs ``cpu_bridge``, which makes megatron-core importable without CUDA, and filters
warnings that a user cannot act on. ``device`` has the few functions that differ between the two
machines; ``fused_ops`` makes single operations on a CPU of what CUDA runs as one kernel;
``host_names`` checks DNS. The packages above do not test for CUDA themselves.
"""

import logging
import warnings

from megatron_untied.platform import cpu_bridge, device

__all__ = ["cpu_bridge", "device"]

# Order matters: the bridge has to be in place before the first import of megatron.core, and so have
# the filters, because it warns while it is imported.
cpu_bridge.install()
for _message, _category in (
    # Transformer Engine and Apex are optional; a flag that needs one of them raises an error.
    (".*Apex (is|are) not installed", UserWarning),
    # Megatron-core calls collectives by names that torch 2.13 deprecates.
    (r"`torch.distributed.*deprecated", FutureWarning),
    # Its optimizer reads .grad of every shard, and torch keeps gradients of leaves only.
    (".*grad attribute of a Tensor that is not a leaf", UserWarning),
    # FSDP2's: the embedding of one sample returns a view. Only an in-place operation that autograd
    # records could break it, and there is none: streamed layers write through an alias.
    (r"FSDP2-wrapped module .* returned a view", UserWarning),
):
    warnings.filterwarnings("ignore", message=_message, category=_category)
# On a CPU its "GPU" generator is the CPU's own: it warns whenever it forks both.
logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
