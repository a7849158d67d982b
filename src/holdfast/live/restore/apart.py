"""Comparing tensors that are made of several others: as they were saved, and as they are here."""

from __future__ import annotations

from typing import Any

from holdfast.base.errors import FormatError
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.extras import MADE_OF
from holdfast.live.state.live import Live


def made_otherwise(
    checkpoint: Checkpoint, live: Live, missing: list[str], told: list[str]
) -> list[str]:
    """Problems with tensors that were saved as several and are not made so here, or the other way round.

    What is said by such a line is not said otherwise: names leave `missing`, or are `owned`, and what was
    `told` of their shapes is dropped.
    """
    lines: list[str] = []
    extras = checkpoint.manifest.extras
    for name, inner in live.apart.items():
        mine = live.extras[name + MADE_OF]
        if name + MADE_OF in extras:
            new = _differences(checkpoint, live, name, _said(checkpoint, name), mine)
        elif checkpoint.manifest.find(name) is not None:
            new = [f"{name}: saved as one tensor, here a {mine['class']}"]
        else:
            continue
        if new:
            lines += new
            told[:] = [line for line in told if line.partition(": ")[0] not in inner]
            missing[:] = [one for one in missing if one not in inner]
            live.owned |= _below(checkpoint, name)
    for name in [one for one in missing if one + MADE_OF in extras]:
        lines.append(
            f"{name}: saved as a {_said(checkpoint, name)['class']}, here it is one tensor"
        )
        missing.remove(name)
        live.owned |= _below(checkpoint, name)
    return lines


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
    checkpoint: Checkpoint, live: Live, name: str, said: dict[str, Any], mine: dict[str, Any]
) -> list[str]:
    if said["class"] != mine["class"]:
        return [f"{name}: saved as a {said['class']}, here a {mine['class']}"]
    if said["context"] != mine["context"]:
        return [f"{name}: a {said['class']} saved with {said['context']}, here {mine['context']}"]
    lines = []
    for part, lie in mine["parts"].items():
        then = said["parts"].get(part)
        if then is not None and then != lie:
            lines.append(
                f"{name}.{part}: saved {then or 'whole'}, here {lie or 'whole'}; no values for that "
                "layout are bit for bit what was saved"
            )
    for one in live.apart[name]:
        entry = checkpoint.manifest.find(one)
        t = live.tensors.get(one)
        if entry is not None and t is not None:
            saved = checkpoint.manifest.tensors[entry].dtype
            if saved != t.placed.dtype:  # cast=True is of values, which these are not by themselves
                lines.append(f"{one}: saved as {saved}, here {t.placed.dtype}")
    return lines
