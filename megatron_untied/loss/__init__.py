"""Cross entropy from hidden states, without the logits of all tokens at once.

``chunked_cross_entropy.py`` computes loss and gradients one chunk of tokens at a time;
``vocabulary_split.py`` reduces over the tensor-parallel ranks that share the vocabulary.
"""
