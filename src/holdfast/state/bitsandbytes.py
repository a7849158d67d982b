"""bitsandbytes' 4-bit weights, which the library saves by hooks and cannot load by hooks.

A `Linear4bit` says in its state_dict() what its `QuantState` consists of: scales (`weight.absmax`), the
scales of these (`weight.nested_absmax`), and the rest packed into one tensor
(`weight.quant_state.bitsandbytes__nf4`).  To put it back, the library wants a `QuantState` made anew, as
transformers does it.  Its 8-bit optimizers have tables in the states.

The only module that knows attributes of bitsandbytes (0.50); it imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

TABLES = ("qmap1", "qmap2")
"""States of 8-bit optimizers that all parameters share: what each byte means, never written."""


def is_table(optimizer: Any, state: str) -> bool:
    """True if a state of an optimizer is one of bitsandbytes' `TABLES`."""
    ours = any(kind.__module__.startswith("bitsandbytes.") for kind in type(optimizer).__mro__)
    return ours and state in TABLES


def has_quant_states(part: nn.Module) -> bool:
    """True if a module has 4-bit weights, whose quantisation `put_quant_states` puts back."""
    return any(map(_is_packed, part._parameters.values()))


def _is_packed(p: Any) -> bool:
    made_from = getattr(type(getattr(p, "quant_state", None)), "from_dict", None)
    return type(p).__module__.startswith("bitsandbytes.") and made_from is not None


def put_quant_states(part: nn.Module, entries: Mapping[str, Any]) -> bool:
    """Give the 4-bit weights of a module the quantisation that its state_dict() had.  True if it has
    any.

    Tensors of `entries` that are on the weight's device are used as they are.
    """
    done = False
    for name, p in part._parameters.items():
        if p is None or not _is_packed(p):
            continue
        state: Any = p.quant_state
        packed = {e[len(name) + 1 :]: v for e, v in entries.items() if e.startswith(f"{name}.")}
        made = type(state).from_dict(packed, device=p.device)
        p.quant_state = made
        if getattr(part, "quant_state", None) is state:
            part.quant_state = made
        done = True
    return done
