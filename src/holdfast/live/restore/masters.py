"""Places for the states of masters that serve several parameters, as DeepSpeed's do.

The checkpoint has states by parameter; such an optimizer has them by master, a flat tensor of many
parameters.  So a state is one tensor with the layout of the master, and each parameter's part of it is a
view.  A master has one number (`step`) for all its parameters: the saved numbers must agree, and are read
before the tensors.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.reading import read_alone
from holdfast.core.checkpoint.rows import Want
from holdfast.core.format import extras
from holdfast.core.layout import Box
from holdfast.live.restore.expected import Fitting
from holdfast.live.restore.mismatches import Mismatch, differs
from holdfast.live.restore.optimizer_states import saved_states
from holdfast.live.restore.param_groups import optimizer_body
from holdfast.live.restore.targets import RestoreOptions, target_of
from holdfast.live.sources import Master
from holdfast.live.state.encoding import outline_tensor
from holdfast.live.state.named import Prepared
from holdfast.live.state.optimizers import LiveOptimizer, add_state, add_ties
from holdfast.live.state.placed import torch_dtype, whole_shape

STATE_TYPES = (int, float, str, type(None), torch.Tensor)
"""Types of a master's states beside flat tensors; tensors among them are 0-dim."""


@dataclass
class MasterChange:
    """The change that a restore makes to the inner optimizer's state of one master."""

    framework: str
    """The framework's name, for messages."""
    master: Master
    inner: Optimizer
    """The master's optimizer."""
    key: str
    number: int
    """Number of the parameter group."""
    group: dict[str, Any]
    params: list[tuple[str, torch.Tensor, Master]]
    """The parameters by name, each with its own place in the master's tensor."""
    made: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, list[str]] = field(default_factory=dict)
    """By state, names of saved tensors that must all be one number."""
    drop: list[str] = field(default_factory=list)
    problems: list[Mismatch] = field(default_factory=list)

    @property
    def have(self) -> dict[str, Any]:
        """The states that the optimizer has of the master now."""
        found: dict[str, Any] = self.inner.state.get(self.master.tensor, {})
        return found

    def apply(self) -> None:
        states = self.inner.state
        tensor = self.master.tensor
        states[tensor].update(self.made)
        for name in self.drop:
            del states[tensor][name]
        if not states[tensor]:
            del states[tensor]

    def set_number(self, state: str, value: Any) -> None:
        """Set a number as the inner optimizer keeps it: in Python or in a tensor."""
        is_torchs = type(self.inner).__module__.startswith("torch.")
        tensor = torch.as_tensor(value) if not isinstance(value, (str, type(None))) else None
        if tensor is None or isinstance(self.have.get(state), (int, float)):
            self.made[state] = value if tensor is None else type(self.have[state])(tensor.item())
        elif self.master.plain_numbers:
            self.made[state] = int(tensor.item()) if state == "step" else tensor.item()
        elif isinstance(value, torch.Tensor) or (state == "step" and is_torchs):
            on_device = self.group.get("capturable") or self.group.get("fused")
            device = self.master.tensor.device if on_device else torch.device("cpu")
            dtype = torch.float32 if tensor.dtype == torch.int64 else tensor.dtype
            self.made[state] = tensor.to(device, dtype)
        else:
            self.made[state] = value


def master_changes(
    checkpoint: Checkpoint, live: Prepared, options: RestoreOptions, optimizer: LiveOptimizer
) -> list[MasterChange]:
    """Add places for the states of such an optimizer; return the changes that will make them."""
    changes = []
    states = saved_states(checkpoint, optimizer.key)
    fitting = Fitting.of(checkpoint, optimizer, options)
    for change in _masters(optimizer):
        if not _fits(change, fitting, states, options) and not options.strict:
            continue
        _plan(checkpoint, live, change, states, optimizer.names, options)
        changes.append(change)
    if fitting is not None:
        live.misfits += fitting.misfits()
    return changes


def _fits(
    change: MasterChange,
    fitting: Fitting | None,
    states: dict[str, list[str]],
    options: RestoreOptions,
) -> bool:
    """True if the inner optimizer can go on with the saved states of a master's parameters."""
    if fitting is None:
        return True
    name, tensor = change.params[0][0], change.master.tensor
    saved = [s for s in states.get(name, ()) if options.wanted(f"{change.key}.{name}.{s}")]
    return fitting.fits(change.number, name, change.inner, tensor, saved, change.have)


def _masters(optimizer: LiveOptimizer) -> Iterator[MasterChange]:
    """Yield each master whose optimizer this rank has, with the parameters in it."""
    source = optimizer.source
    for number, ((group, _), pairs) in enumerate(zip(optimizer.groups, optimizer.pairs)):
        found: dict[int, MasterChange] = {}
        for name, p in pairs:
            master = source.master(p)
            if master is None or master.optimizer is None:
                continue
            change = MasterChange(
                source.framework, master, master.optimizer, optimizer.key, number, group, []
            )
            found.setdefault(id(master.tensor), change).params.append((name, p, master))
        yield from found.values()


def _plan(
    checkpoint: Checkpoint,
    live: Prepared,
    change: MasterChange,
    states: dict[str, list[str]],
    all_names: dict[int, list[str]],
    options: RestoreOptions,
) -> None:
    """Find a place for each saved state of a master's parameters."""
    key, params = change.key, change.params
    wanted = {
        name: {s for s in states.get(name, ()) if options.wanted(f"{key}.{name}.{s}")}
        for name, *_ in params
    }
    first = params[0][0]
    for name, *_ in params:
        if wanted[name] != wanted[first]:
            why = (
                f"states {sorted(wanted[name])} beside {sorted(wanted[first])} of {first}, but "
                f"{change.framework} keeps one flat state for both"
            )
            change.problems.append(differs(f"{key}.{name}", why))
            return
    whole_shapes = [whole_shape(master) for *_, master in params]
    for state in sorted(wanted[first]):
        names = [f"{key}.{name}.{state}" for name, *_ in params]
        shapes = [checkpoint.info(name).shape for name in names]
        some = any(shape != () for shape in shapes)
        if not some and (state == "step" or any(map(len, whole_shapes))):
            change.numbers[state] = names
            live.owned |= set(names)
            for _, p, _ in params:
                live.owned |= {f"{key}.{n}.{state}" for n in all_names.get(id(p), ())}
        elif shapes == whole_shapes:
            _place(checkpoint, live, change, state, all_names)
        else:
            why = f"saved with shape {shapes[0]}; a flat state has the parameter's"
            change.problems.append(differs(names[0], why))
    if options.only is None:
        _plain(checkpoint, change)
        kept = {*wanted[first], *change.made}
        change.drop = [s for s in change.have if s not in kept]


def _place(
    checkpoint: Checkpoint,
    live: Prepared,
    change: MasterChange,
    state: str,
    all_names: dict[int, list[str]],
) -> None:
    """Add a view for each parameter of a flat state, which is made if the optimizer lacks it."""
    key, old = change.key, change.have.get(state)
    if not isinstance(old, torch.Tensor) or old.shape != change.master.tensor.shape:
        dtype = torch_dtype(checkpoint.info(f"{key}.{change.params[0][0]}.{state}").dtype)
        old = _zeros(change.master.tensor, dtype)
        change.made[state] = old
    for name, p, master in change.params:
        add_state(live, f"{key}.{name}", state, p, old, master)
        add_ties(live, key, state, all_names.get(id(p), ()))


def _zeros(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of `like`'s shape and device.

    On the host the kernel's zero pages are taken as they come: the threads that read into them touch them
    first, side by side, where `torch.zeros` would have one thread write all of them beforehand.
    """
    size = like.numel() * dtype.itemsize
    if like.device.type != "cpu" or not size:
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(like.shape)


def _plain(checkpoint: Checkpoint, change: MasterChange) -> None:
    """Set states that are no tensors; the values of a master's parameters must agree."""
    saved = optimizer_body(checkpoint, change.key).get("state", {})
    for state, value in saved.get(change.params[0][0], {}).items():
        others = [saved.get(name, {}).get(state, value) for name, *_ in change.params]
        if any(other != value for other in others):
            change.problems.append(_differ(change, state, others))
            continue
        number = _number(value)
        if isinstance(number, STATE_TYPES):
            change.set_number(state, number)
        else:
            why = (
                f"neither a tensor nor a number, and {change.framework} keeps one flat state for all "
                "parameters of a group"
            )
            change.problems.append(differs(f"{change.key}.{change.params[0][0]}.{state}", why))


def _number(tree: Any) -> Any:
    """A saved state that is no tensor of the checkpoint, as a number; other trees stay as they are.

    The count of steps that DeepSpeed's own optimizers keep comes from its files as a 0-dim tensor among the
    extras.
    """

    def on_other(tag: str, body: Any) -> Any:
        return outline_tensor(body) if tag == "$tensor" else {tag: body}

    value = extras.decode(tree, on_other)
    if isinstance(value, np.generic):
        return value.item()
    return tree if isinstance(value, torch.Tensor) and value.ndim else value


def read_numbers(checkpoint: Checkpoint, changes: list[MasterChange]) -> None:
    """Read every number that masters need; numbers that disagree become problems."""
    index = {
        name: checkpoint.index(name)
        for change in changes
        for names in change.numbers.values()
        for name in names
    }
    values: dict[int, torch.Tensor] = {}
    wants = []
    for name, number in index.items():
        if number not in values:
            dtype = checkpoint.info(name).dtype
            values[number] = torch.empty((), dtype=torch_dtype(dtype))
            wants.append(Want(number, Box((), ()), target_of(values[number], dtype, name)))
    read_alone(checkpoint.images, wants)
    for change in changes:
        for state, names in change.numbers.items():
            found = [values[index[name]] for name in names]
            if any(not torch.equal(value, found[0]) for value in found):
                change.problems.append(_differ(change, state, [v.item() for v in found]))
            else:
                change.set_number(state, found[0])


def _differ(change: MasterChange, state: str, values: list[Any]) -> Mismatch:
    number = next(i for i, value in enumerate(values) if value != values[0])
    first, other = change.params[0][0], change.params[number][0]
    which = f"{change.key}.{other}.{state} is {values[number]}, that of {first} {values[0]}"
    why = f"{change.framework} keeps one for both (put them into parameter groups of their own)"
    return differs(which, why)
