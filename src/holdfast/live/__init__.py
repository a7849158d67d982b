"""Live objects <-> named, placed tensors: the kinds of state, saving, restoring."""
