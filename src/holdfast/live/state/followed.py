"""Optimizers that are followed: records, and snapshots fed by gradients, see the steps of each alone."""

from __future__ import annotations

from holdfast.base.errors import UsageError
from holdfast.live.state.recognising import State
from holdfast.live.state.several import combined_parts, normalised, one_by_one


def check_apart(state: State, what: str) -> None:
    """UsageError if the state has a container of optimizers: `what` has to follow each alone."""
    seen = normalised(state)
    for key, value in state.items():
        if seen[key] is value:
            continue
        parts = combined_parts(seen[key])
        if len(parts) == 1:
            raise UsageError(
                f"{what} cannot see the steps of {key!r}, a {type(value).__name__}: an optimizer inside it "
                "makes them",
                hint=f"hand that over in its place: {one_by_one(key, parts)}",
            )
        raise UsageError(
            f"{what} follows each optimizer by itself, and {key!r} is {len(parts)} of them in a "
            f"{type(value).__name__}",
            hint=f"hand the optimizers over one by one: {one_by_one(key, parts)}",
        )
