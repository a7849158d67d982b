"""Readers of foreign checkpoints, in place: each format becomes tensors, fragments and extras."""
