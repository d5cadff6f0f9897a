"""A training step of one rank, counted by running it on tensors without memory."""
