"""The durable tier: one save from the call to the commit, off the training thread.

```
training thread   call: name, place, encode extras, set buffers aside ──► next step ──► hook waits
capture thread          agree with all ranks ──► copy into the image ──────────────────┘
persist thread                                     digest and write ──► report ──► commit
```
*Agree*: every rank posts the digest of its description and of each extra; rank 0 answers which extras are
common and whether a new plan is needed.  *Commit*: every rank posts its file or its error; rank 0 writes
the manifest only if all have succeeded and its claim on the root still stands.
A failed save leaves no manifest, its files are deleted, and the next save starts afresh.
"""

from holdfast.durable.job import Save
from holdfast.durable.tier import Durable

__all__ = ["Durable", "Save"]
