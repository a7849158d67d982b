"""Tensors that are made of several others, at a restore: saved and live ones compared, lacking ones made.

The saved description of a tensor (`state.composite_tensors`) is compared, never obeyed.  Where a fresh
optimizer lacks such a state, it makes the one that it would make in its first step; that is taken if its
description equals the saved one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.base.errors import FormatError, StateMismatch
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.extras import MADE_OF
from holdfast.live.restore.mismatches import Mismatch, Problems, differs
from holdfast.live.restore.targets import entry_of
from holdfast.live.state.composite_tensors import SPARSE, flatten
from holdfast.live.state.named import Prepared
from holdfast.live.state.placed import is_apart, torch_dtype


def made_otherwise(checkpoint: Checkpoint, live: Prepared, problems: Problems) -> None:
    """Find tensors that are made of several others on one side only, or of other parts.

    Each difference is reported once: differences of their parts are dropped, and the names of the parts are
    `owned`.
    """
    extras = checkpoint.manifest.extras
    for name, inner in live.apart.items():
        mine = live.extras[name + MADE_OF]
        if name + MADE_OF in extras:
            new = _differences(checkpoint, live, name, _said(checkpoint, name), mine)
        elif checkpoint.manifest.find(name) is not None:
            new = [differs(name, f"saved as one tensor, here a {mine['class']}")]
        else:
            continue
        if new:
            problems.forget(inner)
            problems.found += new
            live.owned |= _below(checkpoint, name)
    for name in [one for one in problems.missing if one + MADE_OF in extras]:
        said = f"saved as a {_said(checkpoint, name)['class']}, here it is one tensor"
        problems.missing.remove(name)
        problems.found.append(differs(name, said))
        live.owned |= _below(checkpoint, name)


def _below(checkpoint: Checkpoint, name: str) -> set[str]:
    """Names of a saved tensor and of its parts."""
    return {one for one in checkpoint.names() if one == name or one.startswith(f"{name}.")}


def _said(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    said = checkpoint.manifest.extras.get(name + MADE_OF)
    if not isinstance(said, dict) or not {"class", "context", "parts"} <= said.keys():
        raise FormatError(
            f"malformed extras: {name + MADE_OF!r} does not say what a tensor is made of"
        )
    return said


def _differences(
    checkpoint: Checkpoint, live: Prepared, name: str, said: dict[str, Any], mine: dict[str, Any]
) -> list[Mismatch]:
    if said["class"] != mine["class"]:
        return [differs(name, f"saved as a {said['class']}, here a {mine['class']}")]
    if said["context"] != mine["context"]:
        why = f"a {said['class']} saved with {said['context']}, here {mine['context']}"
        return [differs(name, why)]
    found = []
    for part, lie in mine["parts"].items():
        then = said["parts"].get(part)
        if then is not None and then != lie:
            why = (
                f"saved {then or 'whole'}, here {lie or 'whole'}; no values for that layout are bit for "
                "bit what was saved"
            )
            found.append(differs(f"{name}.{part}", why))
    for one in live.apart[name]:
        entry, t = entry_of(checkpoint, one), live.tensors.get(one)
        # cast=True is of values, which these are not by themselves
        if entry is not None and t is not None and entry.dtype != t.placed.dtype:
            found.append(differs(one, f"saved as {entry.dtype}, here {t.placed.dtype}"))
    return found


# -- states that an optimizer lacks -------------------------------------------------------------


LAYOUTS = {str(layout): layout for layout in SPARSE}


def make_state(
    name: str,
    said: Any,
    optimizer: Optimizer,
    p: torch.Tensor,
    entry: Callable[[str], Any],
) -> torch.Tensor:
    """Memory for a state of parameter `p` whose saved description is `said`, not filled yet.

    StateMismatch if the optimizer makes no state of that description.
    """
    kind = said.get("class") if isinstance(said, dict) else None
    others = []
    for one in _candidates(optimizer, p, kind, entry(f"{name}.values")):
        here = description_of(one, name)
        if here == said:
            return one
        others.append(here)
    kinds = {one["class"] for one in others if one}
    alike = [one for one in others if one and one["class"] == kind]
    why = f"which {type(optimizer).__name__} does not make of this parameter"
    if alike:
        like = [one for one in alike if one["context"] == said.get("context")]
        why = how_different(said, (like or alike)[0])
    elif None in others and not kinds:
        why = f"here {type(optimizer).__name__} keeps it as a plain tensor"
    raise StateMismatch(
        f"{name}: saved as a {kind} {why}",
        hint="restore on a layout that cuts the parameter as then, or where blocks of elements that share "
        "a scale stay whole; or let the optimizer make its states (a step) before the restore",
    )


def description_of(tensor: torch.Tensor, name: str) -> dict[str, Any] | None:
    """The description of a tensor that is saved beside its parts; None for a tensor in one memory."""
    apart = flatten(tensor, name) if is_apart(tensor) else None
    return None if apart is None else apart.said()


def how_different(said: dict[str, Any], here: dict[str, Any]) -> str:
    """Say how the saved description of a tensor differs from the live one."""
    if said.get("context") != here["context"]:
        return f"with {said.get('context')}, here {here['context']}"
    for name, lie in here["parts"].items():
        then = said["parts"].get(name)
        if then != lie:
            return f"with {name} {then or 'whole'}, here {lie or 'whole'}"
    return "of other parts"


def _candidates(
    optimizer: Optimizer, p: torch.Tensor, kind: Any, values: Any
) -> Iterator[torch.Tensor]:
    """Yield the states that the optimizer may make for a parameter."""
    new = getattr(optimizer, "_new_buffer", None)
    if callable(new) and any(
        c.__module__.startswith("torchao.optim") for c in type(optimizer).__mro__
    ):
        with torch.no_grad():
            yield from (new(p, signed) for signed in (True, False))
    if kind in LAYOUTS and values is not None and p.layout is torch.strided:
        layout, dtype = LAYOUTS[kind], torch_dtype(values.dtype)
        if layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
            empty = torch.zeros(p.shape, dtype=dtype, device=p.device)
            yield (
                empty.to_sparse() if layout is torch.sparse_coo else empty.to_sparse(layout=layout)
            )
    with torch.no_grad():
        yield torch.empty_like(p, requires_grad=False)
