"""The training loss, computed without the logits of the whole sequence."""
