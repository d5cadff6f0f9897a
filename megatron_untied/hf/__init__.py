"""Converts between Hugging Face folders and checkpoints.

A folder has ``config.json``, safetensors files and the tokenizer's files. The transformers library
is not needed for them. Both directions hold one block of a tensor in memory at a time, whatever the
size of the model.
"""

from megatron_untied.hf.exporting import Export
from megatron_untied.hf.importing import Import

__all__ = ["Export", "Import"]
