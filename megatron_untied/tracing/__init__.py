"""What a training step takes of one rank, counted by running it on tensors without memory."""
