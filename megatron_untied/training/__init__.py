"""The trainer: the training loop, its set-up, its reports, and what ends a run; see ``loop.py``."""
