"""What a run would take: bytes by cause in every phase of a step, and its time. Nothing is run.

Pure arithmetic on the configuration, one module a subject: :mod:`.geometry` (sizes of one rank),
:mod:`.parameters` and :mod:`.sharding` (weights), :mod:`.attention` (buffers of the loop over
chunks), :mod:`.stash` (what layers keep, device and host), :mod:`.tiles`, :mod:`.loss`,
:mod:`.step` (all of it, phase by phase), :mod:`.time`. :mod:`.search` looks for flags that fit;
:mod:`.methods` has the rules of published methods.
"""
