"""Hugging Face folders in and out: ``config.json``, safetensors files and the tokenizer's files.

Nothing of the transformers library is used: a folder is JSON and tensors. Both directions hold one
block of a tensor at a time, whatever the size of the model.
"""

from megatron_untied.hf.exporting import Export
from megatron_untied.hf.importing import Import

__all__ = ["Export", "Import"]
