"""Who owns which tokens and heads, and the attention over them.

Shapes use one legend throughout the package:

======  ==========================================  ======  ==================================
``s``   tokens in the whole sequence                ``h``   query heads on this TP rank
``p``   ranks that trade sequence for heads         ``g``   key-value heads on this TP rank
``n``   tokens on one rank, s/p                     ``d``   head width
``b``   micro-batch                                 ``u``   query heads in one chunk, all ranks
======  ==========================================  ======  ==================================

A tensor's way through a layer: the module in :mod:`.self_attention` projects q, k, v of its own
tokens; :mod:`.untied` sends a few heads at a time through :mod:`.all_to_all` so that each rank
sees the whole sequence of its own heads, calls a kernel of :mod:`.kernels`, and sends the result
back. With a ring, what a rank sees are two blocks of the sequence, and :mod:`.ring` brings the
keys and values of the others; ``s`` after an exchange is then the tokens of the two blocks.
:mod:`.head_schedule` says which heads travel when, in integers; :mod:`.workspace` holds the
buffers, which every chunk, layer and step uses again.
"""
