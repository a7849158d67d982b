"""States of an optimizer's parameters: memory for those that it lacks, and values that are no tensors.

A state of another shape than its sharded parameter: torch's own optimizers have none but numbers.  Others
keep a flattened copy of a parameter (Prodigy), or vectors of all parameters together (LBFGS).  Beside a
DTensor such a state is a DTensor.  Where the ranks of the parameter's mesh lie as when it was saved, it is
cut as it was: an optimizer that adds up a rank's elements would compute another sum from a whole one.  On
other layouts every rank gets all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from holdfast.base.errors import FormatError, need
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.extras import MADE_OF
from holdfast.core.format.manifest import MODEL_STATES, owner_of
from holdfast.core.layout import Axis
from holdfast.live.restore.expected import Fitting
from holdfast.live.restore.nested import with_live
from holdfast.live.restore.param_groups import fill_in_place, optimizer_body, plain_states
from holdfast.live.restore.targets import RestoreOptions, counts_stay, empty_in
from holdfast.live.sources import Master
from holdfast.live.state.gradient_copies import is_torchs
from holdfast.live.state.named import Prepared
from holdfast.live.state.optimizer_wrappers import ELEMENTWISE, params_of, stepping
from holdfast.live.state.optimizers import (
    LiveOptimizer,
    add_state,
    add_ties,
    holder_of,
    tensors_in,
)
from holdfast.live.state.placed import (
    cut_by,
    is_apart,
    local_of,
    mesh_axes,
    place,
    shard_order,
    torch_dtype,
)

tree_map_only, tree_map_with_path = need(
    "torch", "torch.utils._pytree", "tree_map_only", "tree_map_with_path"
)


def saved_states(checkpoint: Checkpoint, key: str) -> dict[str, list[str]]:
    """States saved under an optimizer's key, by name of the parameter, each name if it is tied."""
    found: dict[str, dict[str, None]] = {}
    for name in checkpoint.names():
        state = checkpoint.manifest.tensors[checkpoint.index(name)].state
        if state not in MODEL_STATES and name.startswith(key + "."):
            states = found.setdefault(owner_of(name, state)[len(key) + 1 :], {})
            states[_outer(checkpoint, name, state) if "." in state else state] = None
    return {name: list(states) for name, states in found.items()}


def is_saved_apart(checkpoint: Checkpoint, name: str) -> bool:
    """True if a tensor was saved as the several tensors that it is made of."""
    return name + MADE_OF in checkpoint.manifest.extras


def _outer(checkpoint: Checkpoint, name: str, state: str) -> str:
    """The state that the tensor `name` is a part of; `state` itself if that is whole."""
    base, words = name.removesuffix(state), state.split(".")
    begins = (".".join(words[:n]) for n in range(1, len(words)))
    return next((s for s in begins if is_saved_apart(checkpoint, base + s)), state)


def _dtypes(checkpoint: Checkpoint) -> dict[str, str]:
    """Dtypes of the saved parameters, by name, both without and with the module's key in front."""
    params = [t for t in checkpoint.manifest.tensors if t.state == "param"]
    inside = {t.name.partition(".")[2]: t.dtype for t in params}
    return inside | {t.name: t.dtype for t in params}


@dataclass(frozen=True)
class StateChange:
    """A change to an optimizer's state of one parameter, made once the checkpoint is known to fit."""

    optimizer: Optimizer
    param: torch.Tensor
    made: dict[str, torch.Tensor]
    drop: list[str]
    """States that the saved run lacked, as a parameter does before its first gradient."""

    def apply(self) -> None:
        state = self.optimizer.state[self.param]
        state.update(self.made)
        for name in self.drop:
            del state[name]
        if not state:
            del self.optimizer.state[self.param]


class StatePlaces:
    """Places for the saved states of one optimizer's parameters, which are added to `live`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        live: Prepared,
        options: RestoreOptions,
        optimizer: LiveOptimizer,
    ) -> None:
        self.checkpoint = checkpoint
        self.live = live
        self.options = options
        self.optimizer = optimizer
        self.key = key = optimizer.key
        self._saved = saved_states(checkpoint, key)
        self._plain = plain_states(checkpoint, key)
        self._was = _dtypes(checkpoint) if options.cast else {}
        body = optimizer_body(checkpoint, key)
        self._orders: dict[str, dict[str, list[int]]] = body.get("order", {})
        self._told = {name for group in body.get("groups", ()) for name in group["params"]}
        """Parameters that the checkpoint lists in the groups, with states or without."""

    def find(self) -> list[StateChange]:
        """Add all places; return the changes that will make them.  The optimizer stays as it is."""
        optimizer, source, fitting = self.optimizer, self.optimizer.source, None
        if source.saves_rest:
            fitting = Fitting.of(self.checkpoint, optimizer, self.options)
        changes = []
        for number, ((group, _), some) in enumerate(zip(optimizer.groups, optimizer.pairs)):
            for name, p in some:
                master = source.master(p)
                inner, tensor = holder_of(optimizer.value, p, master)
                if inner is None:
                    continue  # other ranks have it
                have, saved = inner.state.get(tensor, {}), self._wanted(name)
                fits = fitting is None or fitting.fits(number, name, inner, p, saved, have)
                if not fits and not self.options.strict:
                    self.live.unfit.add(id(p))
                    continue
                made = {
                    state: self._memory(name, state, inner, tensor, group, master)
                    for state in saved
                    if self._is_lacking(name, state, have.get(state))
                }
                drop = self._dropped(name, have, saved, is_torchs=source.saves_rest)
                changes.append(StateChange(inner, tensor, made, drop))
                self._add(name, p, master, {s: made[s] if s in made else have[s] for s in saved})
        if fitting is not None:
            self.live.misfits += fitting.misfits()
        return changes

    def _wanted(self, name: str) -> list[str]:
        wanted, start = self.options.wanted, f"{self.key}.{name}"
        return [state for state in self._saved.get(name, []) if wanted(f"{start}.{state}")]

    def _is_lacking(self, name: str, state: str, have: Any) -> bool:
        """True if the optimizer lacks the state, or has it in one memory where it was saved as several
        tensors, or the other way round.  UsageError for a live tensor of an unknown kind."""
        if not isinstance(have, torch.Tensor):
            return True
        full = f"{self.key}.{name}.{state}"
        if is_apart(have) == is_saved_apart(self.checkpoint, full):
            return False
        if is_apart(have):
            from holdfast.live.restore.composite_states import description_of

            if description_of(have, full) is None:
                place(have, full)
        return True

    def _memory(
        self,
        name: str,
        state: str,
        optimizer: Optimizer,
        p: torch.Tensor,
        group: dict[str, Any],
        master: Master | None,
    ) -> torch.Tensor:
        """Memory for a saved state that the parameter lacks."""
        full = f"{self.key}.{name}.{state}"
        if is_saved_apart(self.checkpoint, full):
            from holdfast.live.restore.composite_states import make_state

            said = self.checkpoint.manifest.extras[full + MADE_OF]
            return make_state(full, said, optimizer, p, self.live.saved)
        dtype = self._dtype(name, state, p, master)
        order = self._orders.get(name, {}).get(state)
        return _new_state(self.checkpoint, full, p, group, master, dtype, order)

    def _dtype(self, name: str, state: str, p: torch.Tensor, master: Master | None) -> torch.dtype:
        """The dtype in which a state lives: the saved one, but for a state that is saved in another, and
        for one that was saved in the saved parameter's: it gets the parameter's."""
        if master is not None and state in master.stored:
            return master.tensor.dtype
        info = self.checkpoint.info(f"{self.key}.{name}.{state}")
        if info.dtype == self._was.get(name) and info.shape == tuple(p.shape) != ():
            return p.dtype
        return torch_dtype(info.dtype)

    def _dropped(
        self, name: str, have: dict[str, Any], saved: list[str], *, is_torchs: bool
    ) -> list[str]:
        """Live states that the saved run lacked; none, without `strict`, for a parameter that the
        checkpoint does not list."""
        is_told = self.options.strict or name in self._told
        if self.options.only is not None or not is_told:
            return []
        there = {*saved, *(self._plain or {}).get(name, ())}
        every = is_torchs and self._plain is not None
        return [
            state
            for state, value in have.items()
            if state not in there and (every or isinstance(value, torch.Tensor))
        ]

    def _add(
        self, name: str, p: torch.Tensor, master: Master | None, states: dict[str, torch.Tensor]
    ) -> None:
        for state, value in states.items():
            if master is not None and state in master.stored:
                self.live.recast.add(f"{self.key}.{name}.{state}")
            add_state(self.live, f"{self.key}.{name}", state, p, value, master)
            add_ties(self.live, self.key, state, self.optimizer.names.get(id(p), ()))


def _new_state(
    checkpoint: Checkpoint,
    name: str,
    p: torch.Tensor,
    group: dict[str, Any],
    master: Master | None,
    dtype: torch.dtype,
    order: list[int] | None,
) -> torch.Tensor:
    """Memory for a saved state: cut like its parameter if it has its shape, else as `empty_beside` says.
    Numbers are on the parameter's device, as torch's optimizers load them, but for counts that stay.

    Its dims lie in that `order`.
    """
    info = checkpoint.info(name)
    is_count = name.endswith(".step")
    with torch.no_grad():
        if info.shape == () and (is_count or p.shape != ()):
            stays = is_count and counts_stay(group)
            return torch.empty((), dtype=dtype, device="cpu" if stays else p.device)
        if order is not None and master is None and not isinstance(p, DTensor):
            return empty_in(order, info.shape, dtype, p.device, name)
        if info.shape == tuple(p.shape) or (master is not None and info.shape):
            return torch.empty_like(p, dtype=dtype, requires_grad=False)
        if isinstance(p, DTensor):
            return empty_beside(checkpoint, name, p, dtype)
        return torch.empty(info.shape, dtype=dtype, device=p.device)


def memory_beside(
    checkpoint: Checkpoint, name: str, p: DTensor, plain: torch.Tensor
) -> torch.Tensor:
    """Memory for a tensor in a list that is a state of a sharded parameter; `plain` if it is whole."""
    if tuple(p.shape) == tuple(plain.shape):  # cut as it is
        return torch.empty_like(p, dtype=plain.dtype, requires_grad=False)
    key, _, rest = name.partition(".")
    known: dict[str, list[str]] | None = optimizer_body(checkpoint, key).get("plain")
    if known is None or not plain.ndim:
        return plain
    if any(rest.startswith(f"{n}.{state}.") for n, some in known.items() for state in some):
        return plain
    return empty_beside(checkpoint, name, p, plain.dtype)


def checked_common(name: str, common: Any) -> dict[str, Any]:
    """Return `common` if it has the form that `add_common` saves; else FormatError."""
    if not (isinstance(common, dict) and {"state", "on_device"} <= set(common)):
        raise FormatError(f"malformed extras: {name!r} is no state of an optimizer")
    return common


def put_common_state(optimizer: Optimizer, saved: dict[str, Any] | None) -> None:
    """Put back state that belongs to no parameter.  State that was not saved is deleted.  Tensors are
    filled in place, for a captured graph may hold them."""
    state: dict[Any, Any] = stepping(optimizer).state
    found, on_device = ({}, []) if saved is None else (saved["state"], saved["on_device"])
    for key in [k for k in state if not isinstance(k, torch.Tensor) and k not in found]:
        del state[key]
    params = params_of(optimizer)
    device = local_of(params[0]).device if params else torch.device("cpu")
    for key, value in found.items():
        if key in on_device:
            value = tree_map_only(torch.Tensor, lambda t: t.to(device), value)
        if not fill_in_place(state.get(key), value, {}):
            state[key] = value


def put_in_order(value: Any, state: str, lies: dict[str, list[int]]) -> None:
    """Give tensors inside a state their saved order of dims, in place.  `lies`: the orders, by path."""
    for path, tensor in tensors_in(value, state) if lies else ():
        if path in lies:
            new = empty_in(lies[path], tuple(tensor.shape), tensor.dtype, tensor.device, path)
            tensor.data = new.copy_(tensor)


def on_device_of(p: torch.Tensor, value: Any, group: dict[str, Any]) -> Any:
    """Move tensors inside a state to its parameter's device, as torch's optimizers do at a load: all but
    counts named "step", where these stay on the CPU."""
    stays = counts_stay(group)

    def moved(path: tuple[Any, ...], one: Any) -> Any:
        is_count = bool(path) and getattr(path[-1], "key", None) == "step" and stays
        return one if is_count or not isinstance(one, torch.Tensor) else one.to(p.device)

    return tree_map_with_path(moved, value)


def put_plain_states(
    optimizer: LiveOptimizer,
    tree: Any,
    decode: Callable[[Any], Any],
    unfit: Collection[int] = (),
) -> None:
    """Put back states of parameters that are no tensors.  `unfit`: ids of parameters to leave out."""
    for (group, _), params in zip(optimizer.groups, optimizer.pairs):
        for name, p in params:
            if id(p) in unfit:
                continue
            inner, tensor = holder_of(optimizer.value, p, optimizer.source.master(p))
            if inner is None:
                continue
            body = tree["$optimizer"]
            plain = body["plain"].get(name, ()) if "plain" in body else None
            lies = body.get("order", {}).get(name, {})
            for state, value in body["state"].get(name, {}).items():
                where = f"{optimizer.key}.{name}.{state}"
                ask = partial(inner.state.get(tensor, {}).get, state)
                found = decode(with_live(where, ask, value, decode))
                if not isinstance(p, DTensor):
                    put_in_order(found, state, lies)
                if isinstance(p, DTensor) and plain is not None and state not in plain:
                    found = on_mesh_of(p, found)
                if tensor.device.type != "cpu":
                    found = on_device_of(tensor, found, group)
                if type(found) in (int, float) and state in _NUMBERS and _takes_tensors(inner):
                    device = torch.device("cpu") if counts_stay(group) else tensor.device
                    is_double = torch.get_default_dtype() == torch.float64  # as torch's own load
                    dtype = torch.float64 if is_double else torch.float32
                    found = torch.tensor(float(found), dtype=dtype, device=device)
                inner.state[tensor][state] = found


_NUMBERS = ("step", "mu_product", "eta", "mu")
"""States that were plain numbers up to torch 1.11, and in other libraries' copies of these optimizers."""


def _takes_tensors(optimizer: Optimizer) -> bool:
    """True for an optimizer of torch's that reads these states as tensors; SparseAdam does not."""
    return is_torchs(optimizer) and type(stepping(optimizer)).__name__ in ELEMENTWISE


# -- states beside a sharded parameter, of another shape ----------------------------------------


def empty_beside(checkpoint: Checkpoint, name: str, p: DTensor, dtype: torch.dtype) -> DTensor:
    """Memory for a saved state, on the mesh of its parameter."""
    mesh, shape = p.device_mesh, checkpoint.info(name).shape
    placements = _as_saved(checkpoint, name, p)
    box, _ = cut_by(mesh, tuple(mesh.get_coordinate()), tuple(placements), shape)
    local = torch.empty(box.shape, dtype=dtype, device=p._local_tensor.device)
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _as_saved(checkpoint: Checkpoint, name: str, p: DTensor) -> list[Placement]:
    """The placements on a parameter's mesh that cut a state as it was saved; else all Replicate."""
    mesh, layout = p.device_mesh, checkpoint.manifest.layout
    whole: list[Placement] = [Replicate()] * mesh.ndim
    sharding, axes = checkpoint.info(name).sharding, mesh_axes(mesh)
    if axes is None or sharding.held is not None:
        return whole
    found, order = [*whole], []
    for cut in sharding.cuts:
        size = prod(layout.sizes[one] for one in cut.axes)
        axis = Axis(layout.strides[cut.axes[-1]], size)
        if axis not in axes:
            return whole
        order.append((axes.index(axis), cut.dim))
        found[order[-1][0]] = Shard(cut.dim)
    return found if shard_order(found, tuple(mesh.shape)) == order else whole


def on_mesh_of(p: DTensor, value: Any) -> Any:
    """A value whose plain tensors with dims are replicated over a parameter's mesh."""
    mesh = p.device_mesh
    everywhere = [Replicate()] * mesh.ndim

    def moved(t: torch.Tensor) -> torch.Tensor:
        if isinstance(t, DTensor) or not t.ndim:
            return t
        return DTensor.from_local(t.to(p._local_tensor.device), mesh, everywhere, run_check=False)

    return tree_map_only(torch.Tensor, moved, value)
