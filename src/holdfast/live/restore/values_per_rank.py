"""Optimizers whose values differ between ranks for the same parameters: each rank saves its own.

Some optimizers compute a value from a rank's shards alone: the step size that prodigyopt's Prodigy
estimates from sharded gradients differs between ranks.  On the same layout each rank gets its own values
back.  On another layout no rank's values are right: the restore is refused (`Restoring.check_rules`),
unless `on_resize` has a rule.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import msgspec

from holdfast.base.text import listed
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.group import Group
from holdfast.live.restore.targets import entry_of
from holdfast.live.state.named import LiveTensor


def with_own(checkpoint: Checkpoint, keys: Iterable[str], group: Group) -> Checkpoint:
    """The checkpoint with this rank's values of the optimizers `keys` in the place of common ones; on
    another number of ranks, with the values of the first rank that has each parameter."""
    manifest = checkpoint.manifest
    if manifest.layout.world == group.size:
        own = checkpoint.rank_extras(group.rank)
        trees = {key: own[key] for key in keys if key in own}
    else:
        trees = {key: of_first(checkpoint, key) for key in keys}
    found = copy.copy(checkpoint)
    found.__dict__.pop("object_tensors", None)
    found.manifest = msgspec.structs.replace(manifest, extras={**manifest.extras, **trees})
    found.manifest.__dict__["placement"] = manifest.placement
    return found


def of_first(checkpoint: Checkpoint, key: str) -> Any:
    """An optimizer's extras, merged: each parameter has the values of the first rank that has it."""
    groups: list[Any] = []
    states: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    known: set[str] = set()
    for body in _bodies(checkpoint, key):
        for number, group in enumerate(body["groups"]):
            params = [name for name in group["params"] if name not in known]
            if params or not group["params"]:
                groups.append({**group, "number": number, "params": params})
        known |= {name for group in body["groups"] for name in group["params"]}
        states = {**body["state"], **states}
        rest = {
            k: {**body.get(k, {}), **rest.get(k, {})} for k in {*rest, *body} - {"groups", "state"}
        }
    return {"$optimizer": {**rest, "groups": groups, "state": states}}


def lies_otherwise(checkpoint: Checkpoint, params: Iterable[LiveTensor], rank: int) -> bool:
    """True if this rank has other parts of these parameters than the rank of its number had."""
    manifest = checkpoint.manifest
    for t in params:
        entry = entry_of(checkpoint, t.name)
        if entry is None:
            continue
        sharding = manifest.placement.table.shardings[entry.sharding]
        if sharding.held is not None:
            boxes = [box for _, box in sharding.held]
        else:
            box = sharding.box(entry.shape, manifest.layout, rank)
            boxes = [] if box is None else [box]
        if any(part.box.size and part.box not in boxes for part in t.parts):
            return True
    return False


def differing_values(checkpoint: Checkpoint, key: str) -> str:
    """Words that name the hyper-parameters and states in which ranks differed."""
    first: dict[str, dict[str, Any]] = {}
    found: dict[str, None] = {}
    for body in _bodies(checkpoint, key):
        values = {name: g["hyper"] for g in body["groups"] for name in g["params"]}
        for one in (values, body["state"]):
            for name, own in one.items():
                other = first.setdefault(f"{one is values} {name}", own)
                found |= dict.fromkeys(k for k in own if other.get(k) != own[k])
    return f" ({listed(sorted(found))} of the same parameters)" if found else ""


def _bodies(checkpoint: Checkpoint, key: str) -> list[dict[str, Any]]:
    """The extras of an optimizer, as each rank saved them, in rank order."""
    ranks = sorted(checkpoint.manifest.file_of)
    trees = [checkpoint.rank_extras(rank).get(key) for rank in ranks]
    return [tree["$optimizer"] for tree in trees if isinstance(tree, dict) and "$optimizer" in tree]
