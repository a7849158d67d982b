"""From a call to a filled image, off the training thread; what becomes of the image is a tier's business.

```
training thread   call: name, place, encode extras, set buffers aside ──► next step ──► hook waits
capture thread          agree with all ranks ──► copy into the image ──────────────────┘
a tier's thread                                    digest, protect, write ──► commit
```
*Agree*: every rank posts the digest of its description and of each extra; rank 0 answers which extras are
common and whether a new plan is needed.
"""

from holdfast.capture.capture import Capture, Tier
from holdfast.capture.job import Save, SaveJob, text_of

__all__ = ["Capture", "Save", "SaveJob", "Tier", "text_of"]
