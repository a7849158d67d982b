"""DeepSpeed checkpoints, read in place and without torch or DeepSpeed."""
