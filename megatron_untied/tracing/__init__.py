"""Counts what a training step takes of a device, on a machine that has none."""
