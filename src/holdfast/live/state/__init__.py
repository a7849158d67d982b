"""Live objects, tensor by tensor: names, places in the whole, when to copy, what changes, what is unsaved.

Knows nothing of saves, restores, storage and tiers, which use it.
"""
