"""Restoring: saved tensors and extras into live objects, in place, whatever their layout.

In five steps, each the same on every rank: materialise what is on the meta device; give optimizers the
state tensors that were saved; compare names, shapes and dtypes over all ranks (every difference is listed
in one error); read every rank's boxes together, straight into the live tensors; put the extras back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from holdfast.checkpoint.opened import Checkpoint
from holdfast.checkpoint.reading import RAW, Array, ArrayTarget, Target, Want
from holdfast.checkpoint.sharing import read_together
from holdfast.errors import FormatError, LayoutError, RuleError, StateMismatch, UsageError
from holdfast.events import emit, span
from holdfast.format import extras
from holdfast.group import Group
from holdfast.layout import Axis, Mesh, common_mesh
from holdfast.near import near
from holdfast.state.live import (
    Live,
    State,
    add_state,
    add_ties,
    all_param_names,
    check_keys,
    extra_states,
    is_stateful,
    named_buffers,
    named_parameters,
    optimizer_params,
    outline_tensor,
    param_names,
    stages,
    unwrap,
)
from holdfast.state.placed import place
from holdfast.state.snapshot import raw_array

_KINDS = ("param", "buffer", "tensor")
RULES = "same, rank0, redistribute, fresh"


@dataclass(frozen=True)
class Options:
    """What may differ between checkpoint and live state."""

    only: tuple[str, ...] | None = None
    cast: bool = False
    strict: bool = True
    on_resize: dict[str, str] = field(default_factory=dict)

    def wanted(self, name: str) -> bool:
        return self.only is None or any(fnmatchcase(name, p) for p in self.only)


@dataclass(frozen=True)
class TorchTarget:
    """A live tensor that takes values by `copy_`: on a device, or of another dtype."""

    tensor: torch.Tensor
    dtype: torch.dtype

    def memory(self) -> memoryview | None:
        return None

    def put(self, at: tuple[slice, ...], values: Array) -> None:
        source = torch.from_numpy(np.array(values)).view(self.dtype)
        with torch.no_grad():
            self.tensor[at].copy_(source)


def target_of(local: torch.Tensor, dtype: str) -> Target:
    """The memory of a live local tensor, for values of the saved dtype."""
    saved = getattr(torch, dtype)
    if local.device.type == "cpu" and local.dtype == saved and not local.is_conj():
        raw = raw_array(local)
        return ArrayTarget(raw.view(RAW[raw.dtype.itemsize]))
    return TorchTarget(local.detach(), saved)


# -- the whole ------------------------------------------------------------------------------------


def restore(checkpoint: Checkpoint, state: State, group: Group, options: Options) -> None:
    """Load everything that `state` names from an opened step.  Collective.

    StateMismatch, RuleError and UsageError leave the live tensors untouched.  Corrupt or a store's
    error may come when some are already overwritten; then what was to be loaded is poisoned with NaN.
    """
    check_keys(state)
    prepared = _prepare(checkpoint, state, group, options)
    with span("restore.read", step=checkpoint.step):
        try:
            read_together(checkpoint.files, prepared.wants, group if group.size > 1 else None)
        except Exception:
            poison(prepared.live)
            raise
    prepared.put_extras()


def poison(live: Live) -> None:
    """A half-loaded state must not be mistaken for a good one."""
    for t in live.tensors.values():
        local = t.placed.local
        if local.is_floating_point() and local.element_size() > 1:
            with torch.no_grad():
                local.fill_(float("nan"))


@dataclass
class _Prepared:
    live: Live
    wants: list[Want]
    put_extras: Callable[[], None]


def _prepare(checkpoint: Checkpoint, state: State, group: Group, options: Options) -> _Prepared:
    error: Exception | None = None
    live, problems = Live(), _Problems()
    plan: _Extras | None = None
    try:
        for value in state.values():
            for module in stages(value) or ():
                materialise(module)
        live = _targets(checkpoint, state, options)
        problems = compare(checkpoint, live, state, options)
        plan = _Extras(checkpoint, state, live, group, options)
        problems.lines += plan.problems
    except UsageError as failed:
        error = failed
        problems.lines.append(str(failed))
    changed = _judge_together(checkpoint, live, problems, error, group, options)
    assert plan is not None
    plan.resized = changed
    plan.check_rules()
    wants = [
        Want(
            checkpoint.index(name),
            t.placed.box,
            target_of(t.placed.local, _saved(checkpoint, name)),
        )
        for name, t in live.tensors.items()
        if _known(checkpoint, name) and t.placed.box.size
    ]
    wants += plan.wants
    return _Prepared(live, wants, plan.put)


def _saved(checkpoint: Checkpoint, name: str) -> str:
    return checkpoint.manifest.tensors[checkpoint.index(name)].dtype


def _known(checkpoint: Checkpoint, name: str) -> bool:
    m = checkpoint.manifest
    return m.aliases.get(name, name) in m.by_name


# -- live tensors ---------------------------------------------------------------------------------


def materialise(module: nn.Module) -> None:
    """Give tensors on the meta device real memory, uninitialised; ties stay tied."""
    root = unwrap(module)
    metas = [p for p in root.parameters() if p.is_meta]
    metas += [b for _, b in named_buffers(root) if b.is_meta]
    lost = [
        name
        for name, b in root.named_buffers()
        if b.is_meta and name not in {n for n, _ in named_buffers(root)}
    ]
    if lost:
        raise UsageError(
            f"buffers {', '.join(lost[:5])} are on the meta device and are in no checkpoint",
            hint="they are not persistent: compute them on the real device first",
        )
    if not metas:
        return
    ties: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in root.modules():
        for name, p in part._parameters.items():
            if p is not None and p.is_meta:
                ties.setdefault(id(p), []).append((part, name))
    device = _device_for(metas[0])
    root._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    for places in ties.values():
        first = places[0][0]._parameters[places[0][1]]
        for part, name in places[1:]:
            part._parameters[name] = first


def _device_for(tensor: torch.Tensor) -> torch.device:
    if isinstance(tensor, DTensor):
        kind = tensor.device_mesh.device_type
        return (
            torch.device(kind, torch.accelerator.current_device_index())
            if kind != "cpu"
            else (torch.device("cpu"))
        )
    return torch.get_default_device()


def _targets(checkpoint: Checkpoint, state: State, options: Options) -> Live:
    """Every live tensor that the checkpoint may fill, optimizer states made where they are missing."""
    live = Live()
    names = all_param_names(state)
    for key, value in state.items():
        for module in stages(value) or ():
            seen: dict[int, str] = {}
            for kind, pairs in (
                ("param", named_parameters(module)),
                ("buffer", named_buffers(module)),
            ):
                for name, tensor in pairs:
                    full = f"{key}.{name}"
                    first = seen.setdefault(id(tensor), full)
                    if first != full:
                        live.aliases[full] = first
                    elif options.wanted(full):
                        live.add(full, kind, tensor, steady=True)
        if isinstance(value, Optimizer):
            _optimizer_targets(checkpoint, live, key, value, names, options)
        elif isinstance(value, torch.Tensor) and options.wanted(key):
            live.add(key, "tensor", value, steady=True)
        elif not is_stateful(value) and stages(value) is None:
            for path, tensor in tensors_in(value):
                if options.wanted(f"{key}.{path}"):
                    live.add(f"{key}.{path}", "tensor", tensor, steady=True)
    return live


def tensors_in(value: Any, path: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    """Tensors of nested dicts and lists with their paths, as `format.extras` names them."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for k, v in value.items():
            yield from tensors_in(v, f"{path}.{k}" if path else str(k))
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            yield from tensors_in(v, f"{path}[{i}]")


def saved_states(checkpoint: Checkpoint, key: str) -> dict[str, list[str]]:
    """By parameter name, tied ones under each, the states saved of it under an optimizer's key."""
    found: dict[str, list[str]] = {}
    for name in checkpoint.names():
        state = checkpoint.manifest.tensors[checkpoint.index(name)].state
        if state not in _KINDS and name.startswith(key + "."):
            found.setdefault(name[len(key) + 1 : -len(state) - 1], []).append(state)
    return found


def _optimizer_targets(
    checkpoint: Checkpoint,
    live: Live,
    key: str,
    optimizer: Optimizer,
    all_names: dict[int, list[str]],
    options: Options,
) -> None:
    states = saved_states(checkpoint, key)
    names = {i: found[0] for i, found in all_names.items()}
    for group, pairs in zip(optimizer.param_groups, optimizer_params(key, optimizer, names)):
        for name, p in pairs:
            saved = states.get(name, [])
            if options.only is not None:
                saved = [s for s in saved if options.wanted(f"{key}.{name}.{s}")]
            else:
                _drop_other(optimizer, p, saved)
            for state in saved:
                full = f"{key}.{name}.{state}"
                have = optimizer.state[p].get(state)
                if not isinstance(have, torch.Tensor):
                    have = _new_state(checkpoint, full, p, group)
                    optimizer.state[p][state] = have
                add_state(live, f"{key}.{name}", state, p, have)
                add_ties(live, key, state, all_names.get(id(p), ()))


def _drop_other(optimizer: Optimizer, p: torch.Tensor, saved: list[str]) -> None:
    """State that the saved run did not have: a parameter before its first gradient has none."""
    state = optimizer.state.get(p)
    if not state:
        return
    for name in [n for n, v in state.items() if isinstance(v, torch.Tensor) and n not in saved]:
        del state[name]
    if not state:
        del optimizer.state[p]


def _new_state(
    checkpoint: Checkpoint, name: str, p: torch.Tensor, group: dict[str, Any]
) -> torch.Tensor:
    """Memory for a saved state: cut like its parameter if it has its shape, else on every rank."""
    info = checkpoint.info(name)
    dtype = getattr(torch, info.dtype)
    with torch.no_grad():
        if info.shape == tuple(p.shape):
            return torch.empty_like(p, dtype=dtype, requires_grad=False)
        if info.shape == ():
            on_device = group.get("capturable") or group.get("fused")
            device = place(p, name).local.device if on_device else torch.device("cpu")
            return torch.empty((), dtype=dtype, device=device)
        if isinstance(p, DTensor):
            local = torch.empty(info.shape, dtype=dtype, device=p.to_local().device)
            whole = [Replicate()] * p.device_mesh.ndim
            return DTensor.from_local(local, p.device_mesh, whole, run_check=False)
        return torch.empty(info.shape, dtype=dtype, device=p.device)


# -- comparing ------------------------------------------------------------------------------------


@dataclass
class _Problems:
    lines: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def compare(checkpoint: Checkpoint, live: Live, state: State, options: Options) -> _Problems:
    """What of this rank's live tensors does not match the checkpoint."""
    found = _Problems()
    for name, t in live.tensors.items():
        if not _known(checkpoint, name):
            found.missing.append(name)
            continue
        entry = checkpoint.manifest.tensors[checkpoint.index(name)]
        if entry.shape != t.placed.shape:
            found.lines.append(f"{name}: saved with shape {entry.shape}, here {t.placed.shape}")
        elif entry.dtype != t.placed.dtype and not options.cast:
            found.lines.append(
                f"{name}: saved as {entry.dtype}, here {t.placed.dtype} (cast=True converts)"
            )
    return found


class _Compared(msgspec.Struct, frozen=True, array_like=True):
    """A rank's findings on their way to rank 0."""

    lines: list[str]
    missing: list[str]
    claimed: bytes
    axes: list[tuple[int, int, str | None]]
    failed: bool


class _Together(msgspec.Struct, frozen=True, array_like=True):
    """All ranks' findings."""

    problems: list[str]
    resized: bool


def _judge_together(
    checkpoint: Checkpoint,
    live: Live,
    problems: _Problems,
    error: Exception | None,
    group: Group,
    options: Options,
) -> bool:
    """Raise StateMismatch on every rank if any has a problem; returns whether the mesh differs."""
    mine = _Compared(
        problems.lines,
        problems.missing if options.strict else [],
        _claimed(checkpoint, live),
        sorted({(a.stride, a.size, a.name) for t in live.tensors.values() for _, a in t.placed.cuts or ()},
               key=str),
        error is not None,
    )  # fmt: skip
    group.asked += 1
    answer = group.ask(
        f"compare/{group.asked}",
        msgspec.msgpack.encode(mine),
        lambda answers: _combine(checkpoint, live, answers, group.size, options),
    )
    together = msgspec.msgpack.decode(answer, type=_Together)
    if error is not None and len(together.problems) == 1:
        raise error
    if together.problems:
        lines = together.problems
        shown = lines[:50] + ([f"... and {len(lines) - 50} more"] if len(lines) > 50 else [])
        raise StateMismatch(
            f"step {checkpoint.step} does not fit the live state:\n  " + "\n  ".join(shown),
            tuple(lines),
            step=checkpoint.step,
            hint="strict=False ignores missing and unexpected names; only=[...] loads a subset",
        )
    return together.resized


def _claimed(checkpoint: Checkpoint, live: Live) -> bytes:
    """One bit per saved tensor: this rank has a place for it."""
    bits = np.zeros(len(checkpoint.manifest.tensors), bool)
    for name in [*live.tensors, *live.aliases]:
        if _known(checkpoint, name):
            bits[checkpoint.index(name)] = True
    return np.packbits(bits).tobytes()


def _combine(
    checkpoint: Checkpoint, live: Live, answers: list[bytes], size: int, options: Options
) -> bytes:
    found = [msgspec.msgpack.decode(a, type=_Compared) for a in answers]
    missing = list(dict.fromkeys(n for f in found for n in f.missing))
    lines = list(dict.fromkeys(x for f in found for x in f.lines))
    if options.strict and not any(f.failed for f in found):
        names = checkpoint.manifest.aliases.keys() | checkpoint.manifest.by_name.keys()
        lines += [f"missing in the checkpoint: {n}{_near(n, names)}" for n in missing]
        lines += _unexpected(checkpoint, found, live, options)
    axes = {a for f in found for a in f.axes}
    return msgspec.msgpack.encode(_Together(lines, _resized(checkpoint, axes, size)))


def _near(name: str, names: Iterable[str]) -> str:
    hint = near(name, names)
    return f" ({hint})" if hint else ""


def _unexpected(
    checkpoint: Checkpoint, found: list[_Compared], live: Live, options: Options
) -> list[str]:
    """Saved tensors for which no rank has a place, under the keys that are being loaded."""
    bits = np.zeros(-(-len(checkpoint.manifest.tensors) // 8), np.uint8)
    for f in found:
        bits |= np.frombuffer(f.claimed, np.uint8)
    claimed = np.unpackbits(bits)
    keys = live.keys
    out = []
    for i, t in enumerate(checkpoint.manifest.tensors):
        mine = t.name.split(".", 1)[0] in keys and options.wanted(t.name)
        if mine and not claimed[i] and t.name not in checkpoint.object_tensors:
            out.append(f"unexpected in the checkpoint: {t.name}{_near(t.name, live.tensors)}")
    return out


def _resized(checkpoint: Checkpoint, axes: set[tuple[int, int, str | None]], size: int) -> bool:
    """Whether the ranks are arranged in another way than when the step was saved."""
    try:
        mesh = common_mesh([Axis(*a) for a in axes], size)[0]
    except LayoutError:
        mesh = Mesh((("rank", size),))
    saved = checkpoint.manifest.layout
    if mesh.world != saved.world:
        return True
    return (
        [n for _, n in mesh.axes] != [n for _, n in saved.axes]
        and len(mesh.axes) > 0
        and (len(saved.axes) > 0)
    )


# -- extras ---------------------------------------------------------------------------------------


class _Extras:
    """The non-tensor part of a restore: planned before anything is written, put back at the end."""

    def __init__(
        self, checkpoint: Checkpoint, state: State, live: Live, group: Group, options: Options
    ) -> None:
        self.checkpoint = checkpoint
        self.state = state
        self.group = group
        self.options = options
        self.resized = False
        self.problems: list[str] = []
        self.wants: list[Want] = []
        self._loaded: dict[str, torch.Tensor] = {}
        live.keys = set(state)
        if options.only is None:
            self._find_missing()
            self._plan_tensors()

    def _find_missing(self) -> None:
        manifest = self.checkpoint.manifest
        for key, value in self.state.items():
            if isinstance(value, Optimizer) and key in manifest.extras:
                pairs = optimizer_params(key, value, param_names(self.state))
                match_groups(key, manifest.extras[key], pairs)
            plain = stages(value) is None and not isinstance(value, torch.Tensor)
            optional = isinstance(value, Optimizer) or getattr(value, "on_resize", None) == "fresh"
            if plain and key not in manifest.extras and key not in manifest.per_rank:
                if not optional and self.options.strict:
                    hint = near(key, [*manifest.extras, *manifest.per_rank])
                    self.problems.append(
                        f"missing in the checkpoint: {key}{f' ({hint})' if hint else ''}"
                    )

    def _plan_tensors(self) -> None:
        """Large tensors inside the state_dict of objects get memory of their own."""
        for name in self.checkpoint.object_tensors:
            key = name.split(".", 1)[0]
            if key in self.state and is_stateful(self.state[key]):
                info = self.checkpoint.info(name)
                tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
                self._loaded[name] = tensor
                box = place(tensor, name).box
                index = self.checkpoint.index(name)
                self.wants.append(Want(index, box, target_of(tensor, info.dtype)))

    def check_rules(self) -> None:
        """RuleError, on every rank alike, for an extra that has no rule for the new mesh."""
        if not self.resized or self.options.only is not None:
            return
        lost = [
            key
            for key in self.checkpoint.manifest.per_rank
            if key in self.state and self._rule(key) is None
        ]
        if lost:
            saved, here = self.checkpoint.manifest.layout, self.group.size
            raise RuleError(
                f"{', '.join(map(repr, lost))}: saved by each rank of [{saved}] for itself; "
                f"what becomes of it on {here} rank(s) arranged differently is not declared",
                step=self.checkpoint.step,
                hint=f"pass on_resize={{{lost[0]!r}: RULE}} with RULE one of {RULES}",
            )
        for key in self.checkpoint.manifest.per_rank:
            if key in self.state and self._rule(key) == "redistribute":
                if not callable(getattr(self.state[key], "redistribute", None)):
                    raise RuleError(
                        f"{key!r} has no method redistribute(states, rank, world_size)",
                        hint=f"write one, or choose another rule of {RULES}",
                    )

    def _rule(self, key: str) -> str | None:
        declared = self.options.on_resize.get(key) or getattr(self.state[key], "on_resize", None)
        return declared or self.checkpoint.manifest.per_rank[key]

    def put(self) -> None:
        """Put everything back, RNG last."""
        if self.options.only is not None:
            return
        manifest = self.checkpoint.manifest
        own = self._own()
        for key in sorted(self.state, key=lambda k: k == "rng"):
            value = self.state[key]
            for name, module in self._module_states(key, value):
                tree = own.get(name, manifest.extras.get(name))
                if tree is not None:
                    module.set_extra_state(self._decode(tree))
            if key in manifest.extras:
                self._put_one(key, value, manifest.extras[key])
            elif key in manifest.per_rank:
                self._put_own(key, value, own)

    def _module_states(self, key: str, value: Any) -> list[tuple[str, nn.Module]]:
        return [
            (f"{key}.{name}", part) for m in stages(value) or () for name, part in extra_states(m)
        ]

    def _own(self) -> dict[str, Any]:
        if not self.checkpoint.manifest.per_rank or self.resized:
            return {}
        return self.checkpoint.rank_extras(self.group.rank)

    def _put_own(self, key: str, value: Any, own: dict[str, Any]) -> None:
        if not self.resized:
            if key in own:
                self._put_one(key, value, own[key])
            return
        rule = self._rule(key)
        emit("extras.resized", key=key, rule=rule)
        if rule in ("rank0", "same"):
            self._put_one(key, value, self.checkpoint.rank_extras(0)[key])
        elif rule == "redistribute":
            ranks = sorted(self.checkpoint.manifest.file_of)
            states = [self._decode(self.checkpoint.rank_extras(r)[key]) for r in ranks]
            value.redistribute(states, self.group.rank, self.group.size)

    def _put_one(self, key: str, value: Any, tree: Any) -> None:
        if isinstance(value, Optimizer):
            put_groups(key, value, tree, param_names(self.state), self._decode)
        elif is_stateful(value):
            value.load_state_dict(self._decode(tree))
        else:
            self.state[key] = self._merge(value, tree)

    def _merge(self, live: Any, tree: Any) -> Any:
        """Saved values into the user's own containers; tensors there are loaded already."""
        found = self._decode(tree, live)
        if isinstance(live, dict) and isinstance(found, dict):
            live.clear()
            live.update(found)
            return live
        if isinstance(live, list) and isinstance(found, list):
            live[:] = found
            return live
        return found

    def _decode(self, tree: Any, live: Any = None) -> Any:
        known = dict(_with_paths(live))

        def on_other(tag: str, body: Any) -> Any:
            if tag == "$tensor":
                return outline_tensor(body)
            if tag == "$at":
                found = self._loaded.get(body)
                return known[body.split(".", 1)[1]] if found is None else found
            if tag == "$object":
                return extras.decode(body, on_other)
            raise FormatError(f"malformed extras: unknown tag {tag!r}")

        return extras.decode(tree, on_other)


def _with_paths(live: Any) -> Iterable[tuple[str, torch.Tensor]]:
    return tensors_in(live) if live is not None else ()


HOW = ("foreach", "fused", "capturable", "differentiable")
"""How an optimizer computes is this process's own: other hardware and layouts need other ways."""


def match_groups(
    key: str, tree: Any, pairs: list[list[tuple[str, torch.Tensor]]]
) -> list[int | None]:
    """For each live group the number of the saved group that its parameters were in.

    StateMismatch if they were in several with different hyper-parameters.
    """
    groups = tree["$optimizer"]["groups"]
    group_of = {p: i for i, g in enumerate(groups) for p in g["params"]}
    origin: list[int | None] = []
    for number, params in enumerate(pairs):
        found = sorted({group_of[name] for name, _ in params if name in group_of})
        hypers = {msgspec.json.encode(groups[i]["hyper"]): i for i in found}
        if len(hypers) > 1:
            raise StateMismatch(
                f"parameters of group {number} of {key!r} were in groups {found} "
                "with different hyper-parameters",
                hint="build the optimizer with the parameter groups that it was saved with",
            )
        empty = number if not params and number < len(groups) else None
        origin.append(next(iter(hypers.values()), empty))
    return origin


def put_groups(
    key: str,
    optimizer: Optimizer,
    tree: Any,
    names: dict[int, str],
    decode: Callable[[Any], Any],
) -> None:
    """Each group's hyper-parameters from the saved group that its parameters were in."""
    body = tree["$optimizer"]
    pairs = optimizer_params(key, optimizer, names)
    origin = match_groups(key, tree, pairs)
    for group, params, source in zip(optimizer.param_groups, pairs, origin):
        if source is not None:
            saved = decode(body["groups"][source]["hyper"])
            group.update({k: v for k, v in saved.items() if k not in HOW or k not in group})
        for name, p in params:
            for state, value in body["state"].get(name, {}).items():
                optimizer.state[p][state] = decode(value)
