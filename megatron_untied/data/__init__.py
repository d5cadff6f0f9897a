"""From text to token files, from token files to samples, from samples to micro-batches of one rank.

A sample is a dict of four tensors over the whole sequence: ``tokens [s]``, ``labels [s]``,
``loss_mask [s]`` and ``positions [s]``. Training later splits it over the context-parallel ranks.
An attention mask is never materialized.
"""
