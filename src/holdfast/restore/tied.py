"""Names of one live tensor that are two tensors in the checkpoint.

A tied weight goes by two names and is filled once.  Other writers, `dcp.save` among them, write it under
each, which is well.  If the two differ, the model was not tied when it was saved, and one would be lost.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from holdfast.checkpoint.diffing import BLOCK_BYTES, blocks
from holdfast.checkpoint.opened import Checkpoint
from holdfast.checkpoint.reading import read_alone
from holdfast.checkpoint.rows import RAW, ArrayTarget, Want
from holdfast.errors import FormatError, StoreError
from holdfast.format.dtypes import DTYPES
from holdfast.layout import Box
from holdfast.state.live import Live


def differing(checkpoint: Checkpoint, live: Live, twice: dict[str, str]) -> list[str]:
    """Further names, with the first, whose saved values differ on what this rank has of the tensor; read
    in blocks of bounded size.  `twice`: the first names, by further ones."""
    tensors = checkpoint.manifest.tensors
    found = []
    for name, first in twice.items():
        one, other = (tensors[checkpoint.index(n)] for n in (first, name))
        boxes = [part.box for part in live.tensors[first].parts]
        if one.shape != live.tensors[first].placed.shape:
            continue  # which is told already
        if (one.shape, one.dtype) == (other.shape, other.dtype):
            with suppress(FormatError, StoreError):  # met again, by all ranks together
                if _agree(checkpoint, (first, name), one.dtype, boxes):
                    continue
                found.append(
                    f"{name} (here it is {first}, but the two were saved with different values)"
                )
        else:
            kind = f"as {other.dtype} {other.shape}, that one as {one.dtype} {one.shape}"
            found.append(f"{name} (here it is {first}, but this one was saved {kind})")
    return found


def _agree(checkpoint: Checkpoint, names: tuple[str, str], dtype: str, boxes: list[Box]) -> bool:
    """True if both tensors have the same bits in all boxes."""
    size = DTYPES[dtype].bytes
    for box in boxes:
        for block in blocks(box.shape, BLOCK_BYTES // size):
            start, stop = (
                tuple(map(sum, zip(ends, box.start))) for ends in (block.start, block.stop)
            )
            one, other = (np.empty(block.shape, RAW[size]) for _ in names)
            wants = [
                Want(checkpoint.index(name), Box(start, stop), ArrayTarget(array))
                for name, array in zip(names, (one, other))
            ]
            read_alone(checkpoint.images, wants)
            if not np.array_equal(one.reshape(-1).view("u1"), other.reshape(-1).view("u1")):
                return False
    return True
