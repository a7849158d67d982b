"""Entries that the `state_dict()` of a module has beyond parameters, buffers and `get_extra_state`.

A module may add entries: it overrides `_save_to_state_dict` or `state_dict`, or it has state-dict hooks.
bitsandbytes keeps the scales of quantised weights that way, torch's dynamic quantisation the weights
themselves.  Only such modules are asked.  Names do not matter, for hooks rename entries: a tensor in the
memory of a parameter or buffer is saved already (both in `state.own_state_dicts`).

The other entries are of two kinds.  *Live* tensors are attributes of the module: two calls give the same
memory.  They are saved and restored in place, as buffers are.  *Made* values (a packed weight that is
unpacked, a number as a tensor, a dtype) are new at each call.  They go into one extra of the module,
`<module>._own_extra_state`, by name; a restore puts them back through the module's own loading hooks
(`state.own_loading`).

    saved:     {"0.weight": param, "0.SCB": live, "0.weight_format": made}
    restored:  0.weight and 0.SCB in place   ->  load hooks, given all three  ->  0.weight_format compared

So a made value must be the same at two calls: a time or a counter of calls could never be proved to be
restored, and the first save refuses it.

Nothing here communicates: FSDP's hooks, which may gather, are not called, and each module is asked with its
variables (`keep_vars`), which copies nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from holdfast.base.errors import HoldfastError, UsageError, warn_user
from holdfast.base.text import listed
from holdfast.live.state.encoding import encode_extra
from holdfast.live.state.ignoring import Ignored
from holdfast.live.state.module_wrappers import Names, parts
from holdfast.live.state.modules import unwrap
from holdfast.live.state.named import Collected, NamedTensors
from holdfast.live.state.own_state_dicts import (
    SavedTensors,
    asked,
    asks_whole,
    entries_of,
    is_same,
    memory_place,
)

OWN_EXTRA = "_own_extra_state"
"""The last part of the name of the extra that holds the made values of a module."""

_live_names: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
"""Entries of modules that are known to be live tensors: their modules are asked only once per save."""

_answers: ContextVar[dict[int, list[OwnEntries]] | None] = ContextVar("_answers", default=None)
"""Own entries by id of the module, inside a block of `asked_once`."""


@dataclass(slots=True)
class OwnEntries:
    """Entries that one submodule has beyond parameters, buffers and `_extra_state`.

    `path` is its name in the module that was handed over; entries are by their names within it.
    """

    path: str
    part: nn.Module
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)

    def name(self, entry: str) -> str:
        """Name of an entry in the module that was handed over."""
        return f"{self.path}.{entry}" if self.path else entry


# -- asking -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Asking:
    """One walk over a module.  `key`: of the state.  `first`: also check what the module says."""

    key: str
    ignored: Ignored | None
    first: bool
    found: list[OwnEntries] = field(default_factory=list)
    """Own entries of submodules, inner modules first."""
    names: list[str] = field(default_factory=list)
    """Names of all own entries, ignored entries too."""
    paths: dict[nn.Module, list[str]] = field(default_factory=dict)
    """All paths of each submodule, if anything is ignored.  A shared one is asked under its first path."""

    def ask(self, path: str, part: nn.Module) -> None:
        """Find the own entries of a module: those that are not saved anyway."""
        own = OwnEntries(path, part)
        entries = self._entries(own)
        if entries is None:
            return
        held = _held(own, self.found)
        rest = _not_held(self.key, own, entries, held)
        rest = {e: v for e, v in rest.items() if not self._is_ignored(own, e)}
        tensors = {
            e: v for e, v in rest.items() if isinstance(v, torch.Tensor) and not v.is_quantized
        }
        live = _live(part, tensors)
        own.tensors = {e: tensors[e] for e in tensors if e in live}
        own.made = {e: v for e, v in rest.items() if e not in live}
        if own.tensors or own.made:
            self.found.append(own)
        if self.first and own.made:
            _check_steady(self.key, own)
            _tell_copies(self.key, own, held)

    def _is_ignored(self, own: OwnEntries, entry: str) -> bool:
        """True if an entry is given up under any of its module's names."""
        paths = self.paths.get(own.part, [own.path])
        names = [OwnEntries(path, own.part).name(entry) for path in paths]
        self.names += names
        return self.ignored is not None and any([self.ignored.has(name) for name in names])

    def _entries(self, own: OwnEntries) -> Mapping[str, Any] | None:
        """Entries of a module's state_dict(); None if that fails, and its failure is ignored."""
        try:
            return entries_of(own.part)
        except HoldfastError:
            raise
        except Exception as error:
            if self._is_ignored(own, "*"):
                return None
            raise UsageError(
                f"{self.key}.{own.path}: what this {type(own.part).__name__} keeps besides its parameters "
                f"and buffers cannot be known, for its state_dict() fails: {type(error).__name__}: {error}",
                hint=f"holdfast.ignore({self.key}, {own.name('*')!r}) saves its parameters and buffers "
                "alone",
            ) from error


def customised(key: str, module: nn.Module, *, first: bool = False) -> list[OwnEntries]:
    """The own entries of submodules, inner modules first.  `key`: of the state.

    UsageError for a module whose state_dict() fails.  `first`: also for a made value that differs at a
    second call, and for patterns of `ignore` that match nothing.
    """
    answers = _answers.get()
    if answers is None or first:
        return _ask(key, module, first)
    if id(module) not in answers:
        answers[id(module)] = _ask(key, module, first)
    return answers[id(module)]


@contextmanager
def asked_once() -> Iterator[None]:
    """A block in which no module changes: each is asked once on this thread."""
    token = _answers.set({})
    try:
        yield
    finally:
        _answers.reset(token)


def _ask(key: str, module: nn.Module, first: bool) -> list[OwnEntries]:
    asking = _Asking(key, ignored_of(module), first)
    root = unwrap(module)
    for prefix, part in parts(root) if asking.ignored is not None else ():
        asking.paths.setdefault(part, []).append(prefix.removesuffix("."))
    for prefix, part in reversed(list(asked(root))):
        asking.ask(prefix.removesuffix("."), part)
    if asking.ignored is not None and first:
        asking.ignored.check(key, asking.names)
    return asking.found


def refuse_own(key: str, engine: nn.Module, *, first: bool = False) -> None:
    """UsageError for own entries of modules inside an engine (of DeepSpeed or Megatron): nothing tells
    which rank's they are."""
    names = [
        f"{key}.{own.name(entry)}"
        for own in customised(key, engine, first=first)
        for entry in (*own.tensors, *own.made)
    ]
    if names:
        raise UsageError(
            f"{listed(names)}: in the state_dict() of a module inside an engine ({type(engine).__name__}), "
            "of which parameters, buffers and get_extra_state() are saved",
            hint="keep it as a buffer or in get_extra_state(), or do without it: "
            f"holdfast.ignore({key}, {names[0].removeprefix(key + '.')!r})",
        )


def ignored_of(module: nn.Module) -> Ignored | None:
    """Patterns of `ignore` for a module and those in it; None if nothing was ever declared."""
    if not Ignored.any():
        return None
    root = unwrap(module)
    inside = [(prefix.rstrip("."), part) for prefix, part in parts(root) if part is not module]
    return Ignored([("", module), *inside])


def named_entries(part: nn.Module) -> dict[str, Any]:
    """Entries of a module's state_dict(), by names without the components of wrappers inside it."""
    names = Names(part)
    return {names.plain(entry): value for entry, value in entries_of(part).items()}


def _held(own: OwnEntries, inner: list[OwnEntries]) -> SavedTensors:
    """The tensors that are saved anyway.  `inner`: own entries of submodules and wrapped modules."""
    whole = asks_whole(own.part)
    start = f"{own.path}." if own.path else ""
    below = [one for one in inner if one.path == own.path or one.path.startswith(start)]
    named = [one for one in below if whole or one.path != own.path]
    return SavedTensors(
        own.part,
        whole=whole,
        names=[one.name(e)[len(start) :] for one in named for e in (*one.tensors, *one.made)],
        tensors=[tensor for one in below for tensor in one.tensors.values()],
    )


def _not_held(
    key: str, own: OwnEntries, entries: Mapping[str, Any], held: SavedTensors
) -> dict[str, Any]:
    """Entries that nothing else holds.  UsageError for two entries with one name without wrappers."""
    names = Names(own.part)
    rest: dict[str, Any] = {}
    as_said: dict[str, str] = {}
    for entry, value in entries.items():
        if held.is_one(value):
            continue
        name = names.plain(entry)
        if as_said.setdefault(name, entry) != entry:
            raise _twice(f"{key}.{own.name(name)}", (as_said[name], entry))
        if name not in held.names and not held.has(value):
            rest[name] = value
    return rest


def _twice(name: str, which: Iterable[str]) -> UsageError:
    return UsageError(
        f"{' and '.join(which)} would both be called {name}: what wraps a module does not show in names",
        hint="give one of them another name: what a wrapper itself has must not be called as something "
        "inside it is",
    )


def _live(part: nn.Module, tensors: dict[str, torch.Tensor]) -> set[str]:
    """Names of the tensors that the module itself holds: a second call gives the same memory."""
    known = _live_names.get(part, frozenset())
    if not tensors.keys() <= known:
        again = named_entries(part)
        same = {e for e, t in tensors.items() if is_same(t, again.get(e))}
        known = _live_names[part] = frozenset(same)
    return set(known & tensors.keys())


# -- checking what is made --------------------------------------------------------------------------


def form(name: str, value: Any) -> Any:
    """A value as it would be saved under a name, large tensors by digest."""
    live = Collected()
    tree = encode_extra(live, name, [value], inline=True)
    tensors = [(n, t.placed.dtype, t.placed.shape) for n, t in live.tensors.items()]
    return tree, live.contents, tensors


def _check_steady(key: str, own: OwnEntries) -> None:
    """UsageError for made values that differ at a second call."""
    again = named_entries(own.part)
    changed = []
    for entry, value in own.made.items():
        name = f"{key}.{own.name(entry)}"
        with suppress(UsageError):  # what cannot be saved is told with its name when it is to be
            if entry not in again or form(name, value) != form(name, again[entry]):
                changed.append(entry)
    if changed:
        raise UsageError(
            f"{listed([f'{key}.{own.name(e)}' for e in changed])}: the state_dict() of this "
            f"{type(own.part).__name__} has another value at each call, which no restore can bring back",
            hint=f"holdfast.ignore({key}, {own.name(changed[0])!r}) does without it",
        )


def _tell_copies(key: str, own: OwnEntries, held: SavedTensors) -> None:
    """HoldfastWarning for made values that are copies of parameters or buffers, under other names."""
    made = {e: v for e, v in own.made.items() if _is_plain(v) and _varies(v)}
    by_kind: dict[Any, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in held.named() if made else ():
        if _is_plain(tensor):
            by_kind.setdefault(_kind(tensor), []).append((name, tensor))
    copies = {
        entry: name
        for entry, value in made.items()
        for name, tensor in by_kind.get(_kind(value), ())
        if torch.equal(_elements(value), _elements(tensor))
    }
    if copies:
        few = [f"{key}.{own.name(e)} (as {key}.{own.name(n)})" for e, n in copies.items()]
        warn_user(
            f"the state_dict() of {type(own.part).__name__} has copies of parameters or buffers under "
            f"other names, which are saved a second time: {listed(few)}; "
            f"holdfast.ignore({key}, {own.name(next(iter(copies)))!r}) leaves one out"
        )


def _kind(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tensor.shape, tensor.device


def _is_plain(value: Any) -> bool:
    """True if a value is a tensor with all its values in memory of its own."""
    if type(value) not in (torch.Tensor, nn.Parameter) or value.is_quantized or value.is_nested:
        return False
    return value.layout is torch.strided and not value.is_meta and memory_place(value) is not None


def _varies(tensor: torch.Tensor) -> bool:
    """True if a tensor has several values: one that is all zero or all one equals many others."""
    return tensor.numel() > 1 and bool((_elements(tensor) != _elements(tensor)[0]).any())


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, a row for each: some dtypes cannot be compared."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1, 1).view(torch.uint8)


# -- saving -----------------------------------------------------------------------------------------


def own_tensors(found: Iterable[OwnEntries]) -> Iterator[tuple[str, torch.Tensor]]:
    """Live tensors by their names in the module that was handed over."""
    for own in found:
        yield from ((own.name(entry), tensor) for entry, tensor in own.tensors.items())


def add_own(
    live: NamedTensors, key: str, found: Iterable[OwnEntries], *, steady: bool = False
) -> None:
    """Add live tensors, by the names that state_dict() gives them.  Shared ones are saved once."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in own_tensors(found):
        full = f"{key}.{name}"
        if tensor.is_meta:
            raise UsageError(
                f"{full}: on the meta device, and only its module knows what it is",
                hint="build the module on its real device",
            )
        known = first.setdefault(memory_place(tensor) or (id(tensor),), full)
        if known != full:
            live.aliases[full] = known
        else:
            live.add(full, "buffer", tensor, steady=steady)


def add_made(
    live: Collected,
    key: str,
    found: Iterable[OwnEntries],
    on_resize: Mapping[str, str] | None = None,
) -> None:
    """Add made values, as an extra per module; a wrapper and what it wraps have one together."""
    for own in found:
        if not own.made:
            continue
        extra = f"{key}.{own.name(OWN_EXTRA)}"
        if on_resize and extra in on_resize:
            live.rules[extra] = on_resize[extra]
        entries = live.extras.setdefault(extra, {})
        for entry in own.made:
            if entry in entries:
                raise _twice(f"{key}.{own.name(entry)}", ("an entry of a wrapper", "one inside it"))
            entries[entry] = _encoded(live, key, own, entry, extra)


def _encoded(live: Collected, key: str, own: OwnEntries, entry: str, extra: str) -> Any:
    """Encode a made value for its module's extra; digests of its large tensors go there, too."""
    full = f"{key}.{own.name(entry)}"
    try:
        tree = encode_extra(live, full, own.made[entry], inline=True, rule=live.rules.get(extra))
    except UsageError as error:
        way = f"holdfast.ignore({key}, {own.name(entry)!r}) does without it"
        error.hint = f"let the module's state_dict() have it as plain values or tensors; {way}"
        raise
    if digests := live.contents.pop(full, []):
        live.contents.setdefault(extra, []).extend(digests)
    return tree
