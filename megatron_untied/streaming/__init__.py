"""Transformer layers whose activations are streamed: in tiles, in head chunks, to the host.

:mod:`.layer` is the order of one layer: everything token-wise runs on a tile of the sequence at a
time (:mod:`megatron_untied.tiling`), attention on a chunk of heads at a time. Between forward and
backward :mod:`.activation_store` holds what a layer saved: on the device, in host memory
(:mod:`.host_arena`), or not at all because :func:`.layer.recompute` computes it again.
:mod:`.activation_policy` decides which, and :mod:`.memory_plan` adds it all up without a run.

Memory is counted in H: the bytes of one bf16 residual on one rank, n * b * m elements.
"""
