"""The layer that never holds more than it must.

Everything token-wise runs a tile of the sequence at a time (:mod:`.tiles`), attention a few heads
at a time. :mod:`.layer` is the order of both, forward and backward; :mod:`.stash` is what a layer
keeps between the two, and where: device, host (:mod:`.host_arena`), or nowhere because it is
computed again.

Memory is counted in H = n * b * m elements: one residual tensor on one rank.
"""
