"""The live state of a run, named and placed.

A user hands over a dict: modules, lists of pipeline stages, optimizers, anything with `state_dict` and
`load_state_dict`, nested dicts of tensors and plain values.  `collect` turns it into named tensors
(`<key>.<fully qualified name>`) and extras (the rest, by key).  Frameworks differ only here, in where
the names and the placements come from.

*Steady* tensors are parameters and optimizers' states, which may change inside `optimizer.step()` alone;
the others (buffers, tensors that the user handed over himself) change at any moment.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from holdfast.base.errors import UsageError
from holdfast.core.codec.digest import hexdigest
from holdfast.core.format import extras
from holdfast.core.layout import Box
from holdfast.live.sources import Master, Source, Sources, frameworks, is_owned
from holdfast.live.state.ignoring import trainable_marks
from holdfast.live.state.kinds import check_kind, check_unit
from holdfast.live.state.managed import wait_for_writers
from holdfast.live.state.own_errors import naming
from holdfast.live.state.placed import Placed, is_apart, memory_of, parts_in, place, torch_dtype
from holdfast.live.state.several import taken_apart
from holdfast.live.state.wrappers import Wrappers, parts
from holdfast.live.state.writes import Origin, write_count

State = dict[str, Any]

RULES = ("same", "rank0", "redistribute", "fresh")
"""Rules that a user may give for extras, when the number of ranks changes."""
PER_RANK = ("redistribute", "fresh", "ask")
"""Rules of extras that each rank keeps for itself."""

INLINE_BYTES = 64 << 10
"""Tensors inside the state_dict of an object that are no larger go into the extras."""


class LiveTensor(msgspec.Struct, frozen=True, eq=False):
    """A tensor of the run as this rank holds it."""

    name: str
    state: str
    placed: Placed
    steady: bool
    source: torch.Tensor
    """The tensor that the run writes to: a DTensor counts its writes, its local tensor does not."""
    rest: tuple[Placed, ...] = ()
    """This rank's other parts, if it has several (ZeRO); all lie in one tensor."""
    origin: Origin | None = None
    """Origin of `source` when it was placed; lets the next save reuse this entry (`Live.before`).  None if
    it must be placed anew."""

    @property
    def parts(self) -> tuple[Placed, ...]:
        return (self.placed, *self.rest)

    def holder(self, box: Box) -> int:
        """The number of the part in which a box lies."""
        if not self.rest:
            return 0
        return next(i for i, part in enumerate(self.parts) if part.box & box == box)

    @property
    def counted(self) -> torch.Tensor:
        """The tensor that counts writes beside `source`: its local part."""
        # a DTensor that is detached, as to place it, has a local part with a counter of its own
        return self.placed.local if self.origin is None else self.origin.memory

    @property
    def version(self) -> int:
        """Count that grows with every write by way of the tensor or of its local part."""
        return write_count(self.source, self.counted)

    @property
    def is_still_there(self) -> bool:
        """True if the source lies where it did when placed."""
        return self.origin is not None and self.origin.still_has(self.source)


@dataclass
class Live:
    """Everything that this rank holds, at one moment."""

    tensors: dict[str, LiveTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The kind that a value is saved as (`kind_of`), and the name of its type, by key."""
    owned: set[str] = field(default_factory=set)
    """In a restore: saved tensors that have a place, but none of their own in `tensors`: those of the
    state_dict of objects, and numbers that ZeRO keeps once for many parameters."""
    frozen: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """In a restore: dtype and shape of each parameter that is left out (`trainable_only`), by name."""
    taken: set[str] = field(default_factory=set)
    """In a restore: extras of modules that have a place."""
    own: dict[int, list[Any]] = field(default_factory=dict)
    """In a restore: by id of a module, what it has beyond parameters and buffers (`state.customised`)."""
    sources: Sources = field(default_factory=Sources)
    """In a restore: whoever tells of each module and optimizer."""
    modules: dict[str, list[nn.Module]] = field(default_factory=dict)
    """Modules as they were handed over, by key."""
    padded: set[str] = field(default_factory=set)
    """Tensors whose dim 0 is padded for this layout: more or fewer rows may have been saved."""
    trained: set[int] = field(default_factory=set)
    """Parameters, by id, that an optimizer moves whose steps are seen."""
    moved: set[str] = field(default_factory=set)
    """Steady tensors that an optimizer moves whose steps are seen."""
    aside: set[str] = field(default_factory=set)
    """Tensors that are copied at the call (`state.movers`); the others are copied in the window."""
    contents: dict[str, list[str]] = field(default_factory=dict)
    """Digests of the tensors that an object's state refers to by name, by key."""
    inline_bytes: float = INLINE_BYTES
    """Largest size of tensors in the state_dict of an object that go into the extras, in bytes."""
    rules: dict[str, str] = field(default_factory=dict)
    """Declared fate of an extra when the number of ranks changes; `ask` for undeclared loaders."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """In a restore: keys of optimizers that cannot go on with what was saved, and why."""
    idle: list[tuple[str, str]] = field(default_factory=list)
    """In a restore: keys of optimizers, and which states they will have, but have no use for themselves."""
    unfit: set[int] = field(default_factory=set)
    """In a restore that is not strict: by id, parameters whose saved states are left out for that."""
    before: Mapping[str, LiveTensor] = field(default_factory=dict)
    """Tensors found the last time, by name; those that lie where they did are not placed again."""
    apart: dict[str, list[str]] = field(default_factory=dict)
    """Names of the tensors that a tensor is made of, by its own (`state.apart`)."""
    devices: list[torch.device] | None = None
    """Its devices, without the CPU, once that was asked (`state.devices`)."""
    saved: Callable[[str], Any] | None = None
    """In a restore: what is saved under a name (a manifest's entry), or None."""
    puts: list[Callable[[], None]] = field(default_factory=list)
    """In a restore: what is done once tensors are read, with those that are not filled in place."""

    def _take_over(self, name: str, state: str, tensor: torch.Tensor, steady: bool) -> bool:
        """Add a tensor as it was found the last time, if it still lies where it did; True if so."""
        known = self.before.get(name)
        if known is None or known.source is not tensor or name in self.tensors:
            return False
        if (known.state, known.steady) != (state, steady) or not known.is_still_there:
            return False
        self.tensors[name] = known
        return True

    def add(self, name: str, state: str, tensor: torch.Tensor, *, steady: bool) -> None:
        if self.before and self._take_over(name, state, tensor, steady):
            return
        if is_apart(tensor):
            from holdfast.live.state.apart import add_apart

            if add_apart(self, name, state, tensor, steady=steady):
                return
        if name in self.tensors:
            if self.tensors[name].placed.local.data_ptr() == place(tensor, name).local.data_ptr():
                return
            raise UsageError(f"two different tensors are named {name!r}")
        if not name.isascii():
            extras.encode(name, path=name, utf8=True)
        placed = place(tensor, name)
        local = placed.local
        # conjugated and negated values are nowhere in memory; writes to inference tensors are not counted
        lazy = local.is_conj() or local.is_neg() or tensor.is_inference()
        origin = Origin.of(tensor)
        self.tensors[name] = LiveTensor(
            name, state, placed, steady and not lazy, tensor, (), origin
        )

    def alias(self, name: str, other: str) -> None:
        """Let a tensor go by another name, too, with all that it is made of."""
        inner = self.apart.get(other, [other])
        self.aliases |= {name + one.removeprefix(other): one for one in inner}

    def add_parts(
        self,
        name: str,
        state: str,
        parts: tuple[Placed, ...],
        source: torch.Tensor,
        *,
        steady: bool,
    ) -> None:
        """Like `add`, with the places known; there may be none on this rank."""
        if name in self.tensors:
            raise UsageError(f"two different tensors are named {name!r}")
        if parts:
            self.tensors[name] = LiveTensor(name, state, parts[0], steady, source, parts[1:])


def is_stateful(value: Any) -> bool:
    names = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(callable(getattr(value, n, None)) for n in names)


class LoadedStates:
    """The states that objects were given by a restore, until the script goes on.

    Asked before that, many tell another one: a loader begins a pass, with what it draws for it and with the
    order of its sampler's epoch, or tells of its beginning.  What a restore itself saves comes from here,
    but for states with large or sharded tensors: these are the objects' own.
    """

    def __init__(self) -> None:
        self._states: dict[int, tuple[Any, Callable[[], Any]]] | None = None
        self._is_asked = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what objects are given."""
        self._states = {}
        try:
            yield
        finally:
            self._states, self._is_asked = None, False

    def ask(self) -> None:
        """Take what was noted for the states of these objects from now on."""
        self._is_asked = True

    def note(self, value: Any, tree: Any, decode: Callable[[Any], Any]) -> None:
        """Note that an object is given what `decode(tree)` makes, anew each time.  Where the tree refers to
        tensors, nothing is noted: records follow the object's own."""
        if self._states is not None and not any(True for _ in extras.referred(tree)):
            self._states[id(value)] = value, partial(decode, tree)

    def of(self, value: Any) -> Any:
        """Return the state of an object: what was noted, or what it says itself."""
        noted = self._states.get(id(value)) if self._states is not None and self._is_asked else None
        return value.state_dict() if noted is None else noted[1]()


loaded_states = LoadedStates()
"""The states of this process, in whose training thread one restore is made at a time."""


def is_loader(value: Any) -> bool:
    """True if an object yields data: then its position means nothing on other ranks."""
    return hasattr(value, "__iter__") and hasattr(value, "state_dict")


def stages(value: Any) -> list[nn.Module] | None:
    """The modules of a module or of a list of pipeline stages; None for anything else."""
    if isinstance(value, nn.Module):
        return [value]
    if isinstance(value, (list, tuple, nn.ModuleList)) and value:
        if all(isinstance(v, nn.Module) for v in value):
            return list(value)
    return None


def kind_of(value: Any) -> str:
    """Kind that a value of the state is saved as: of a key, ranks may differ in values, not in kinds."""
    if stages(value) is not None:
        return "module"
    if is_optimizer(value):
        return "optimizer"
    return "tensor" if isinstance(value, torch.Tensor) else "values"


def is_optimizer(value: Any) -> bool:
    """A torch optimizer, or what a framework has in its place."""
    return isinstance(value, Optimizer) or (not isinstance(value, nn.Module) and is_owned(value))


def sources_in(state: State) -> Sources:
    """The source of each module and optimizer of a state."""
    known = frameworks()
    if not known:
        return Sources()
    modules = {key: stages(value) or [] for key, value in state.items()}
    apart = taken_apart(state)
    found: dict[int, Source] = {}
    for framework in known:
        found |= framework.sources(modules, apart)
    for key, value in apart.items():
        if id(value) not in found and is_optimizer(value) and not isinstance(value, Optimizer):
            raise UsageError(
                f"{key!r}: its framework tells nothing of this {type(value).__name__}, so what it keeps of "
                "which weights is not known",
                hint="hand its model over, too; Framework.sources() must tell of each optimizer it owns",
            )
    return Sources(found)


def is_of_framework(state: State) -> bool:
    """True if any module or optimizer of a state is a framework's."""
    return bool(frameworks()) and any(
        is_owned(one) for value in state.values() for one in stages(value) or [value]
    )


def in_order(state: State) -> State:
    """The same values by sorted keys: what ranks do together for each of them (an object's `state_dict` may
    have collectives) they do in one order, however each of them has built its dict."""
    return dict(sorted(state.items()))


def check_keys(
    state: State, empty: str = "state is an empty dict: it names nothing to save or load"
) -> None:
    """UsageError for a state that names nothing, with that message, or has keys that cannot be written."""
    if not isinstance(state, dict):
        raise UsageError(
            "state must be a dict such as {'model': model, 'optim': optimizer}, "
            f"not {type(state).__name__}"
        )
    if not state:
        raise UsageError(
            empty,
            hint="hand over a dict such as {'model': model, 'optim': optimizer}",
        )
    for key in state:
        if not isinstance(key, str) or not key or "." in key or "/" in key or key[0] == "$":
            raise UsageError(f"key {key!r} of the state must be a name without '.', '/' or '$'")
        if type(key) is not str and f"{key}" != str.__str__(
            key
        ):  # as of an enum: names begin with it
            raise UsageError(
                f"key {key!r} of the state must be a plain text: it is written as '{key}'",
                hint=f"give {str.__str__(key)!r} itself",
            )
        extras.encode(key, path=key, utf8=True)


# -- modules --------------------------------------------------------------------------------------


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module under DDP, torch.compile, Fabric and wrappers of frameworks."""
    wrappers = Wrappers()
    while True:
        inside = wrappers.wrapped(module)
        if inside is None:
            inside = inside_framework(module)
        if inside is None:
            return module
        module = inside


def inside_framework(module: nn.Module) -> nn.Module | None:
    """The module in a framework's wrapper; None if it is no such wrapper."""
    found = (framework.inside(module) for framework in frameworks())
    return next((one for one in found if one is not None), None)


def names_in(module: nn.Module) -> dict[str, Sequence[str]]:
    """Names that frameworks give what is in an unwrapped module, by path; what they do not name keeps its
    path."""
    found: dict[str, Sequence[str]] = {}
    for framework in frameworks():
        found |= framework.names(module)
    return found


def reshard(module: nn.Module) -> None:
    """Put the parts of FSDP2's parameters in their places, instead of what was gathered of them."""
    every = parts_of(module)
    kinds = {
        kind
        for kind in set(map(type, every))
        if hasattr(kind, "reshard") and hasattr(kind, "unshard")
    }
    for part in every if kinds else ():
        if type(part) in kinds:
            part.reshard()


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Sharded parameters under their own names; tied ones appear under each name."""
    module = unwrap(module)
    reshard(module)
    names = names_in(module)
    for prefix, part in parts(module):
        check_unit(part, module)
        for name, p in part._parameters.items():
            if p is not None:
                for own in names.get(prefix + name) or (prefix + name,):
                    yield own, p


def named_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent buffers."""
    module = unwrap(module)
    names = names_in(module)
    for prefix, part in parts(module):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield names.get(prefix + name, (prefix + name,))[0], buffer


def parts_of(root: nn.Module) -> dict[nn.Module, None]:
    """A module and all in it, each once: three times as fast as `modules()`, which names them."""
    found: dict[nn.Module, None] = {root: None}
    left = [root]
    while left:
        for part in left.pop()._modules.values():
            if part is not None and part not in found:
                found[part] = None
                left.append(part)
    return found


def tensors_of(root: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of a module and all in it.  Megatron's DDP has a list in the place of
    `buffers()`."""
    return [
        t
        for part in parts_of(root)
        for t in (*part._parameters.values(), *part._buffers.values())
        if t is not None
    ]


def has_extra_state(kind: type[nn.Module]) -> bool:
    """True if modules of a class have state of their own."""
    return kind.get_extra_state is not nn.Module.get_extra_state


def extra_states(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with state of their own (`get_extra_state`)."""
    module = unwrap(module)
    if not any(map(has_extra_state, set(map(type, parts_of(module))))):
        return  # and nothing is to be named
    names = names_in(module)
    seen: set[int] = set()
    for prefix, part in parts(module):
        if id(part) not in seen and has_extra_state(type(part)):
            seen.add(id(part))
            own = f"{prefix}_extra_state"
            yield names.get(own, (own,))[0], part


def add_module(
    live: Live,
    key: str,
    module: nn.Module,
    source: Source,
    on_resize: Mapping[str, str] | None = None,
) -> None:
    live.modules.setdefault(key, []).append(module)
    first: dict[int, str] = {}
    frozen: set[int] = set()
    if trainable_marks:
        from holdfast.live.state.trainable import leave_out

        frozen = leave_out(live, key, module, source)
    for kind, pairs in (("param", named_parameters(module)), ("buffer", named_buffers(module))):
        for name, tensor in pairs:
            if id(tensor) in frozen:
                continue
            full = f"{key}.{name}"
            known = first.setdefault(id(tensor), full)
            if known != full:
                live.alias(full, known)
            elif (master := source.master(tensor)) is None or not master.is_copy:
                add_tensor(live, full, kind, tensor, master, steady=kind == "param")
                if id(tensor) in live.trained:
                    live.moved.update(live.apart.get(full, (full,)))
    add_extra_states(live, key, module, on_resize)


def add_extra_states(
    live: Live, key: str, module: nn.Module, on_resize: Mapping[str, str] | None = None
) -> None:
    """Add what modules keep besides tensors."""
    for name, part in extra_states(module):
        full = f"{key}.{name}"
        others = live.modules.get(key, [])[:-1] if full in live.extras else []
        if others and not any((name, part) in extra_states(one) for one in others):
            raise UsageError(f"two different modules have an extra state named {full!r}")
        if on_resize and full in on_resize:
            live.rules[full] = on_resize[full]
        with naming(full, part, "get_extra_state"):
            saved = part.get_extra_state()
        live.extras[full] = encode(live, full, saved, inline=True)


def add_tensor(
    live: Live, name: str, kind: str, tensor: torch.Tensor, master: Master | None, *, steady: bool
) -> None:
    """Add a parameter or buffer, or its master, if it has one."""
    if master is None:
        live.add(name, kind, tensor, steady=steady)
    else:
        parts = parts_in(master, master.tensor, name)
        live.add_parts(name, kind, parts, master.tensor, steady=steady)
        if master.is_padded:
            live.padded.add(name)


# -- the rest -------------------------------------------------------------------------------------


def encode(
    live: Live, key: str, value: Any, *, inline: bool, rule: str | None = None, depth: int = 0
) -> Any:
    """Extras of `value`; tensors inside become tensors of the checkpoint unless small and inline.

    `rule`: of the extra that it goes into, if that is not called `key`.  `depth`: objects that it is in.
    """
    if depth > extras.MAX_DEPTH:
        raise UsageError(
            f"{key[:80]}: objects whose state_dict() has objects, deeper than {extras.MAX_DEPTH}",
            hint="does a state_dict() return its object itself?",
        )
    each_rank = (rule or live.rules.get(key)) in PER_RANK
    objects: list[tuple[str, Any, dict[str, Any]]] = []
    """Path, object, and where its state goes: asked for in one order on all ranks (`in_order`)."""

    def on_other(leaf: Any, path: str) -> Any:
        name = f"{key}.{path}" if path else key
        if isinstance(leaf, torch.dtype):
            return {"$dtype": str(leaf).removeprefix("torch.")}
        if inline and isinstance(leaf, torch.Tensor) and leaf.is_quantized:
            from holdfast.live.state.quantised import quantised_parts

            return {"$quantized": extras.encode(quantised_parts(leaf, path), on_other, path)}
        if isinstance(leaf, torch.Tensor) and not inline:
            return _named(live, name, leaf, path)
        if isinstance(leaf, torch.Tensor):
            check_kind(memory_of(leaf), name)
            if is_cut(leaf):  # each rank has its part: a tensor like a module's
                live.add(name, "tensor", leaf, steady=False)
                return {"$at": name}
            small = leaf.numel() * leaf.element_size() <= live.inline_bytes
            if small or each_rank:
                return inline_tensor(leaf)
            live.contents.setdefault(key, []).append(content_digest(leaf))
            live.add(name, "tensor", leaf, steady=False)
            return {"$at": name}
        if is_stateful(leaf) and not isinstance(leaf, (nn.Module, Optimizer)):
            objects.append((path, leaf, {"$object": None}))
            return objects[-1][-1]
        if isinstance(leaf, torch.Size):
            return {"$tuple": list(leaf)}
        raise UsageError(
            f"{name}: a {type(leaf).__module__}.{type(leaf).__qualname__} cannot be saved",
            hint="take torchdata's StatefulDataLoader, which has state_dict(): docs/how-to/loaders.md"
            if isinstance(leaf, DataLoader)
            else "give it state_dict()/load_state_dict(), hand modules and optimizers over as "
            "values of the state itself, or reduce it to numbers, strings, lists, dicts or tensors",
        )

    if isinstance(value, torch.Size):
        value = tuple(value)
    try:
        tree = extras.encode(value, on_other, utf8=True)
    except extras.Unsaved as error:
        raise error.within(key) from None
    for path, leaf, into in sorted(objects, key=itemgetter(0)):
        name = f"{key}.{path}" if path else key
        with naming(name, leaf, "state_dict"):
            saved = loaded_states.of(leaf)
        into["$object"] = encode(live, name, saved, inline=True, depth=depth + 1)
        if is_loader(leaf):
            add_order(live, name, leaf, saved, rule or live.rules.get(key))
    return tree


def add_order(live: Live, name: str, loader: Any, saved: Any, rule: str | None) -> None:
    """Add what is kept of a data loader beside its state, if torch's loaders are there at all."""
    from holdfast.live.state.orders import add_order

    add_order(live, name, loader, saved, rule)


def _named(live: Live, name: str, leaf: torch.Tensor, path: str) -> dict[str, str]:
    """Add a tensor of a user's own dict or list, and refer to it."""
    if not path:  # its name would be that of the value itself
        raise extras.Unsaved(" key", "a tensor under an empty text cannot be saved", "name it")
    live.add(name, "tensor", leaf, steady=False)
    return {"$at": name}


def is_cut(tensor: torch.Tensor) -> bool:
    """True if ranks hold different parts of a tensor."""
    return isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements)


def content_digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's own elements on this rank."""
    plain = _plain(memory_of(tensor)).reshape(-1)
    return hexdigest(plain.view(torch.uint8).numpy().data)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same values whose memory is just these, in row-major order, on the CPU."""
    wait_for_writers((tensor,))
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def inline_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """A small tensor as JSON: dtype, shape, bytes."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    plain = _plain(tensor)
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"$tensor": [dtype, list(tensor.shape), base64.b64encode(data).decode()]}


def outline_tensor(body: Any) -> torch.Tensor:
    """The inverse of `inline_tensor`, on the CPU."""
    dtype, shape, data = body
    raw = bytearray(base64.b64decode(data))
    if not raw:
        return torch.empty(shape, dtype=torch_dtype(dtype))
    return torch.frombuffer(raw, dtype=torch.uint8).view(torch_dtype(dtype)).reshape(shape)
