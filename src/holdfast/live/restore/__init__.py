"""Restoring, below the kinds of values: the choice of a step, differences, and memory for saved tensors.

candidates         the newest good step: a pure choice     compare          differences, over all ranks
targets            live tensors as memory to read into     mismatches       a difference as a value
optimizer_states   memory for states of parameters         expected         states an optimizer looks for
matching_by_order  parameters without names                param_groups     parameter groups, saved and live
nested             objects inside lists and dicts          filling          a script's own containers
masters            16-bit weights and their masters        former_names     names of earlier versions
one_memory         tensors that share memory               values_per_rank  optimizers whose ranks differ
composite_states   tensors that are made of several        result           the answer to the caller
"""
