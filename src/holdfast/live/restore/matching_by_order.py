"""Parameters of optimizers without names, in the checkpoint or live: matched by their order.

    saved           live            match
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

from collections.abc import Iterable, Iterator

import torch

from holdfast.base.errors import warn_user
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.live.restore.mismatches import Mismatch
from holdfast.live.restore.param_groups import optimizer_body
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.state.nameless_parameters import (
    IS_POSITION,
    are_proved,
    is_in_saved_order,
    same_shapes,
    shown_alike,
)
from holdfast.live.state.optimizers import LiveOptimizer, NamedGroups
from holdfast.live.state.recognising import State


def by_order(
    checkpoint: Checkpoint,
    optimizers: Iterable[LiveOptimizer],
    state: State,
    options: RestoreOptions,
) -> tuple[Checkpoint, list[Mismatch]]:
    """The checkpoint, with parameters that it names by position under their live names; and mismatches, for
    orders that nothing proves."""
    renamed: dict[str, dict[str, str]] = {}
    problems: list[Mismatch] = []
    values: dict[str, str] = {}
    for key, saved, live, positions, plain in _unnamed(checkpoint, optimizers):
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
    from holdfast.live.restore.former_names import NewNames, Renamed

    return Renamed(checkpoint, NewNames({}, renamed, values)), problems


def _is_older(checkpoint: Checkpoint, key: str, names: list[str]) -> bool:
    """True if a release that did not prove orders saved the positions: it has no note of masters."""
    has_note = "masters" in optimizer_body(checkpoint, key)
    is_ours = checkpoint.format == "holdfast"
    return is_ours and not has_note and all(map(IS_POSITION.fullmatch, names))


def _is_known(
    checkpoint: Checkpoint, key: str, state: State, params: dict[str, torch.Tensor]
) -> bool:
    """True if the order of parameters is proved otherwise than by shapes."""
    saved = optimizer_body(checkpoint, key).get("masters", {})
    return is_in_saved_order(state[key]) or are_proved(saved, state, params)


def _tell_named(key: str, names: list[str]) -> None:
    """HoldfastWarning for parameters that have names now, and were saved by position."""
    if names:
        warn_user(
            f"{key!r}: parameters were saved by their positions and have names now, {names[0]!r} is the "
            f"first of {len(names)}: they are taken in their order, and saved by name from now on",
            notice="positions",
        )


def _unnamed(
    checkpoint: Checkpoint, optimizers: Iterable[LiveOptimizer]
) -> Iterator[tuple[str, list[list[str]], NamedGroups, set[str], set[str]]]:
    """Yield optimizers with parameters that no module has: key, saved names of each group, live names and
    parameters of each group, the live names that are positions, and those of plain values."""
    for optimizer in optimizers:
        key, names, live = optimizer.key, optimizer.names, optimizer.pairs
        body = optimizer_body(checkpoint, key)
        if not body or not optimizer.source.saves_rest or optimizer.source.by_master:
            continue
        saved = [list(group["params"]) for group in body["groups"]]
        here = {name: id(p) for pairs in live for name, p in pairs}
        went = any(IS_POSITION.fullmatch(n) and n not in here for group in saved for n in group)
        if went or any(i not in names or i in names.beside for i in here.values()):
            plain = {n for n, i in here.items() if i in names.beside and i not in names.stated}
            yield key, saved, live, {name for name, i in here.items() if i not in names}, plain


def _new_names(saved: list[list[str]], live: NamedGroups) -> dict[str, str]:
    """Live names by saved names, in groups of equal size, where one side has a position and the other a
    name."""
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
    """True if any tensor of an optimizer is to be loaded."""
    names = (n for n in checkpoint.names() if n.startswith(f"{key}."))
    return options.only is None or any(map(options.wanted, names))
