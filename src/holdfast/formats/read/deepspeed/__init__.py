"""DeepSpeed checkpoints, read where they lie and without torch or DeepSpeed."""
