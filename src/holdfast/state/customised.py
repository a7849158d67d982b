"""What the `state_dict()` of a module has beyond parameters, buffers and `get_extra_state`.

A module may say more of itself: it overrides `_save_to_state_dict` or `state_dict`, or it has state-dict
hooks.  bitsandbytes keeps the scales of quantised weights that way, torch's dynamic quantisation the
weights themselves.  Only such modules are asked, each for its own entries.  Names do not matter, for hooks
rename things: what lies in the memory of a parameter or buffer is saved already.

Of the rest there are two kinds.  *Live* tensors are attributes of the module: two calls give the same
memory.  They are saved and restored in place, as buffers are.  *Made* values (a packed weight that is
unpacked, a number as a tensor, a dtype) are new at each call.  They go into one extra of the module,
`<module>._own_extra_state`, by name; a restore puts them back through the module's own loading hooks, and
then asks again whether they have arrived:

    saved:     {"0.weight": param, "0.SCB": live, "0.weight_format": made}
    restored:  0.weight and 0.SCB in place   ->  load hooks, given all three  ->  0.weight_format compared

Nothing here communicates: FSDP's hooks, which may gather, are not called, and each module is asked with its
variables (`keep_vars`), which copies nothing.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from holdfast.errors import HoldfastError, StateMismatch, UsageError
from holdfast.state.bitsandbytes import put_quant_states
from holdfast.state.ignoring import Ignored
from holdfast.state.live import Live, encode, has_extra_state, parts_of, unwrap
from holdfast.state.wrappers import parts

OWN = "_own_extra_state"
"""The last part of the name of the extra that holds the made values of a module."""

HARMLESS = ("torch.distributed.", "torch.nn.utils.", "holdfast.")
"""Modules of Python whose state-dict hooks add no content, and may communicate."""

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}

_live_names: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
"""Entries of modules that were seen to be live tensors: from then on modules are asked only once."""


@dataclass(slots=True)
class Own:
    """What one submodule has beyond parameters, buffers and `_extra_state`.

    `path` is its name in the module that was handed over; entries are by their names within it.
    """

    path: str
    part: nn.Module
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)

    def name(self, entry: str) -> str:
        """Name of an entry in the module that was handed over."""
        return f"{self.path}.{entry}" if self.path else entry


def clean(entry: str) -> str:
    """An entry that a module named itself, without the components that wrappers inside it add."""
    return ".".join(part for part in entry.split(".") if part not in _WRAPPERS)


# -- asking -----------------------------------------------------------------------------------------


def customised(key: str, module: nn.Module, *, first: bool = False) -> list[Own]:
    """Each submodule that has something of its own, the inner ones first.  `key`: of the state.

    `first`: patterns of `ignore` that match nothing are an error.  UsageError for a module that cannot say
    what it has.
    """
    root = unwrap(module)
    ignored = ignored_of(module)
    found: list[Own] = []
    seen: list[str] = []
    for path, part in reversed(list(_asked(root))):
        own = _own(key, path, part, found, ignored, seen)
        if own is not None and (own.tensors or own.made):
            found.append(own)
    if ignored is not None and first:
        ignored.check(key, seen)
    return found


def ignored_of(module: nn.Module) -> Ignored | None:
    """What was declared of a module and those in it that need not be saved; None if nothing ever was."""
    if not Ignored.any():
        return None
    root = unwrap(module)
    inside = [(prefix.rstrip("."), part) for prefix, part in parts(root) if part is not module]
    return Ignored([("", module), *inside])


def _asked(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Submodules whose state_dict() may have something of its own."""
    if all(map(_is_plain_one, parts_of(root))):
        return
    seen: set[int] = set()
    for prefix, part in parts(root):
        if id(part) not in seen and (_asks_whole(part) or _adds_itself(part)):
            seen.add(id(part))
            yield prefix.rstrip("."), part


def _is_plain_one(part: nn.Module) -> bool:
    """Whether a module says nothing beyond what nn.Module has it say."""
    if part._state_dict_hooks or part._state_dict_pre_hooks:
        return False
    own, kind = part.__dict__, cast("Any", type(part))
    return _is_plain(kind) and "state_dict" not in own and "_save_to_state_dict" not in own


@cache
def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether modules of a class have nn.Module's own way to save."""
    ways = (kind.state_dict, kind._save_to_state_dict)
    return ways == (nn.Module.state_dict, nn.Module._save_to_state_dict)


def _adds_itself(part: nn.Module) -> bool:
    """Whether it has a `_save_to_state_dict` of its own, which says what this module alone has."""
    own = type(part)._save_to_state_dict is not nn.Module._save_to_state_dict
    return own or "_save_to_state_dict" in part.__dict__


def _asks_whole(part: nn.Module) -> bool:
    """Whether its whole state_dict() is needed: hooks and an overridden one see those of submodules."""
    if type(part).state_dict is not nn.Module.state_dict or "state_dict" in part.__dict__:
        return True
    hooks = (*part._state_dict_hooks.values(), *part._state_dict_pre_hooks.values())
    return any(not _origin(hook).startswith(HARMLESS) for hook in hooks)


def _origin(hook: Any) -> str:
    return getattr(hook, "__module__", None) or ""


def _entries(part: nn.Module) -> Mapping[str, Any]:
    """What a module says it has, with its variables; its submodules' too where these may be changed."""
    if _asks_whole(part):
        try:
            inspect.signature(part.state_dict).bind(keep_vars=True)
        except TypeError:
            return part.state_dict()
        return part.state_dict(keep_vars=True)
    found: OrderedDict[str, Any] = OrderedDict()
    found._metadata = OrderedDict()  # type: ignore[attr-defined]
    part._save_to_state_dict(found, "", True)
    return found


def _own(
    key: str,
    path: str,
    part: nn.Module,
    inner: list[Own],
    ignored: Ignored | None,
    seen: list[str],
) -> Own | None:
    """What a module has beyond what is saved anyway; None if it is not asked.  `seen` gets the names."""
    own = Own(path, part)
    try:
        entries = _entries(part)
    except HoldfastError:
        raise
    except Exception as error:
        seen.append(own.name("*"))
        if ignored is not None and ignored.has(seen[-1]):
            return None
        raise UsageError(
            f"{key}.{path}: what this {type(part).__name__} keeps besides its parameters and buffers "
            f"cannot be known, for its state_dict() fails: {type(error).__name__}: {error}",
            hint=f"holdfast.ignore({key}, {own.name('*')!r}) saves its parameters and buffers alone",
        ) from error
    rest = _not_held(own, entries, inner)
    names = {entry: own.name(entry) for entry in rest}
    seen += names.values()
    if ignored is not None:
        rest = {e: v for e, v in rest.items() if not ignored.has(names[e])}
    tensors = {e: v for e, v in rest.items() if isinstance(v, torch.Tensor) and not v.is_quantized}
    live = _live(part, tensors)
    for entry, value in rest.items():
        if entry in live:
            own.tensors[entry] = value
        else:
            own.made[entry] = value
    return own


def _live(part: nn.Module, tensors: dict[str, torch.Tensor]) -> set[str]:
    """Which of these entries are tensors that the module holds: in the same memory when asked again."""
    known = _live_names.get(part, frozenset())
    if not tensors.keys() <= known:
        again = _entries(part)
        same = {e for e, t in tensors.items() if _is_same(t, again.get(e))}
        known = _live_names[part] = frozenset(same)
    return set(known & tensors.keys())


def _is_same(tensor: torch.Tensor, other: Any) -> bool:
    if tensor is other:
        return True
    return isinstance(other, torch.Tensor) and _memory(tensor) == _memory(other) is not None


def _memory(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Where a tensor lies, to be compared; None if it has no memory of its own."""
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


class _Held:
    """Tensors that are saved in any case, to be asked for by name, identity and memory."""

    def __init__(self, own: Own) -> None:
        self.names: set[str] = set()
        self._ids: set[int] = set()
        self._spans: dict[tuple[Any, int], list[tuple[int, int]]] = {}
        self._own = own
        whole = _asks_whole(own.part)
        for path, part in (
            own.part.named_modules(remove_duplicate=False) if whole else [("", own.part)]
        ):
            start = f"{path}." if path else ""
            for name, tensor in part._parameters.items():
                self._add(start + name, tensor)
            for name, tensor in part._buffers.items():
                if name not in part._non_persistent_buffers_set:
                    self._add(start + name, tensor)
            if has_extra_state(type(part)):
                self.names.add(clean(start + "_extra_state"))

    def _add(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            self.names.add(clean(name))
            self.add_memory(tensor)

    def add_memory(self, tensor: torch.Tensor) -> None:
        self._ids.add(id(tensor))
        if (span := _span(tensor)) is not None:
            storage, start, stop = span
            self._spans.setdefault(storage, []).append((start, stop))

    def has(self, name: str, value: Any) -> bool:
        """Whether an entry is a parameter or buffer, or a view of one; under whatever name."""
        if clean(name) in self.names or id(value) in self._ids:
            return True
        span = _span(value) if isinstance(value, torch.Tensor) else None
        if span is None:
            return False
        storage, start, stop = span
        return any(a <= start and stop <= b for a, b in self._spans.get(storage, ()))


def _span(tensor: torch.Tensor) -> tuple[tuple[Any, int], int, int] | None:
    """The storage in which a tensor lies, and the bytes that it reaches over there."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if _memory(local) is None or not local.numel():
        return None
    size = local.element_size()
    start = local.storage_offset() * size
    reach = sum((n - 1) * step for n, step in zip(local.shape, local.stride()))
    return (local.device, local.untyped_storage().data_ptr()), start, start + (reach + 1) * size


def _not_held(own: Own, entries: Mapping[str, Any], inner: list[Own]) -> dict[str, Any]:
    """Entries that nothing else in the module holds.  `inner`: what its submodules have of their own."""
    held = _Held(own)
    start = f"{own.path}." if own.path else ""
    for one in inner:
        if one.path.startswith(start):
            held.names |= {one.name(e)[len(start) :] for e in (*one.tensors, *one.made)}
            for tensor in one.tensors.values():
                held.add_memory(tensor)
    rest = {}
    for entry, value in entries.items():
        if not held.has(entry, value):
            rest[clean(entry)] = value
    return rest


# -- saving -----------------------------------------------------------------------------------------


def own_tensors(found: Iterable[Own]) -> Iterator[tuple[str, torch.Tensor]]:
    """Live tensors by their names in the module that was handed over."""
    for own in found:
        yield from ((own.name(entry), tensor) for entry, tensor in own.tensors.items())


def add_own(live: Live, key: str, found: Iterable[Own], *, steady: bool = False) -> None:
    """Live tensors, under the names that state_dict() gives them.  What is shared is saved once."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in own_tensors(found):
        full = f"{key}.{name}"
        if tensor.is_meta:
            raise UsageError(
                f"{full}: on the meta device, and only its module knows what it is",
                hint="build the module on its real device",
            )
        known = first.setdefault(_memory(tensor) or (id(tensor),), full)
        if known != full:
            live.aliases[full] = known
        else:
            live.add(full, "buffer", tensor, steady=steady)


def add_made(live: Live, key: str, found: Iterable[Own]) -> None:
    """Made values, as an extra of each module."""
    for own in found:
        if own.made:
            name = f"{key}.{own.name(OWN)}"
            live.extras[name] = {e: _encoded(live, key, own, e, name) for e in own.made}


def _encoded(live: Live, key: str, own: Own, entry: str, extra: str) -> Any:
    """A made value for the extra of its module, which then goes by what is in its large tensors, too."""
    full = f"{key}.{own.name(entry)}"
    try:
        tree = encode(live, full, own.made[entry], inline=True)
    except UsageError as error:
        way = f"holdfast.ignore({key}, {own.name(entry)!r}) does without it"
        error.hint = f"let the module's state_dict() have it as plain values or tensors; {way}"
        raise
    if digests := live.contents.pop(full, []):
        live.contents.setdefault(extra, []).extend(digests)
    return tree


# -- putting back -----------------------------------------------------------------------------------


def put_own(key: str, own: Own, saved: Mapping[str, Any]) -> None:
    """Put made values back by the module's own ways to load, and see that they are there.

    Live tensors have been filled.  StateMismatch if the module has not taken a value.
    """
    error = _load(own, saved) if _loads_itself(own.part) else None
    lost = _differing(own, saved)
    if lost and put_quant_states(own.part, _with(_entries(own.part), saved)):
        lost = _differing(own, saved)
    if lost:
        few = ", ".join(f"{key}.{own.name(e)}" for e in lost[:3]) + ", ..." * (len(lost) > 3)
        raise StateMismatch(
            f"{few}: saved with a value that this {type(own.part).__name__} has not, and its ways to load "
            f"do not take it{'' if error is None else f' ({error})'}",
            tuple(f"{key}.{own.name(e)}" for e in lost),
            hint="build it from the same weights with the same settings, give it a _load_from_state_dict() "
            f"that takes the value, or do without: holdfast.ignore({key}, {own.name(lost[0])!r})",
        )


def _with(entries: Mapping[str, Any], saved: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Entries with the saved values in place of those that are there.  The tensors are variables."""
    names = {clean(e): e for e in entries}
    found = OrderedDict({**entries, **{names.get(e, e): v for e, v in saved.items()}})
    if hasattr(entries, "_metadata"):  # the versions of the modules
        found._metadata = entries._metadata  # type: ignore[attr-defined]
    return found


def _loads_itself(part: nn.Module) -> bool:
    kind = type(part)
    ways = (kind.load_state_dict, kind._load_from_state_dict)
    own = ways != (nn.Module.load_state_dict, nn.Module._load_from_state_dict)
    here = "_load_from_state_dict" in part.__dict__ or "load_state_dict" in part.__dict__
    return own or here or bool(part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks)


def _load(own: Own, saved: Mapping[str, Any]) -> str | None:
    """Hand a module its own entries, of which the tensors are its own, filled already, and the made values
    those that were saved.  What it says against them, which may be about what is there already."""
    part = own.part
    entries = _with(_entries(part), saved)
    errors: list[str] = []
    try:
        with torch.no_grad():
            if _asks_whole(part):
                part.load_state_dict(entries, strict=False)
            else:
                metadata = {"version": part._version}
                part._load_from_state_dict(entries, "", metadata, True, [], [], errors)
                for hook in part._load_state_dict_post_hooks.values():
                    hook(part, _IncompatibleKeys([], []))
    except HoldfastError:
        raise
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
    return errors[0] if errors else None


def _differing(own: Own, saved: Mapping[str, Any]) -> list[str]:
    """Entries that the module does not say with the value that they were saved with, or not any more in the
    memory that was filled."""
    entries = {clean(e): v for e, v in _entries(own.part).items()}
    lost = [e for e, v in saved.items() if e not in entries or _form(v) != _form(entries[e])]
    for entry, tensor in own.tensors.items():
        now = entries.get(entry)
        if not _is_same(tensor, now) and _form(tensor) != _form(now):
            lost.append(entry)
    return lost


def _form(value: Any) -> Any:
    """A value as it would be saved, large tensors by digest."""
    live = Live()
    tree = encode(live, "value", [value], inline=True)
    tensors = [(n, t.placed.dtype, t.placed.shape) for n, t in live.tensors.items()]
    return tree, live.contents, tensors
