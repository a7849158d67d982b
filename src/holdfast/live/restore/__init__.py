"""Restoring, below the kinds of values: the choice of a step, differences, and memory for saved tensors.

candidates        the newest good step of all tiers: pure     compare     differences, over all ranks
targets           live tensors as memory to read into         mismatches  a difference as a value
optimizer_states  memory for states of parameters             expected    states that an optimizer looks for
groups            parameter groups, saved and live            positions   parameters without names
nested            objects inside lists and dicts              filling     a script's own containers
masters           16-bit weights and their masters            former      names of earlier versions
overlapping       tensors whose elements share memory         one_memory  tensors that share memory
result            the answer to the caller
"""
