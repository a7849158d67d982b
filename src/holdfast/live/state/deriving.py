"""What modules derive from their tensors when they are loaded.

Tensors are filled in place, and nobody is asked.  A module may keep something else that follows from them
(a packed copy, a cache, a norm) and make it anew in its `_load_from_state_dict` or in a hook: without that
it would go on with what it derived from other weights.  So such modules are called once their tensors are
there.  Torch's own derive nothing.

Hooks may also change values in a state_dict(), and change them back when it is loaded.  The tensors hold
what was saved, which is not that: writes to them are left out.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.overrides import TorchFunctionMode

from holdfast.base.errors import warn_user
from holdfast.live.state.own_state_dicts import SavedTensors, entries_of


def tell_loaded(name: str, part: nn.Module) -> None:
    """Call a module's own way to load and its hooks, after its tensors were filled: it may derive something
    from them.  It is given what it has already, as in its state_dict().  HoldfastWarning if it fails."""
    try:
        with torch.no_grad(), _Keeping(SavedTensors(part, whole=True)):
            load_alone(part, OrderedDict(entries_of(part)), [])
    except Exception as error:
        warn_user(
            f"{name}: its tensors are loaded, and its own way to load failed then: what this "
            f"{type(part).__name__} derives from them is as it was ({type(error).__name__}: {error})"
        )


_ALSO_WRITE = {f"__i{op}__" for op in ("add", "sub", "mul", "truediv", "pow")} | {"__setitem__"}
_WRITE_NOTHING = {"requires_grad_", "detach_", "share_memory_"}


class _Keeping(TorchFunctionMode):
    """Leaves out what would write to tensors that are filled."""

    def __init__(self, filled: SavedTensors) -> None:
        super().__init__()
        self._filled = filled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__") and name not in _WRITE_NOTHING
        writes = in_place or name in _ALSO_WRITE or func == torch.Tensor.data.__set__
        if writes and args and self._filled.has(args[0]):
            return args[0]
        return func(*args, **(kwargs or {}))


def derives(part: nn.Module) -> bool:
    """True if a module has a way to load, or hooks after a load, that are not torch's."""
    if not (part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks):
        own = part.__dict__.get("_load_from_state_dict") or type(part)._load_from_state_dict
        return not _is_torchs(own)
    hooks = (*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values())
    return not all(map(_is_torchs, (type(part)._load_from_state_dict, *hooks)))


def _is_torchs(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(("torch.", "holdfast."))


def load_alone(part: nn.Module, entries: dict[str, Any], errors: list[str]) -> None:
    """Hand a module, without its submodules, its own entries, and call what is to be called after a load.
    `errors`: gets what the module says against them."""
    part._load_from_state_dict(entries, "", {"version": part._version}, True, [], [], errors)
    for hook in part._load_state_dict_post_hooks.values():
        hook(part, _IncompatibleKeys([], []))
