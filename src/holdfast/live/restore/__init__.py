"""Restoring: from what there is to live tensors, for `Checkpointer.restore` and `holdfast.load` alike.

candidates    which steps there are, over all tiers, and the newest that is good: pure
reading       one step of a root, or of files of others, on all ranks
transaction   prepare everything that can fail; read; put back; poison what is half read
    targets     live tensors as memory to read into        compare    what differs, and by whose leave
    extras      values that are no tensors                 expected   states that are not there yet
    groups      parameter groups, saved and live           nested     objects inside lists and dicts
    masters     16-bit weights and their masters           former     names of earlier versions
    overlapping tensors whose elements share memory
result        what the caller is told
"""
