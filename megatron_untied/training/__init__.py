"""Flags to configuration, the training loop, and what it reports; start at ``pretrain.py``."""
