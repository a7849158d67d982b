"""All of a live state, named and placed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.state.live import (
    Live,
    LiveTensor,
    State,
    add_module,
    check_keys,
    encode,
    engines_in,
    has_scheduler,
    in_order,
    is_loader,
    is_optimizer,
    is_stateful,
    stages,
)
from holdfast.state.optimizers import (
    add_common,
    add_optimizer,
    all_param_names,
    own_params,
)
from holdfast.state.wrapped import check_wrapped, tell_own_state


def collect(
    state: State,
    on_resize: dict[str, str] | None = None,
    before: Mapping[str, LiveTensor] | None = None,
) -> Live:
    """Name and place everything.  Shares memory with the live tensors; encodes the extras.

    `on_resize` declares, by key, what becomes of extras when the number of ranks changes.  `before`: the
    tensors that were found the last time; those that lie where they did are not placed again.  The first
    time, HoldfastWarning tells what of an optimizer is not saved.
    """
    check_keys(state)
    state = in_order(state)
    live = Live(keys=set(state), before=before or {})
    engines = engines_in(state)
    for key, value in state.items():
        modules = stages(value)
        if modules is not None:
            for module in modules:
                add_module(live, key, module, engines.get(id(module)))
        elif is_optimizer(value):
            zero = engines.get(id(value))
            if zero is not None:
                scheduler = has_scheduler(zero, state)
                tree = encode(live, f"{key}.engine", zero.extras(scheduler), inline=True)
                live.extras[f"{key}.engine"] = tree
            check_wrapped(key, value, state)
            names = all_param_names(state, value, zero)
            for name, p in () if zero is not None else own_params(state, key, value, names):
                live.add(name, "param", p, steady=True)
            add_optimizer(live, key, value, zero, names)
            if zero is None:
                add_common(live, key, value, on_resize)
                if not before:
                    tell_own_state(key, value)
        else:
            add_plain(live, key, value, on_resize)
    live.before = {}
    return live


def add_plain(live: Live, key: str, value: Any, on_resize: dict[str, str] | None) -> None:
    """What is no module and no optimizer."""
    if is_stateful(value):
        rule = (on_resize or {}).get(key) or getattr(value, "on_resize", None)
        if rule or is_loader(value):
            live.rules[key] = rule or "ask"
        live.extras[key] = encode(live, key, value.state_dict(), inline=True)
    elif isinstance(value, torch.Tensor):
        live.add(key, "tensor", value, steady=False)
    else:
        live.extras[key] = encode(live, key, value, inline=False)
