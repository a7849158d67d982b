"""A second home of the steps of a run, behind its root: `Checkpointer(root, state, upload=...)`.

`homes.py` checks that the two homes are apart, takes both for a run, under one number, and decides whether
a restart saves a step anew for the home that lacks it.  `upload.py` has the rounds in which all ranks
upload a step, `behind.py` what each rank does in a round, `waiting.py` the saves that wait, `news.py` the
messages to the user.  `records.py` copies records, without rounds.
"""
