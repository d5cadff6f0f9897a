"""Bytes by what they are for: the rows of every table of the planner."""

from collections import Counter

from megatron_untied.phases import MemoryCategory as Cause

Bytes = Counter[Cause]
"""Bytes by cause; they add up with ``+``, which drops what is not there."""
