"""Asking modules for their `state_dict()`: which modules, how, and which entries are saved anyway.

Most modules have nn.Module's own way to save and no hooks: their entries are known without asking.  A
module with a `_save_to_state_dict` of its own is asked for its own entries alone; a module with hooks or
another `state_dict` for the whole, for these may change entries of submodules.

Modules are asked anew each time: a hook may add entries from one call to the next, and only the call itself
tells.

Parameters and persistent buffers are saved in any case.  But a hook may give one another name, or split it
into views.  So an entry is looked for three ways: by identity, which nearly all entries are found by; then
by name; then by where in which storage it lies.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from holdfast.base.errors import need
from holdfast.live.state.module_wrappers import first_names, parts
from holdfast.live.state.modules import has_extra_state, submodules

need("torch", nn.Module, "_save_to_state_dict", "_state_dict_hooks", "_state_dict_pre_hooks")

# -- asking ------------------------------------------------------------------------------------------


HARMLESS = ("torch.distributed.", "torch.nn.utils.", "holdfast.")
"""Modules of Python whose state-dict hooks add no content, and may communicate."""


def asked(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The submodules whose state_dict() may have own entries, with the prefixes of their names."""
    few = {part for part in submodules(root) if not _is_plain_one(part) and _has_own_way(part)}
    return first_names(root, few)


def _is_plain_one(part: nn.Module) -> bool:
    """True if a module saves as nn.Module does: without hooks or methods of its own for it."""
    if part._state_dict_hooks or part._state_dict_pre_hooks:
        return False
    own, kind = part.__dict__, cast("Any", type(part))
    return _is_plain(kind) and "state_dict" not in own and "_save_to_state_dict" not in own


@cache
def _is_plain(kind: type[nn.Module]) -> bool:
    """True if modules of a class have nn.Module's own way to save."""
    ways = (kind.state_dict, kind._save_to_state_dict)
    return ways == (nn.Module.state_dict, nn.Module._save_to_state_dict)


def _has_own_way(part: nn.Module) -> bool:
    """True if a module has a way of its own to save: itself alone, or all in it."""
    own = type(part)._save_to_state_dict is not nn.Module._save_to_state_dict
    return own or "_save_to_state_dict" in part.__dict__ or asks_whole(part)


def asks_whole(part: nn.Module) -> bool:
    """True if its whole state_dict() is needed: hooks and an overridden one see submodules' entries."""
    if type(part).state_dict is not nn.Module.state_dict or "state_dict" in part.__dict__:
        return True
    hooks = (*part._state_dict_hooks.values(), *part._state_dict_pre_hooks.values())
    return any(not _origin(hook).startswith(HARMLESS) for hook in hooks)


def _origin(hook: Any) -> str:
    return getattr(hook, "__module__", None) or ""


def entries_of(part: nn.Module) -> Mapping[str, Any]:
    """Entries of a module's state_dict(), as variables; submodules' too if it may change these."""
    if asks_whole(part):
        try:
            inspect.signature(part.state_dict).bind(keep_vars=True)
        except TypeError:
            return part.state_dict()
        return part.state_dict(keep_vars=True)
    found: OrderedDict[str, Any] = OrderedDict()
    found._metadata = OrderedDict()  # type: ignore[attr-defined]
    part._save_to_state_dict(found, "", True)
    return found


# -- what is saved anyway ----------------------------------------------------------------------------


StorageSpan = tuple[tuple[Any, int], int, int]
"""A storage (device and address), and the half-open range of its bytes that a tensor reaches over."""


def memory_place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """The memory of a tensor as a value to compare; None if it has no memory of its own."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(local, UninitializedTensorMixin):
        return None
    try:
        at = local.untyped_storage().data_ptr() + local.storage_offset() * local.element_size()
    except (RuntimeError, NotImplementedError):  # a subclass around several tensors
        return None
    if not local.untyped_storage().nbytes():
        return None
    return local.device, at, local.dtype, tuple(local.shape), local.stride()


def is_same(tensor: torch.Tensor, other: Any) -> bool:
    """True if two values are one tensor, or lie in the same memory."""
    if tensor is other or not isinstance(other, torch.Tensor):
        return tensor is other
    return memory_place(tensor) == memory_place(other) is not None


def _span(tensor: torch.Tensor) -> StorageSpan | None:
    """The bytes of a storage that a tensor reaches over; None if it has no memory of its own."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if memory_place(local) is None or not local.numel():
        return None
    size = local.element_size()
    start = local.storage_offset() * size
    reach = sum((n - 1) * step for n, step in zip(local.shape, local.stride()))
    return (local.device, local.untyped_storage().data_ptr()), start, start + (reach + 1) * size


class SavedTensors:
    """The tensors of a module that are saved anyway; with `whole`, those of its submodules, too.

    `names` and `tensors` are known to be saved besides.
    """

    def __init__(
        self,
        part: nn.Module,
        *,
        whole: bool,
        names: Iterable[str] = (),
        tensors: Iterable[torch.Tensor] = (),
    ) -> None:
        self._part, self._whole = part, whole
        self._more_names, self._more = frozenset(names), tuple(tensors)
        found = (t for one in (submodules(part) if whole else (part,)) for _, t in _persistent(one))
        self._ids = {id(t) for t in (*found, *self._more)}

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers by their names in the checkpoint, which begin at the module."""
        for prefix, one in self._parts():
            yield from ((prefix + name, tensor) for name, tensor in _persistent(one))

    def _parts(self) -> Iterable[tuple[str, nn.Module]]:
        return parts(self._part) if self._whole else [("", self._part)]

    @cached_property
    def names(self) -> set[str]:
        """Names of what is saved anyway."""
        states = {f"{at}_extra_state" for at, one in self._parts() if has_extra_state(type(one))}
        return {name for name, _ in self.named()} | states | self._more_names

    @cached_property
    def _spans(self) -> dict[tuple[Any, int], list[tuple[int, int]]]:
        found: dict[tuple[Any, int], list[tuple[int, int]]] = {}
        for tensor in (*(t for _, t in self.named()), *self._more):
            if (span := _span(tensor)) is not None:
                found.setdefault(span[0], []).append(span[1:])
        return found

    def is_one(self, value: Any) -> bool:
        """True if a value is one of the tensors itself."""
        return id(value) in self._ids

    def has(self, value: Any) -> bool:
        """True if a value is one of the tensors or a view of one."""
        if self.is_one(value):
            return True
        span = _span(value) if isinstance(value, torch.Tensor) else None
        if span is None:
            return False
        storage, start, stop = span
        return any(a <= start and stop <= b for a, b in self._spans.get(storage, ()))


def _persistent(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own parameters and persistent buffers."""
    for name, tensor in part._parameters.items():
        if tensor is not None:
            yield name, tensor
    for name, buffer in part._buffers.items():
        if buffer is not None and name not in part._non_persistent_buffers_set:
            yield name, buffer
