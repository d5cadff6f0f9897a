"""How data- and context-parallel ranks share a model, its gradients and its optimizer.

``interface.py`` states what a training step needs. There are two implementations: ``zero1.py``
keeps whole weights and gradients on every rank and shards optimizer states (megatron-core),
``fsdp2.py`` shards all three (PyTorch). Independent of both, ``parameter_layout.py`` relates what a
rank holds to the global tensors of the whole model, ``shards.py`` gives checkpoints access to it,
and ``initialize_weights.py`` draws the same initial weights for every sharding.
"""
