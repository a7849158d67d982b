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

from holdfast.base.errors import warn_user
from holdfast.base.text import first_of, listed

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
