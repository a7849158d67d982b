"""State that some ranks have and others lack, where it looks as if these had forgotten it.

Names may differ between ranks on purpose: stages of a pipeline, experts, one name per rank.  Then each rank
has names that others lack.  So only a rank with *no* name of its own is told of: another rank has all its
names under a key, and further ones.

    rank 0   model.weight  model.best       rank 0   model.0  model.2      rank 0   model, loader
    rank 1   model.weight                   rank 1   model.1               rank 1   model
             lacks model.best                        nothing to tell                lacks loader

A rank without any tensor of a kind is not told of (ZeRO may leave it no states).  Nor are tensors that the
manifest lists part by part: a rank may have no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations

import numpy as np

from holdfast.base.errors import warn_user
from holdfast.base.text import first_of, listed
from holdfast.base.wire import decode_msgpack
from holdfast.core.format.manifest import Manifest
from holdfast.live.saving.messages import ReadyToSave
from holdfast.live.state.agreed import Description


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


MOST_SETS = 32
"""Ranks with more distinct sets of names are taken for stages or experts."""
MOST_NAMED = 10
MOST_RANKS = 4

NamesByGroup = Mapping[tuple[str, str], Iterable[str]]
"""Names that a rank has, by group: a key, and the kind of a tensor."""


def forgotten_names(
    held: Sequence[tuple[NamesByGroup, Sequence[int]]],
) -> dict[str, tuple[list[int], list[int]]]:
    """The ranks that have and that lack each forgotten name.  `held`: sets of names, with the ranks that
    have exactly these."""
    groups: dict[tuple[str, str], dict[frozenset[str], list[int]]] = {}
    for names, ranks in held:
        for group, some in names.items():
            groups.setdefault(group, {}).setdefault(frozenset(some), []).extend(ranks)
    found: dict[str, tuple[list[int], list[int]]] = {}
    for sets in groups.values():
        if not 1 < len(sets) <= MOST_SETS:
            continue
        for few, many in permutations(sets, 2):
            if few and few < many:
                for name in sorted(many - few):
                    having = sorted(
                        r for some, ranks in sets.items() if name in some for r in ranks
                    )
                    lacks = found.setdefault(name, (having, []))[1]
                    lacks += [rank for rank in sets[few] if rank not in lacks]
    return found


def tell_forgotten(
    found: Mapping[str, tuple[list[int], list[int]]], told: set[str], *, restored: bool
) -> None:
    """Warn, on one rank, of names that were not `told` yet."""
    new = {name: ranks for name, ranks in found.items() if name not in told}
    told.update(new)
    if not new:
        return
    lines = [f"{name}: {_in_words(*ranks)}" for name, ranks in new.items()]
    what = "nothing of it is restored there" if restored else "no restore gives these any"
    warn_user(
        f"some ranks have state that others lack, and {what}: hand it over on all ranks, or under names "
        "that say whose it is:\n  " + "\n  ".join(first_of(lines, MOST_NAMED)),
        notice="one-rank-alone",
    )


def _in_words(having: list[int], lacks: list[int]) -> str:
    return f"{_ranks(having)} {'have' if having[1:] else 'has'} it, {_ranks(sorted(lacks))} not"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * bool(ranks[1:])} {listed(ranks, MOST_RANKS)}"
