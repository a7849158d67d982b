"""Reading everything of a step: what a damaged one says to it."""

from __future__ import annotations

from holdfast.core.checkpoint.opened import Checkpoint, plain_tensor
from holdfast.core.format.extras import decode
from holdfast.store import Store


def read_everything(store: Store, step: int = 1) -> None:
    """All tensors, extras and every rank's extras of a step."""
    c = Checkpoint.open(store.url, step)
    for name in c.names():
        c.read(name)
    assert c.extras is not None
    for file in c.manifest.files:
        for tree in c.file_extras(file).values():
            decode(tree, plain_tensor)
