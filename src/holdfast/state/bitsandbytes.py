"""bitsandbytes' 4-bit weights, which the library saves by hooks and cannot load by hooks.

A `Linear4bit` says in its state_dict() what its `QuantState` consists of: scales (`weight.absmax`), the
scales of these (`weight.nested_absmax`), and the rest packed into one tensor
(`weight.quant_state.bitsandbytes__nf4`).  To put it back, the library wants a `QuantState` made anew, as
transformers does it.

The only module that knows attributes of bitsandbytes (0.50); it imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def put_quant_states(part: nn.Module, entries: Mapping[str, Any]) -> bool:
    """Give the 4-bit weights of a module the quantisation that its state_dict() had; whether it has any.

    Tensors of `entries` that are on the weight's device are used as they are.
    """
    done = False
    for name, p in part._parameters.items():
        state = getattr(p, "quant_state", None)
        make = getattr(type(state), "from_dict", None)
        if not type(p).__module__.startswith("bitsandbytes.") or make is None:
            continue
        packed = {e[len(name) + 1 :]: v for e, v in entries.items() if e.startswith(f"{name}.")}
        made = make(packed, device=p.device)
        p.quant_state = made
        if getattr(part, "quant_state", None) is state:
            part.quant_state = made
        done = True
    return done
