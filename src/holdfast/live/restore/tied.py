"""Tied weights that the checkpoint has as two tensors.

A tied weight has two names and is filled once.  Other writers, `dcp.save` among them, write it under each
name.  If the two tensors differ, the model was not tied at the save, and one would be lost.  All ranks that
have such a weight compare it together, so that it is read once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from zlib import crc32

import msgspec
import numpy as np

from holdfast.base.errors import warn_user
from holdfast.base.text import listed
from holdfast.base.wire import decode_msgpack
from holdfast.core.checkpoint.diffing import COMPARED_BYTES, blocks
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.peers import raise_on_all
from holdfast.core.checkpoint.reading import read_alone
from holdfast.core.checkpoint.rows import RAW, ArrayTarget, Want
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.format.manifest import TensorEntry
from holdfast.core.group import Group
from holdfast.live.restore.mismatches import Mismatch
from holdfast.live.state.named import Prepared


def tell_untied(checkpoint: Checkpoint, live: Prepared) -> None:
    """HoldfastWarning for tensors of modules that were tied at the save and are not tied now: both get the
    saved values, and training changes them apart."""
    tensors = live.tensors
    pairs = [
        f"{first} and {name}"
        for name, first in checkpoint.manifest.aliases.items()
        if name in tensors
        and first in tensors
        and {tensors[name].state, tensors[first].state} <= {"param", "buffer"}
        and tensors[name].placed.local.data_ptr() != tensors[first].placed.local.data_ptr()
    ]
    if pairs:
        warn_user(
            f"{listed(pairs, 4)}: one tensor when step {checkpoint.step} was saved, and two "
            "here, which a training changes apart; tie them before restore(), as after torch's to_empty()",
            notice="untied",
        )


def saved_twice(checkpoint: Checkpoint, live: Prepared) -> dict[str, str]:
    """The first name by the further name, for tied parameters that are two tensors in the checkpoint.
    Optimizer states differ where their parameters do."""
    tensors, find = checkpoint.manifest.tensors, checkpoint.manifest.find
    return {
        name: first
        for name, first in live.aliases.items()
        if first in live.tensors
        and live.tensors[first].state == "param"
        and first not in live.padded
        and None not in (both := {find(name), find(first)})
        and len(both) == 2
        and tensors[checkpoint.index(first)].shape == live.tensors[first].placed.shape
    }


def differing_together(
    checkpoint: Checkpoint,
    twice: dict[str, str],
    having: Sequence[tuple[str, str, list[int]]],
    group: Group,
) -> list[Mismatch]:
    """Return, on every rank, the further names whose saved values differ from those of the first ones.
    `twice`: this rank's, the first names by further ones; `having`: a further name, a first one, and the
    ranks that have both.  Collective; reads in blocks of bounded size, and raises on all what fails on
    one."""
    found = []
    ranks_of = {(name, first): ranks for name, first, ranks in having}
    with raise_on_all(group, checkpoint.step):
        for name, first in twice.items():
            ranks = ranks_of[name, first]
            share = (ranks.index(group.rank) + crc32(name.encode())) % len(ranks)
            why = _difference(checkpoint, first, name, share, len(ranks))
            said = f" (here it is {first}, but {why})"
            found += [Mismatch("unexpected", name, said)] if why else []
    group.asked += 1
    answer = group.ask(
        f"ties/{group.asked}",
        msgspec.msgpack.encode(found),
        lambda answers: msgspec.msgpack.encode(
            list(dict.fromkeys(x for a in answers for x in decode_msgpack(a, list[Mismatch])))
        ),
        awaited=f"compared the tied weights of step {checkpoint.step}",
    )
    return decode_msgpack(answer, list[Mismatch])


def _difference(checkpoint: Checkpoint, first: str, name: str, share: int, shares: int) -> str:
    """Return how two tensors differ, in so far as every `shares`-th block of them tells; empty: not."""
    one, other = (checkpoint.manifest.tensors[checkpoint.index(n)] for n in (first, name))
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"this one was saved as {other.dtype} {other.shape}, that one as {one.dtype} {one.shape}"
    is_same = _agree(checkpoint, one, other, share, shares)
    return "" if is_same else "the two were saved with different values"


def _agree(
    checkpoint: Checkpoint, one: TensorEntry, other: TensorEntry, share: int, shares: int
) -> bool:
    """True if both tensors have the same bits in these blocks."""
    size, indexes = DTYPES[one.dtype].bytes, [checkpoint.index(t.name) for t in (one, other)]
    for block in islice(blocks(one.shape, COMPARED_BYTES // size), share, None, shares):
        arrays = [np.empty(block.shape, RAW[size]) for _ in indexes]
        wants = [Want(i, block, ArrayTarget(array)) for i, array in zip(indexes, arrays)]
        read_alone(checkpoint.images, wants)
        bits, others = (array.reshape(-1).view("u1") for array in arrays)
        if not np.array_equal(bits, others):
            return False
    return True
