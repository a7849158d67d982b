"""Foreign checkpoints, read where they lie: each format becomes tensors, fragments and extras."""
