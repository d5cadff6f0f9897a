"""What memory is for: the rows of every table of the planner."""

from collections import Counter
from enum import StrEnum


class Cause(StrEnum):
    """Why bytes are taken."""

    STATES = "weights and moments"
    GRADIENTS = "gradients at rest"
    GATHERED = "gathered weights"
    WEIGHT_GRADIENTS = "gradients on their way"
    RESIDUAL = "residual"
    KEPT = "kept for backward"
    SLOTS = "attention outputs, all heads"
    CHUNKS = "chunks of heads"
    KERNEL = "attention kernel"
    TILES = "tiles"
    LOGITS = "logits"
    INPUTS = "batch and rotary table"
    LOADER = "data loader"
    PARKED = "parked during attention"


Bytes = Counter[Cause]
"""Bytes by cause; they add up with ``+``, which drops what is not there."""
