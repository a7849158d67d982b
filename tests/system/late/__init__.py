"""A simulated device whose work is late, and the tests that run on it."""
