"""Text to token files, token files to samples, samples to the micro-batches of one rank.

A sample is a dict of four tensors over the whole sequence: ``tokens [s]``, ``labels [s]``,
``loss_mask [s]`` and ``positions [s]``. It is cut over context-parallel ranks later, elsewhere.
No attention mask is ever made.
"""
