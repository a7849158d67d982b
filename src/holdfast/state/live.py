"""The live state of a run, named and placed.

A user hands over a dict: modules, lists of pipeline stages, optimizers, anything with `state_dict` and
`load_state_dict`, nested dicts of tensors and plain values.  `collect` turns it into named tensors
(`<key>.<fully qualified name>`) and extras (the rest, by key).  Frameworks differ only here, in where
the names and the placements come from.

*Steady* tensors change inside `optimizer.step()` alone and may be copied in the background until then;
the others (buffers, tensors that the user handed over himself) are copied at once.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.codec.digest import hexdigest
from holdfast.errors import UsageError
from holdfast.format import extras
from holdfast.layout import Box
from holdfast.state.megatron import Megatron, is_megatron_optimizer, megatrons
from holdfast.state.placed import Placed, place, torch_dtype
from holdfast.state.shards import extra_names, is_wrapped, names_of
from holdfast.state.wrapped import check_wrapped, holder
from holdfast.state.zero import Group, Zero, is_engine, is_wrapper, zeros

State = dict[str, Any]
Engine = Zero | Megatron
"""Frameworks that keep values elsewhere than in the parameters themselves."""

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
PER_RANK = ("redistribute", "fresh", "ask")
"""Rules of extras that each rank keeps for itself."""

INLINE_BYTES = 64 << 10
"""Tensors inside the state_dict of an object that are no larger go into the extras."""


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor of the run as this rank holds it."""

    name: str
    state: str
    placed: Placed
    steady: bool
    source: torch.Tensor
    """What the run itself writes to: a DTensor counts its writes, its local tensor does not."""
    rest: tuple[Placed, ...] = ()
    """This rank's other parts, if it has several (ZeRO); all lie in one tensor."""

    @property
    def parts(self) -> tuple[Placed, ...]:
        return (self.placed, *self.rest)

    def holder(self, box: Box) -> int:
        """The number of the part in which a box lies."""
        if not self.rest:
            return 0
        return next(i for i, part in enumerate(self.parts) if part.box & box == box)

    @property
    def version(self) -> int:
        """Grows with every write by way of the tensor or of its local part."""
        return self.source._version + self.placed.local._version


@dataclass
class Live:
    """Everything that this rank holds, at one moment."""

    tensors: dict[str, LiveTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    owned: set[str] = field(default_factory=set)
    """In a restore: saved tensors that have a place, but none of their own in `tensors`: those of the
    state_dict of objects, and numbers that ZeRO keeps once for many parameters."""
    engines: dict[int, Engine] = field(default_factory=dict)
    """In a restore: by id of module and of optimizer, the framework that knows them."""
    padded: set[str] = field(default_factory=set)
    """Tensors whose dim 0 is padded for this layout: more or fewer rows may have been saved."""
    contents: dict[str, list[str]] = field(default_factory=dict)
    """By key, digests of the tensors that an object's state refers to by name."""
    inline_bytes: float = INLINE_BYTES
    """How large tensors in the state_dict of an object may be to go into the extras."""
    rules: dict[str, str] = field(default_factory=dict)
    """Declared fate of an extra when the number of ranks changes; `ask` for undeclared loaders."""

    def add(self, name: str, state: str, tensor: torch.Tensor, *, steady: bool) -> None:
        if name in self.tensors:
            if self.tensors[name].placed.local.data_ptr() == place(tensor, name).local.data_ptr():
                return
            raise UsageError(f"two different tensors are named {name!r}")
        lazy = tensor.is_conj() or tensor.is_neg()  # its values are nowhere in memory
        self.tensors[name] = LiveTensor(
            name, state, place(tensor, name), steady and not lazy, tensor
        )

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
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def is_loader(value: Any) -> bool:
    """Whether an object yields data: then its position means nothing on other ranks."""
    return hasattr(value, "__iter__") and hasattr(value, "state_dict")


def stages(value: Any) -> list[nn.Module] | None:
    """The modules of a module or of a list of pipeline stages; None for anything else."""
    if isinstance(value, nn.Module):
        return [value]
    if isinstance(value, (list, tuple, nn.ModuleList)) and value:
        if all(isinstance(v, nn.Module) for v in value):
            return list(value)
    return None


def is_optimizer(value: Any) -> bool:
    """A torch optimizer, or what DeepSpeed or Megatron-Core has in its place."""
    return isinstance(value, Optimizer) or is_wrapper(value) or is_megatron_optimizer(value)


def engines_in(state: State) -> dict[int, Engine]:
    """The frameworks of a state, by id of module (or engine) and of optimizer."""
    modules = {key: stages(value) or [] for key, value in state.items()}
    return {**zeros(modules, state), **megatrons(modules, state, unwrap)}


def has_scheduler(engine: Engine, state: State) -> bool:
    """Whether the engine has a scheduler of its own that the state does not name."""
    return isinstance(engine, Zero) and not is_in(state, engine.engine.lr_scheduler)


def is_in(state: State, value: Any) -> bool:
    return any(known is value for known in state.values())


def collect(state: State, on_resize: dict[str, str] | None = None) -> Live:
    """Name and place everything.  Shares memory with the live tensors; encodes the extras.

    `on_resize` declares, by key, what becomes of extras when the number of ranks changes.
    """
    check_keys(state)
    live = Live(keys=set(state))
    engines = engines_in(state)
    for key, value in state.items():
        modules = stages(value)
        if modules is not None:
            for module in modules:
                _add_module(live, key, module, engines.get(id(module)))
        elif is_optimizer(value):
            zero = engines.get(id(value))
            if zero is not None:
                scheduler = has_scheduler(zero, state)
                tree = encode(live, f"{key}.engine", zero.extras(scheduler), inline=True)
                live.extras[f"{key}.engine"] = tree
            check_wrapped(key, value, state)
            _add_optimizer(live, key, value, zero, all_param_names(state, value, zero))
        else:
            add_plain(live, key, value, on_resize)
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


def check_keys(state: State) -> None:
    if not isinstance(state, dict) or not state:
        raise UsageError(
            "state must be a dict such as {'model': model, 'optim': optimizer}, "
            f"not {type(state).__name__}"
        )
    for key in state:
        if not isinstance(key, str) or not key or "." in key or "/" in key or key[0] == "$":
            raise UsageError(f"key {key!r} of the state must be a name without '.', '/' or '$'")


# -- modules --------------------------------------------------------------------------------------


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module under DDP, torch.compile, DeepSpeed and Megatron-Core's wrappers."""
    while True:
        wrapped = isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel))
        if wrapped or is_engine(module) or is_wrapped(module):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            return module


def clean(name: str) -> str:
    """A fully qualified name without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Sharded parameters under their own names; tied ones appear under each name."""
    module = unwrap(module)
    for part in module.modules():
        if hasattr(part, "reshard") and hasattr(part, "unshard"):  # FSDP2: not left gathered
            part.reshard()
    names = names_of(module)
    for name, p in module.named_parameters(remove_duplicate=False):
        if "_flat_param" in name:
            raise UsageError(
                "FullyShardedDataParallel (FSDP1) flattens parameters and is not supported",
                hint="use torch.distributed.fsdp.fully_shard",
            )
        yield from ((own, p) for own in names.get(id(p), [clean(name)]))


def named_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent buffers."""
    names = names_of(unwrap(module))
    for prefix, part in unwrap(module).named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                own = clean(f"{prefix}.{name}" if prefix else name)
                yield names.get(id(buffer), [own])[0], buffer


def extra_states(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with state of their own (`get_extra_state`)."""
    names = extra_names(unwrap(module))
    for prefix, part in unwrap(module).named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            own = clean(f"{prefix}._extra_state" if prefix else "_extra_state")
            yield names.get(own, own), part


def _add_module(live: Live, key: str, module: nn.Module, zero: Engine | None) -> None:
    first: dict[int, str] = {}
    for kind, pairs in (("param", named_parameters(module)), ("buffer", named_buffers(module))):
        for name, tensor in pairs:
            full = f"{key}.{name}"
            known = first.setdefault(id(tensor), full)
            if known != full:
                live.aliases[full] = known
            elif not is_copy(zero, tensor):
                add_tensor(live, full, kind, tensor, zero, steady=kind == "param")
    add_extra_states(live, key, module)


def add_extra_states(live: Live, key: str, module: nn.Module) -> None:
    """What modules keep besides tensors."""
    for name, part in extra_states(module):
        full = f"{key}.{name}"
        live.extras[full] = encode(live, full, part.get_extra_state(), inline=True)


def add_tensor(
    live: Live, name: str, kind: str, tensor: torch.Tensor, zero: Engine | None, *, steady: bool
) -> None:
    """A parameter or buffer, wherever the engine that it belongs to keeps its values."""
    if zero is None:
        live.add(name, kind, tensor, steady=steady)
    else:
        parts = zero.parts(tensor, name)
        live.add_parts(name, kind, parts, zero.source(tensor), steady=steady)
        if isinstance(zero, Megatron) and zero.is_padded(tensor):
            live.padded.add(name)


def is_copy(zero: Engine | None, p: torch.Tensor) -> bool:
    """Whether this rank's values are saved by another one."""
    return isinstance(zero, Megatron) and zero.is_copy(p)


# -- optimizers -----------------------------------------------------------------------------------


def groups_of(optimizer: Any, zero: Engine | None) -> list[Group]:
    """Each parameter group's dict, and the parameters of the model that are in it."""
    if zero is not None:
        return zero.groups
    return [(group, group["params"]) for group in optimizer.param_groups]


def param_names(state: State, optimizer: Any, zero: Engine | None) -> dict[int, str]:
    """Fully qualified names of the parameters of an optimizer, by object."""
    return {i: names[0] for i, names in all_param_names(state, optimizer, zero).items()}


def all_param_names(state: State, optimizer: Any, zero: Engine | None) -> dict[int, list[str]]:
    """As `param_names`, with every name of a tied parameter.

    A name carries its module's key only where two modules that the optimizer serves share a
    parameter name; what other modules the state has makes no difference.
    """
    served = {id(p) for _, params in groups_of(optimizer, zero) for p in params}
    found: dict[int, list[tuple[str, str]]] = {}
    keys: dict[str, set[str]] = {}
    for key, value in state.items():
        pairs = [pair for module in stages(value) or () for pair in named_parameters(module)]
        if not any(id(p) in served for _, p in pairs):
            continue
        for name, p in pairs:
            found.setdefault(id(p), []).append((key, name))
            keys.setdefault(name, set()).add(key)
    return {
        i: [name if len(keys[name]) == 1 else f"{key}.{name}" for key, name in dict.fromkeys(pairs)]
        for i, pairs in found.items()
    }


def named_groups(
    groups: list[Group], names: dict[int, str]
) -> list[list[tuple[str, torch.Tensor]]]:
    """(name, parameter) of each group; names from the state's modules, else by position."""
    return [
        [(names.get(id(p), f"group{g}.{i}"), p) for i, p in enumerate(params)]
        for g, (_, params) in enumerate(groups)
    ]


NO_HYPER = ("params", "param_names", "is_expert_parallel")
"""Of a group: what is not how it is trained, but whom it has, and how Megatron's ranks lie."""


def hyper(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in NO_HYPER}


def _add_optimizer(
    live: Live, key: str, optimizer: Any, zero: Engine | None, all_names: dict[int, list[str]]
) -> None:
    saved: list[Any] = []
    others: dict[str, Any] = {}
    names = {i: found[0] for i, found in all_names.items()}
    groups = groups_of(optimizer, zero)
    for (group, _), pairs in zip(groups, named_groups(groups, names)):
        saved.append(
            {
                "params": [n for name, p in pairs for n in all_names.get(id(p), [name])],
                "hyper": encode(live, key, hyper(group), inline=True),
            }
        )
        # DeepSpeed's Muon writes its momentum before the optimizer's step begins
        steady = zero is None or not group.get("use_muon")
        for name, p in pairs:
            plain = {}
            states = states_of(optimizer, p, zero)
            for state, value in states.items():
                if isinstance(value, torch.Tensor):
                    whole = zero is None or value.ndim > 0  # one number serves many parameters
                    prefix, still = f"{key}.{name}", steady and whole
                    add_state(live, prefix, str(state), p, value, zero, steady=still)
                    add_ties(live, key, str(state), all_names.get(id(p), ()))
                else:
                    plain[str(state)] = encode(live, f"{key}.{name}.{state}", value, inline=True)
            if plain:
                others |= dict.fromkeys(all_names.get(id(p), [name]), plain)
    live.extras[key] = {"$optimizer": {"groups": saved, "state": others}}
    live.rules[key] = "merge"


def states_of(optimizer: Any, p: torch.Tensor, zero: Engine | None) -> Mapping[str, Any]:
    """What this rank saves of a parameter's optimizer state."""
    if zero is None:
        inner = holder(optimizer, p)
        return inner.state.get(p, {}) if inner is not None else {}
    return {} if is_copy(zero, p) else zero.states(p)


def add_state(
    live: Live,
    prefix: str,
    state: str,
    p: torch.Tensor,
    value: torch.Tensor,
    zero: Engine | None,
    *,
    steady: bool = True,
) -> None:
    """One tensor of a parameter's optimizer state."""
    name = f"{prefix}.{state}"
    parts = (place_state(p, value, name),) if zero is None else zero.state_parts(p, value, name)
    live.add_parts(name, state, parts, value, steady=steady)
    if isinstance(zero, Megatron) and value.ndim and zero.is_padded(p):
        live.padded.add(name)


def add_ties(live: Live, key: str, state: str, names: Sequence[str]) -> None:
    """State of a tied parameter goes by each of its names, as the parameter itself does."""
    for name in names[1:]:
        live.aliases[f"{key}.{name}.{state}"] = f"{key}.{names[0]}.{state}"


def place_state(p: torch.Tensor, value: torch.Tensor, name: str) -> Placed:
    """Like `place`, but a plain tensor of the shape of a sharded parameter's local part lies as it."""
    from torch.distributed.tensor import DTensor

    if isinstance(p, DTensor) and not isinstance(value, DTensor) and value.ndim:
        like = place(p, name)
        if like.box.shape != like.shape:
            if tuple(value.shape) != like.box.shape:
                raise UsageError(
                    f"{name!r}: a plain tensor of shape {tuple(value.shape)} beside a sharded "
                    f"parameter of shape {like.shape} (here {like.box.shape}): "
                    "which part of what it is cannot be known",
                    hint="let the optimizer keep this state as a DTensor",
                )
            return Placed(value.detach(), like.shape, like.box, like.cuts)
    return place(value, name)


# -- the rest -------------------------------------------------------------------------------------


def encode(live: Live, key: str, value: Any, *, inline: bool) -> Any:
    """Extras of `value`; tensors inside become tensors of the checkpoint unless small and inline."""

    def on_other(leaf: Any, path: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            name = f"{key}.{path}"
            if inline and is_cut(leaf):  # each rank has its part: a tensor like a module's
                live.add(name, "tensor", leaf, steady=False)
                return {"$at": name}
            small = leaf.numel() * leaf.element_size() <= live.inline_bytes
            if inline and (small or live.rules.get(key) in PER_RANK):
                return inline_tensor(leaf)
            if inline:
                live.contents.setdefault(key, []).append(content_digest(leaf))
            live.add(name, "tensor", leaf, steady=False)
            return {"$at": name}
        if is_stateful(leaf) and not isinstance(leaf, (nn.Module, Optimizer)):
            return {"$object": encode(live, f"{key}.{path}", leaf.state_dict(), inline=True)}
        if isinstance(leaf, torch.Size):
            return {"$tuple": list(leaf)}
        raise UsageError(
            f"{key}.{path}: a {type(leaf).__module__}.{type(leaf).__qualname__} cannot be saved",
            hint="give it state_dict()/load_state_dict(), hand modules and optimizers over as "
            "values of the state itself, or reduce it to numbers, strings, lists, dicts or tensors",
        )

    if isinstance(value, torch.Size):
        value = tuple(value)
    return extras.encode(value, on_other)


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether ranks hold different parts of it."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements)


def content_digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's own elements on this rank."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return hexdigest(plain.view(torch.uint8).numpy().data)


def inline_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """A small tensor as JSON: dtype, shape, bytes."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    plain = tensor.detach().cpu().contiguous()
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
