"""Extras that differ between ranks: merged, or kept by each rank.

Optimizers of pipeline stages have different parameters: their groups and states are merged.  If ranks have
different values for the same parameters, merging would only keep one rank's, so each rank keeps its own
(`sort_extras`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.base.errors import LayoutError, RuleError, warn_user
from holdfast.live.saving.messages import ReadyToSave
from holdfast.live.state.named import INLINE_BYTES


def digested_parts(tree: Any, large: list[str]) -> list[Any]:
    """Return the parts of an optimizer's extras that `digests` digests one by one."""
    if "$optimizer" not in tree:
        return [[tree, large]]
    body = tree["$optimizer"]
    groups, states = body["groups"], body["state"]
    names, hypers = [g["params"] for g in groups], [g["hyper"] for g in groups]
    return [names, [hypers, large], sorted(states), states, [body.get("order"), body.get("plain")]]


def differ(versions_: Iterable[str]) -> bool:
    """True if, by their `digests`, optimizers of the same parameters have different values."""
    known: dict[tuple[int, str], str] = {}
    for version in versions_:
        if version.count("/") != 4:
            continue
        of_groups, groups, of_states, states, _ = version.split("/")
        for what in ((0, of_groups, groups), (1, of_states, states)):
            if known.setdefault(what[:2], what[2]) != what[2]:
                return True
    return False


def merge_extras(key: str, versions_: list[Any]) -> Any:
    """Merge the ranks' versions of an extra: groups and states of pipeline stages' optimizers, or dicts.
    LayoutError if they differ in one parameter's group or state."""
    if len(versions_) == 1:
        return versions_[0]
    if "$optimizer" not in versions_[0]:
        return {name: one for version in versions_ for name, one in version.items()}
    groups: list[Any] = []
    states: dict[str, Any] = {}
    rest: dict[str, dict[str, Any]] = {}
    hypers: dict[str, Any] = {}
    for one in versions_:
        body = one["$optimizer"]
        for name in body["state"].keys() & states.keys():
            _check_same(f"{key}.{name}", states[name], body["state"][name])
        states |= body["state"]
        for what in ("order", "plain", "masters"):
            if what in body:
                rest.setdefault(what, {}).update(body[what])
        for number, group in enumerate(body["groups"]):
            for name in group["params"]:
                where = f"{key}: the parameter group of {name}"
                _check_same(where, hypers.setdefault(name, group["hyper"]), group["hyper"])
            same = [g for g in groups if (g["number"], g["hyper"]) == (number, group["hyper"])]
            if same:
                known = set(same[0]["params"])
                same[0]["params"] += [p for p in group["params"] if p not in known]
            else:
                groups.append({"number": number, **group, "params": list(group["params"])})
    return {"$optimizer": {"groups": groups, "state": states, **rest}}


def _check_same(where: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    """LayoutError if two ranks have different values under one name."""
    if one != other:
        names = sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))
        raise LayoutError(
            f"{where} has different values of {', '.join(names)} on several ranks, and it is unknown "
            "which is right",
            hint="let ranks that share a parameter agree on these values before they save",
        )


def check_own(ready: list[ReadyToSave], per_rank: Iterable[str], told: set[str]) -> None:
    """Check extras that each rank keeps for itself.  RuleError if one refers to tensors of the checkpoint,
    which are common to all ranks.  HoldfastWarning, once, for optimizers."""
    large = {key for r in ready for key in r.large}
    for key in per_rank:
        is_optimizers = ready[0].extras.get(key, ("", ""))[1] == "merge"
        if key in large:
            raise RuleError(
                f"{key!r} differs between ranks and holds tensors of more than {INLINE_BYTES} bytes",
                hint="let ranks agree on the values in its parameter groups"
                if is_optimizers
                else f"Checkpointer(on_resize={{{key!r}: 'fresh'}}) keeps each rank's (and none on another "
                "arrangement of ranks); or save such tensors under names per rank",
            )
        if is_optimizers and key not in told:
            told.add(key)
            warn_user(
                f"{key!r} has different values for the same parameters' groups or states on each rank: "
                "each rank's are saved, for a restore on the same layout; another layout needs on_resize"
            )
