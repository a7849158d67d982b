"""The durable tier: images to storage, off the training thread.

Digests and writes follow the copier through the image.  *Commit*: every rank posts its file or its error;
rank 0 writes the manifest only if all have succeeded and its claim on the root still stands.  A failed
save leaves no manifest, its files are deleted, and the next save starts afresh.
"""

from holdfast.durable.tier import Durable

__all__ = ["Durable"]
