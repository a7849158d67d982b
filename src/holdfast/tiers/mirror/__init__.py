"""A second home of the steps of a run, behind its root: `Checkpointer(root, state, upload=...)`.

`claims.py` takes both homes for a run, under one number.  `upload.py` has the rounds in which all
ranks upload a step, `behind.py` what each does there, `waiting.py` the saves that wait, `news.py`
what the user is told.  `records.py` copies records, without rounds.
"""
