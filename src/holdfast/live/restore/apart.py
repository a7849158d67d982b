"""Comparing tensors that are made of several others: as they were saved, and as they are here."""

from __future__ import annotations

from typing import Any

from holdfast.base.errors import FormatError
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.extras import MADE_OF
from holdfast.live.restore.mismatches import Mismatch, Problems, differs
from holdfast.live.state.named import Prepared


def made_otherwise(checkpoint: Checkpoint, live: Prepared, problems: Problems) -> None:
    """Find tensors that were saved as several and are not made so here, or the other way round.

    Each difference is reported once: what was found of their parts is dropped, and the names of their parts
    are `owned`.
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
    """Names of a saved tensor and of what it is made of."""
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
        entry = checkpoint.manifest.find(one)
        t = live.tensors.get(one)
        if entry is not None and t is not None:
            saved = checkpoint.manifest.tensors[entry].dtype
            if saved != t.placed.dtype:  # cast=True is of values, which these are not by themselves
                found.append(differs(one, f"saved as {saved}, here {t.placed.dtype}"))
    return found
