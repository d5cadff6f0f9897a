"""Context parallelism: the tokens and heads of each rank, and attention over all of them.

One legend for the whole project:

======  ==========================================  ======  ====================================
``s``   tokens in the whole sequence                ``h``   query heads on this TP rank
``p``   context-parallel ranks, a * r               ``g``   key-value heads on this TP rank
``a``   Ulysses ranks: they trade tokens for heads  ``d``   head width
``r``   ring ranks: they pass keys and values on    ``u``   query heads per chunk, on all a ranks
``n``   tokens per rank, s/p                        ``m``   hidden size
``b``   micro-batch                                 ``t``   tensor-parallel ranks
======  ==========================================  ======  ====================================

A tensor is *sequence-sharded* when a rank holds its own tokens of all heads, [n, b, h, d], and
*head-sharded* when the Ulysses ranks have exchanged it and a rank holds the tokens of all of them
for its own heads, [s/r, b, u/a, d]. Without a ring s/r is the whole sequence.

Read :mod:`.ulysses` first: it is the method, a loop over chunks of heads that loads a chunk
(project, rotate, exchange), attends, and sends the result home. What it is made of:

- :mod:`.head_schedule`: which heads travel when, in integers;
- :mod:`.buffer_plan`: which memory that takes, in integers; :mod:`.workspace` holds it;
- :mod:`.exchange`: the all-to-all, and tensors stored chunk by chunk so that it copies nothing;
- :mod:`.kernels`: one contract for all attention kernels;
- :mod:`.ring`: attention where r ranks hold the tokens of one head;
- :mod:`.kv_gradients`: dK and dV, summed over the chunks that use a head;
- :mod:`.sequence`: which tokens a rank owns, and which documents they belong to;
- :mod:`.self_attention`: the module for megatron-core's ``self_attention`` slot.
"""
