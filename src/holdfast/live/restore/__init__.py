"""Restoring, below the kinds of values: which step, what does not fit, from files to live tensors.

candidates    which steps there are, over all tiers, and the newest that is good: pure
targets       live tensors as memory to read into        compare    what differs, and by whose leave
optimizer_states  where states of parameters go          expected   states that an optimizer will look for
groups        parameter groups, saved and live           nested     objects inside lists and dicts
filling       a script's own containers                  settings   groups, after all is loaded
masters       16-bit weights and their masters           former     names of earlier versions
overlapping   tensors whose elements share memory
result        what the caller is told
"""
