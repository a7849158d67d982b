"""The plain values of a step, as a restore would give them, before there is a state to put them into.

A value that each rank keeps for itself is returned as by a restore: this rank's own on the same number of
ranks, else by its rule (`on_resize`).  A value that only the live object could make is named instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.group import Group
from holdfast.live.restore.decoding import decode_value
from holdfast.live.state.placed import torch_dtype
from holdfast.live.state.recognising import State


@dataclass
class Plain:
    """Values by key, and the keys of undecided values, each with the reason."""

    values: dict[str, Any] = field(default_factory=dict)
    undecided: dict[str, str] = field(default_factory=dict)

    def update(self, newer: Plain) -> None:
        """Update with newer values, as those of a record after its full step."""
        for key in (*newer.values, *newer.undecided):
            self.values.pop(key, None)
            self.undecided.pop(key, None)
        self.values |= newer.values
        self.undecided |= newer.undecided


def plain_values(
    checkpoint: Checkpoint, state: State, group: Group, on_resize: dict[str, str]
) -> Plain:
    """Return the plain values of an opened step for this rank.  Corrupt, FormatError, NotFound."""
    manifest, found = checkpoint.manifest, Plain()
    trees = {key: tree for key, tree in manifest.extras.items() if _is_plain(key, tree)}
    own = [key for key in manifest.per_rank if _is_plain(key)]
    if own and manifest.layout.world == group.size:
        mine = checkpoint.rank_extras(group.rank)
        trees |= {key: mine[key] for key in own if key in mine and _is_plain(key, mine[key])}
        own = []
    ranks = sorted(manifest.file_of)
    head = checkpoint.rank_extras(ranks[0]) if own and ranks else {}
    for key in (key for key in own if _is_plain(key, head.get(key))):
        live = getattr(state.get(key), "on_resize", None)
        rule = on_resize.get(key) or live or manifest.per_rank[key]
        if rule in ("rank0", "same"):
            every = map(checkpoint.rank_extras, ranks)
            first = next((theirs for theirs in every if key in theirs), {})
            trees |= {key: first[key]} if first else {}
        elif rule != "fresh":
            was = (
                f"each of {manifest.layout.world} ranks had its own, and there are {group.size} now"
            )
            found.undecided[key] = (
                f"{was}: redistribute() of the live object deals them out"
                if rule == "redistribute"
                else f"{was}, with no rule for that: on_resize={{{key!r}: ...}}"
            )
    found.values = {key: _decoded(tree, checkpoint) for key, tree in trees.items()}
    return found


def _is_plain(key: str, tree: Any = None) -> bool:
    """True unless an extra is part of a module, or an optimizer's."""
    return "." not in key and not (isinstance(tree, dict) and "$optimizer" in tree)


def _decoded(tree: Any, checkpoint: Checkpoint) -> Any:
    def tensor(name: str) -> torch.Tensor:
        info = checkpoint.info(name)
        return torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta")

    return decode_value(tree, tensor)
