"""Parameters of optimizers that go by position, in the checkpoint or here: which is which.

    saved           live            what is done
    encoder.weight  encoder.weight  by name, whatever the order
    group0.0        encoder.weight  by order, and told: at the next save it has the name
    encoder.weight  group0.0        by order, if the shapes prove it
    group0.0        group0.0        by order, if the shapes prove it; told, if it is a step of a release
                                    that did not prove orders

Shapes prove an order where no two parameters of the optimizer have the same one: in another order
something does not fit.  Everywhere else two parameters might have changed places between two starts of
the script, and with them their values and moments.  That is a problem of the load, unless it is not
strict; then it is told.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.base.errors import warn_user
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.live.restore.mismatches import Mismatch
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.state.optimizers import all_param_names, named_groups
from holdfast.live.state.positions import (
    IS_POSITION,
    is_in_saved_order,
    same_shapes,
    shown_alike,
)
from holdfast.live.state.recognising import State, is_optimizer, sources_in


def by_order(
    checkpoint: Checkpoint, state: State, options: RestoreOptions
) -> tuple[Checkpoint, list[Mismatch]]:
    """The checkpoint, with parameters of optimizers that go by position under their names here, and
    differences: orders that nothing proves."""
    renamed: dict[str, dict[str, str]] = {}
    problems: list[Mismatch] = []
    values: dict[str, str] = {}
    for key, saved, live, positions, plain in _unnamed(checkpoint, state):
        if not _is_wanted(checkpoint, key, options):
            continue
        names = _new_names(saved, live)
        old = {new: before for before, new in names.items()}
        known = {name for group in saved for name in group}
        mine = {n: p for group in live for n, p in group if old.get(n, n) in known}
        if names:
            renamed[key] = names
            moved = {f"{key}.{before}.value": new for before, new in names.items() if new in plain}
            values |= {
                old: new for old, new in moved.items() if checkpoint.manifest.find(new) is None
            }
            _tell_named(
                key, [new for before, new in names.items() if IS_POSITION.fullmatch(before)]
            )
        found = same_shapes({n: p for n, p in mine.items() if n in positions})
        if found and not _is_known(
            checkpoint, key, state, {n: mine[n] for n in mine if n in positions}
        ):
            why = f"nothing names these parameters, and {shown_alike(found)}"
            befores = [old.get(n, n) for names in found.values() for n in names]
            if options.strict and not _is_older(checkpoint, key, befores):
                problems.append(Mismatch("order", key, why))
            else:
                warn_user(f"{key}: {why}: they are taken in their order", notice="positions")
    if not renamed:
        return checkpoint, problems
    from holdfast.live.restore.former import NewNames, Renamed

    return Renamed(checkpoint, NewNames({}, renamed, values)), problems


def _is_older(checkpoint: Checkpoint, key: str, names: list[str]) -> bool:
    """True if positions were saved by a release that did not prove orders: it notes nothing of masters."""
    has_note = "masters" in checkpoint.manifest.extras[key]["$optimizer"]
    is_ours = checkpoint.format == "holdfast"
    return is_ours and not has_note and all(map(IS_POSITION.fullmatch, names))


def _is_known(
    checkpoint: Checkpoint, key: str, state: State, params: dict[str, torch.Tensor]
) -> bool:
    """True if something else than shapes proves the order of parameters."""
    from holdfast.live.state.masters_by_hand import are_proved

    saved = checkpoint.manifest.extras[key]["$optimizer"].get("masters", {})
    return is_in_saved_order(state[key]) or are_proved(saved, state, params)


def _tell_named(key: str, names: list[str]) -> None:
    """HoldfastWarning for parameters that have names now, and had none when they were saved."""
    if names:
        warn_user(
            f"{key!r}: parameters were saved by their positions and have names now, {names[0]!r} is the "
            f"first of {len(names)}: they are taken in their order, and saved by name from now on",
            notice="positions",
        )


NamedGroups = list[list[tuple[str, torch.Tensor]]]


def _unnamed(
    checkpoint: Checkpoint, state: State
) -> Iterator[tuple[str, list[list[str]], NamedGroups, set[str], set[str]]]:
    """Yield optimizers that have parameters which no module has: their key, the names saved of each group,
    names and parameters of each group here, which of these names are positions, and which those of plain
    values."""
    keys = [key for key, value in state.items() if is_optimizer(value)]
    sources = sources_in(state) if keys else None
    for key in keys:
        assert sources is not None
        source = sources.of(state[key])
        tree = checkpoint.manifest.extras.get(key)
        body = tree.get("$optimizer") if isinstance(tree, dict) else None
        if not isinstance(body, dict) or not source.saves_rest or source.by_master:
            continue
        groups = source.groups(state[key])
        names = all_param_names(state, groups)
        live = named_groups(groups, {i: found[0] for i, found in names.items()})
        saved = [list(group["params"]) for group in body["groups"]]
        here = {name: id(p) for pairs in live for name, p in pairs}
        went = any(IS_POSITION.fullmatch(n) and n not in here for group in saved for n in group)
        if went or any(i not in names or i in names.beside for i in here.values()):
            plain = {n for n, i in here.items() if i in names.beside and i not in names.stated}
            yield key, saved, live, {name for name, i in here.items() if i not in names}, plain


def _new_names(saved: list[list[str]], live: NamedGroups) -> dict[str, str]:
    """Names here of parameters that were saved under others, by these: of each group with as many as it
    had, where one side has positions and the other names."""
    known = {name for group in saved for name in group}
    here = {name for pairs in live for name, _ in pairs}
    found: dict[str, str] = {}
    for names, pairs in zip(saved, live):
        if len(names) != len(pairs):
            continue
        for old, (new, _) in zip(names, pairs):
            one_has_none = bool(IS_POSITION.fullmatch(old)) != bool(IS_POSITION.fullmatch(new))
            if (
                one_has_none
                and old not in here
                and new not in known
                and not old.startswith("state.")
            ):
                found[old] = new
    return found


def _is_wanted(checkpoint: Checkpoint, key: str, options: RestoreOptions) -> bool:
    """True if tensors of an optimizer are to be loaded."""
    names = (n for n in checkpoint.names() if n.startswith(f"{key}."))
    return options.only is None or any(map(options.wanted, names))
