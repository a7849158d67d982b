"""Foreign checkpoints: reading, writing, and rules for their layouts; `looking` opens any checkpoint."""
