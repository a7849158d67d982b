"""Notices, at a save and at a restore, of state that some ranks lack (`live.state.missing_on_ranks`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.base.wire import decode_msgpack
from holdfast.core.format.manifest import Manifest
from holdfast.live.saving.messages import ReadyToSave
from holdfast.live.state.agreed import Description
from holdfast.live.state.missing_on_ranks import forgotten_names, tell_forgotten


def tell_keys(ready: Sequence[ReadyToSave], told: set[str]) -> None:
    """At a save: give a notice of plain values and objects whose key some ranks lack."""
    keys = [{key for key in r.extras.keys() | r.kinds.keys() if "." not in key} for r in ready]
    held = [({("", ""): own}, [rank]) for rank, own in enumerate(keys)]
    values = {key for r in ready for key, (kind, _) in r.kinds.items() if kind == "values"}
    found = {key: ranks for key, ranks in forgotten_names(held).items() if key in values}
    tell_forgotten(found, told, restored=False)


def tell_tensors(docs: Sequence[bytes], of_rank: Sequence[int], told: set[str]) -> None:
    """At a save: give a notice of tensors that some ranks lack.  Rank r's description is
    `docs[of_rank[r]]`."""
    if len(docs) == 1:
        return
    held = []
    listed: set[tuple[str, str]] = set()
    for number, doc in enumerate(docs):
        groups: dict[tuple[str, str], set[str]] = {}
        for t in decode_msgpack(doc, Description).tensors:
            group = t.name.partition(".")[0], t.state
            groups.setdefault(group, set()).add(t.name)
            if t.cuts is None:
                listed.add(group)
        held.append((groups, [rank for rank, one in enumerate(of_rank) if one == number]))
    kept = [
        ({g: names for g, names in groups.items() if g not in listed}, ranks)
        for groups, ranks in held
    ]
    tell_forgotten(forgotten_names(kept), told, restored=False)


def tell_lacking(
    manifest: Manifest, claimed: Sequence[bytes], keys: Sequence[Sequence[str]]
) -> None:
    """At a restore: give a notice of saved tensors and keys that some ranks lack.  `claimed`: by rank, one
    bit for each saved tensor that the rank restores; `keys`: by rank, the keys of its state."""
    held = [({("", ""): [*own]}, [rank]) for rank, own in enumerate(keys)]
    saved = manifest.extras.keys() | manifest.per_rank.keys()
    found = {key: ranks for key, ranks in forgotten_names(held).items() if key in saved}
    masks: dict[bytes, list[int]] = {}
    for rank, mask in enumerate(claimed):
        masks.setdefault(mask, []).append(rank)
    if len(masks) > 1:
        tensors = manifest.tensors
        kept = []
        for mask, ranks in masks.items():
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(tensors))
            groups: dict[tuple[str, str], list[str]] = {}
            for t in (tensors[i] for i in np.flatnonzero(bits).tolist()):
                if manifest.shardings[t.sharding].held is None:
                    groups.setdefault((t.name.partition(".")[0], t.state), []).append(t.name)
            kept.append((groups, ranks))
        found |= forgotten_names(kept)
    tell_forgotten(found, set(), restored=True)
