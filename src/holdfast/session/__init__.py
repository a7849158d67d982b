"""A training's own calls: `Checkpointer`, `save`, `load`, and what a restart does."""
