"""A second home of the steps of a run, behind its root: `Checkpointer(root, state, upload=...)`.

`claims.py` takes both homes for a run, under one number; `upload.py` copies each committed step on.
"""
