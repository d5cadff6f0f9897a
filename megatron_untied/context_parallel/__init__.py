"""Context parallelism: the tokens and heads of each rank, and attention over all of them.

The letters of shapes are those of ``docs/glossary.md``: s tokens in the sequence, p = a * r ranks
(a Ulysses, r ring), n = s/p tokens per rank, b micro-batch, m hidden size, d head width; h query
heads and g key-value heads on one tensor-parallel rank, u query heads per chunk.

A tensor is *sequence-sharded* when a rank holds its own tokens of all heads, [n, b, h, d], and
*head-sharded* when the Ulysses ranks have exchanged it and a rank holds the tokens of all of them
for its own heads, [s/r, b, u/a, d]. Without a ring s/r is the whole sequence.

Read :mod:`.ulysses` first: it is the method, a loop over chunks of heads that loads a chunk
(project, rotate, exchange), attends, and returns the output. What it is made of:

- :mod:`.head_schedule`: which heads travel when, in integers;
- :mod:`.buffer_plan`: which memory that takes, in integers; :mod:`.workspace` holds it;
- :mod:`.exchange`: the all-to-all, and tensors stored chunk by chunk so that it copies nothing;
- :mod:`.kernels`: one contract for all attention kernels;
- :mod:`.ring`: attention where r ranks hold the tokens of one head;
- :mod:`.kv_gradients`: dK and dV, summed over the chunks that use a head;
- :mod:`.sequence`: which tokens a rank owns, and which documents they belong to;
- :mod:`.self_attention`: the module for megatron-core's ``self_attention`` slot.
"""
