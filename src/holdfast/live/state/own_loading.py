"""Modules' own ways to load, called once their tensors are filled.

*Derived values.*  A module may keep a packed copy, a cache or a norm of its tensors, and make it anew in
its `_load_from_state_dict` or in a hook.  Without that it would go on with the values of other weights, so
such modules are called (`tell_loaded`).  Torch's own modules derive nothing.  Hooks may also change values
in a state_dict() and change them back at a load; the tensors hold the true values already, so writes to
them are left out.

*Made values* of a `state_dict()` (`state.customised`).  Only the module's own loading hooks can put one
back, and only asking again tells whether they have.  Without such hooks, the module must have the value
already:

    no way to load,  value of its own           compared before anything is written
    no way to load,  made from its tensors      compared when these are filled
    its own way to load                         loaded; a value that it leaves out is told by a warning

A mode of torch functions sees whether a module computes the value from its tensors (`_Looking`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from holdfast.base.errors import HoldfastError, StateMismatch, need, warn_user
from holdfast.base.text import listed
from holdfast.live.state.customised import OwnEntries, form, named_entries
from holdfast.live.state.module_wrappers import Names
from holdfast.live.state.own_state_dicts import SavedTensors, asks_whole, entries_of, is_same
from holdfast.live.state.quantised import has_quant_states, put_quant_states

need("torch", nn.Module, "_version")
(_IncompatibleKeys,) = need("torch", "torch.nn.modules.module", "_IncompatibleKeys")
tree_leaves, tree_map_only = need("torch", "torch.utils._pytree", "tree_leaves", "tree_map_only")


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


def load_alone(part: nn.Module, entries: dict[str, Any], errors: list[str]) -> None:
    """Hand a module, without its submodules, its own entries, and call what is to be called after a load.
    `errors`: gets what the module says against them."""
    part._load_from_state_dict(entries, "", {"version": part._version}, True, [], [], errors)
    for hook in part._load_state_dict_post_hooks.values():
        hook(part, _IncompatibleKeys([], []))


# -- values that modules make -------------------------------------------------------------------


def unloadable(key: str, own: OwnEntries, saved: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names of made values that were saved otherwise than the module has them, and why they cannot be put
    back: it has no way to load them and does not make them from tensors that will be filled.  Writes
    nothing."""
    if _loads_itself(own.part) or has_quant_states(own.part):
        return []
    names = {entry: f"{key}.{own.name(entry)}" for entry in saved}
    lost = [e for e, v in saved.items() if form(names[e], v) != form(names[e], own.made[e])]
    if not lost or _reads_tensors(own):
        return []
    return [
        (
            names[entry],
            f"saved with another value than this {type(own.part).__name__} has, which has no way to load "
            f"it (build it with the same settings, or holdfast.ignore({key}, {own.name(entry)!r}))",
        )
        for entry in lost
    ]


class _Looking(TorchFunctionMode):
    """Sees whether anything is computed from tensors that are held; views and attributes are not."""

    def __init__(self, held: SavedTensors) -> None:
        super().__init__()
        self.seen = False
        self._held = held

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(map(self._held.has, tree_leaves((args, kwargs)))):
            outputs = [one for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
            is_view = bool(outputs) and all(map(self._held.has, outputs))
            self.seen |= getattr(func, "__name__", "") != "__get__" and not is_view
        return made


def _reads_tensors(own: OwnEntries) -> bool:
    """True if a module computes something from its tensors when asked for its state_dict()."""
    tensors = own.tensors.values()
    with _Looking(SavedTensors(own.part, whole=asks_whole(own.part), tensors=tensors)) as looking:
        entries_of(own.part)
    return looking.seen


def put_own(key: str, own: OwnEntries, saved: Mapping[str, Any]) -> None:
    """Put made values back by the module's own ways to load, and see that they are there.

    Live tensors have been filled.  HoldfastWarning for values that a module's own way to load leaves out;
    StateMismatch if it fails, if there is none, or if a live tensor is not what was filled any more.
    """
    saved = {entry: _on_its_device(own, entry, value) for entry, value in saved.items()}
    loads_itself = _loads_itself(own.part)
    error = _load(own, saved) if loads_itself else None
    lost = _differing(key, own, saved)
    if lost and put_quant_states(own.part, _with(own.part, saved)):
        lost = _differing(key, own, saved)
    if not lost:
        return
    kind = type(own.part).__name__
    few = listed(f"{key}.{own.name(e)}" for e in lost)
    way = f"holdfast.ignore({key}, {own.name(lost[0])!r})"
    if loads_itself and error is None and own.tensors.keys().isdisjoint(lost):
        warn_user(
            f"{few}: saved with a value that this {kind} has not, and its own way to load does not take "
            f"it; it was left as it is ({way} does without it)"
        )
        return
    raise StateMismatch(
        f"{few}: saved with a value that this {kind} has not, and its ways to load do not take it"
        f"{'' if error is None else f' ({error})'}",
        tuple(f"{key}.{own.name(e)}" for e in lost),
        hint="build it from the same weights with the same settings, give it a _load_from_state_dict() "
        f"that takes the value, or do without: {way}",
    )


def _on_its_device(own: OwnEntries, entry: str, value: Any) -> Any:
    """Return a saved value with its tensors on the device of what the module has there, or else of the
    module: torchmetrics' metrics keep what they are given, and an empty list tells no device."""
    near = tree_leaves([own.made.get(entry), own.made, own.tensors])
    devices = [one.device for one in near if isinstance(one, torch.Tensor)]
    device = devices[0] if devices else getattr(own.part, "device", None)
    if not isinstance(device, torch.device) or device.type == "cpu":
        return value
    return tree_map_only(torch.Tensor, lambda t: t.to(device), value)


def _with(part: nn.Module, saved: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Entries of a module's state_dict(), with the saved values in place of those that are there.  The
    tensors are variables."""
    entries, names = entries_of(part), Names(part)
    as_said = {names.plain(entry): entry for entry in entries}
    found = OrderedDict({**entries, **{as_said.get(e, e): v for e, v in saved.items()}})
    if hasattr(entries, "_metadata"):  # the versions of the modules
        found._metadata = entries._metadata  # type: ignore[attr-defined]
    return found


def _loads_itself(part: nn.Module) -> bool:
    """True if a module has a way of its own to load."""
    kind = type(part)
    ways = (kind.load_state_dict, kind._load_from_state_dict)
    own = ways != (nn.Module.load_state_dict, nn.Module._load_from_state_dict)
    here = "_load_from_state_dict" in part.__dict__ or "load_state_dict" in part.__dict__
    return own or here or bool(part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks)


def _load(own: OwnEntries, saved: Mapping[str, Any]) -> str | None:
    """Hand a module its own entries, of which the tensors are its own, filled already, and the made values
    those that were saved.  Returns what it says against them, which may be about what is there
    already."""
    part = own.part
    entries = _with(part, saved)
    errors: list[str] = []
    try:
        with torch.no_grad():
            if asks_whole(part):
                part.load_state_dict(entries, strict=False)
            else:
                load_alone(part, entries, errors)
    except HoldfastError:
        raise
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
    return errors[0] if errors else None


def _differing(key: str, own: OwnEntries, saved: Mapping[str, Any]) -> list[str]:
    """Saved entries that the module lacks or has with another value, and live tensors that differ and
    are not any more in the memory that was filled."""
    entries = named_entries(own.part)

    def differs(entry: str, value: Any) -> bool:
        name = f"{key}.{own.name(entry)}"
        return entry not in entries or form(name, value) != form(name, entries[entry])

    lost = [e for e, v in saved.items() if differs(e, v)]
    moved = (e for e, t in own.tensors.items() if not is_same(t, entries.get(e)))
    return lost + [e for e in moved if differs(e, own.tensors[e])]
