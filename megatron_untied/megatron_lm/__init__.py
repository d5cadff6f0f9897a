"""Layer specs for Megatron-LM's own ``pretrain_gpt.py``; see docs/megatron_lm.md.

``--spec megatron_untied.megatron_lm untied_spec`` is the standard layer with our attention,
``streamed_spec`` the streamed layer, and :func:`untied_layer_spec` builds others. The model itself
is configured by Megatron-LM's flags.
"""

from megatron_untied.megatron_lm.specs import streamed_spec, untied_layer_spec, untied_spec

__all__ = ["streamed_spec", "untied_layer_spec", "untied_spec"]
