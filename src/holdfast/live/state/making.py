"""States made of several tensors that an optimizer lacks: a fresh one gets them before they are filled.

What a checkpoint says of a state is compared, never obeyed: the live optimizer makes what it would make
itself in its first step, and that is taken if it says the same of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.base.errors import StateMismatch
from holdfast.live.state.apart import flatten_subclass
from holdfast.live.state.placed import is_apart, torch_dtype
from holdfast.live.state.sparse import COMPRESSED, said_of

LAYOUTS = {str(layout): layout for layout in (torch.sparse_coo, *COMPRESSED)}


def make_state(
    name: str,
    said: Any,
    optimizer: Optimizer,
    p: torch.Tensor,
    entry: Callable[[str], Any],
) -> torch.Tensor:
    """A state of parameter `p` of which a checkpoint says `said`, not filled yet.

    StateMismatch if the optimizer makes none that is such.
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
    """Return what is saved of a tensor beside its values; None for one in one memory."""
    if not is_apart(tensor):
        return None
    if tensor.layout in (torch.sparse_coo, *COMPRESSED):
        return said_of(tensor)
    apart = flatten_subclass(tensor, name)
    return None if apart is None else apart.said()


def how_different(said: dict[str, Any], here: dict[str, Any]) -> str:
    """Say how what was said of a tensor differs from what is said here."""
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
    """Return what the optimizer may make of a parameter."""
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
