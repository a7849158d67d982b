"""The messages between ranks in a save, and rank 0's answers.

Before the copy each rank sends its step, and the digests of its description and of each extra
(`ReadyToSave`). Rank 0 answers whether to go on, which ranks must send their description, and which extras
are common or per rank (`Verdict`).  After writing, each rank sends its file or its error (`Written`), and
rank 0 answers with the outcome (`SaveOutcome`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.base.errors import RuleError, UsageError
from holdfast.base.wire import WireError
from holdfast.core.codec.digest import hexdigest
from holdfast.core.format.manifest import FileEntry
from holdfast.live.state.agreed import Class, Sample
from holdfast.live.state.encoding import PER_RANK
from holdfast.live.state.named import Collected


class ReadyToSave(msgspec.Struct, frozen=True, array_like=True):
    """A rank's message to rank 0 before a save."""

    step: int
    busy: bool
    description: str
    agreement: str
    extras: dict[str, tuple[str, str]]
    """key: (digest, rule)"""
    error: WireError | None = None
    """Why this rank cannot save."""
    large: list[str] = []
    """Keys of extras that refer to tensors of the checkpoint, which are common to all ranks."""
    sample: Sample | None = None
    """A sample of this rank's replicas, to be compared; None if it cannot take one."""
    kinds: dict[str, tuple[str, str]] = {}
    """(kind of state, name of the type) of this rank's values, by key of the state."""


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """The answer of rank 0 to all ranks' `ReadyToSave`."""

    go: bool
    describe: list[int]
    """Ranks that must send their description, for a new plan."""
    per_rank: dict[str, str | None]
    send: dict[str, list[int]]
    """By key, the ranks that must send their version of an extra."""
    errors: dict[int, WireError] = {}
    doubted: list[Class] = []
    """Classes of replicas that differ, by the ranks' samples."""
    round: int = 0
    """Number of the next sample."""


class Written(msgspec.Struct, frozen=True, array_like=True):
    """A rank's message to rank 0 after its part of a save: its file or its error."""

    error: WireError | None
    file: FileEntry | None
    extras: dict[str, Any]


class SaveOutcome(msgspec.Struct, frozen=True, array_like=True):
    """The answer of rank 0 to all `Written`: errors by rank, empty if the save is committed."""

    errors: dict[int, WireError]


def check_kinds(ready: list[ReadyToSave]) -> None:
    """UsageError for a key whose values are of different kinds on two ranks, which could not be restored.
    A rank without a value (None, an empty list) has no kind."""
    first: dict[str, tuple[int, tuple[str, str]]] = {}
    for rank, r in enumerate(ready):
        for key, kind in r.kinds.items():
            other, known = first.setdefault(key, (rank, kind))
            if kind[0] != known[0]:
                raise UsageError(
                    f"{key!r} is of type {known[1]} on rank {other} and {kind[1]} on rank {rank}: the "
                    "values of a key must be tensors, modules, optimizers or other values on all ranks",
                    hint="give them different keys, which need not be on all ranks",
                )


def digests(live: Collected) -> dict[str, tuple[str, str]]:
    """Return (digest, rule) of a rank's extras, by key.

    An optimizer has five digests, joined by `/`: the parameter names of its groups, the groups' values, the
    names of parameters with states that are not tensors, these states, and the rest.
    """
    found = {}
    for key, tree in live.extras.items():
        rule, parts = live.rules.get(key, ""), [[tree, live.contents.get(key, [])]]
        if rule == "merge":
            from holdfast.live.saving.merging import digested_parts

            parts = digested_parts(*parts[0])
        one = [hexdigest(msgspec.json.encode(part, order="sorted")) for part in parts]
        found[key] = "/".join(one), rule
    return found


def sort_extras(
    ready: list[ReadyToSave],
) -> tuple[dict[str, str | None], dict[str, list[int]]]:
    """Return the extras that each rank keeps for itself (with the rule), and the ranks that send common
    ones.

    Optimizers' extras are merged over ranks with different parameters (pipeline stages).  Each rank keeps
    its own if ranks differ in the values of the same parameters, as when an optimizer computes a value from
    its own part of sharded gradients.
    """
    per_rank: dict[str, str | None] = {}
    send: dict[str, list[int]] = {}
    for key in dict.fromkeys(k for r in ready for k in r.extras):
        holders = [rank for rank, r in enumerate(ready) if key in r.extras]
        rule = ready[holders[0]].extras[key][1]
        first: dict[str, int] = {}
        for rank in holders:
            first.setdefault(ready[rank].extras[key][0], rank)
        if rule == "same" and len(first) > 1:
            raise RuleError(
                f"{key!r} is declared to be the same on all ranks, but ranks "
                f"{sorted(first.values())[:4]} differ",
                hint="declare rank0, redistribute or fresh instead (on_resize)",
            )
        if rule in PER_RANK:
            per_rank[key] = None if rule == "ask" else rule
        elif rule == "rank0" or len(first) == 1:
            send[key] = [] if holders[0] == 0 else holders[:1]
        elif _may_merge(key, ready, first):
            send[key] = sorted(first.values())
        else:
            per_rank[key] = None
    return per_rank, {k: v for k, v in send.items() if v}


def _may_merge(key: str, ready: list[ReadyToSave], versions: dict[str, int]) -> bool:
    if ready[0].extras.get(key, ("", ""))[1] != "merge":
        return False
    from holdfast.live.saving.merging import differ

    return not differ(versions)
