"""The small part of a record: what a step changes besides parameters and optimizer states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from holdfast.base.errors import UsageError
from holdfast.live.state.collecting import add_plain
from holdfast.live.state.customised import add_made, customised
from holdfast.live.state.live import Live, State, add_extra_states, encode, is_optimizer, stages
from holdfast.live.state.optimizers import hyper


def collect_step_extras(
    state: State, groups: Mapping[str, Sequence[Sequence[str]]], on_resize: dict[str, str]
) -> Live:
    """Extras as `collect` finds them, but with nothing of an optimizer but its hyper-parameters.

    `groups`: by optimizer's key the names of the parameters of each group.  Tensors of the user's own
    dicts are in `tensors`.  An object with the attribute `in_records = False` is left out.
    """
    live = Live(keys=set(state), inline_bytes=inf)
    for key, value in state.items():
        modules = stages(value)
        if modules is not None:
            for module in modules:
                add_extra_states(live, key, module, on_resize)
                add_made(live, key, customised(key, module), on_resize)
        elif is_optimizer(value):
            saved = [
                {"params": list(names), "hyper": encoded_hyper(key, group)}
                for group, names in zip(value.param_groups, groups[key])
            ]
            live.extras[key] = {"$optimizer": {"groups": saved, "state": {}}}
            live.rules[key] = "merge"
        elif getattr(value, "in_records", True):
            add_plain(live, key, value, on_resize)
    return live


def encoded_hyper(key: str, group: dict[str, Any]) -> Any:
    """A parameter group's hyper-parameters as extras.  UsageError for sharded tensors among them."""
    live = Live(inline_bytes=inf)
    encoded = encode(live, key, hyper(group), inline=True)
    if live.tensors:
        raise UsageError(
            f"{min(live.tensors)}: a sharded tensor in a parameter group cannot be recorded",
            hint="have it whole (full_tensor()), or use memory= and durable saves alone",
        )
    return encoded
