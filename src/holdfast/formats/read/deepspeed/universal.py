"""DeepSpeed's universal format: `zero/<parameter>/<state>.pt`, one tensor each.

A file holds `{"param": tensor}`, or for ZeRO-3 the bare, flattened tensor.  Files of states are opened
when they are read; their dtype and shape are those of `fp32.pt`, and `step.pt` is a number.
`optimizer_state.pt` has the groups, the model files all state that is not trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from holdfast.base.errors import FormatError, NotFound
from holdfast.core.layout import whole
from holdfast.core.store import Store
from holdfast.formats.read.deepspeed import other_state
from holdfast.formats.read.deepspeed.tensors import tensor_name
from holdfast.formats.read.deepspeed.trees import Tree, read_tree
from holdfast.formats.read.deepspeed.zero import (
    ZERO_MASTER,
    FlatGroup,
    Shape,
    flat_states,
    param_groups,
)
from holdfast.formats.read.foreign import Foreign, StoredPart
from holdfast.formats.read.sections import FilePlace
from holdfast.formats.read.torchfile import TensorRef

STATE = "zero/optimizer_state.pt"
STEP, PARAM = "step", "param"
_OF_SOME = {ZERO_MASTER, STEP, "max_exp_avg_sq", "momentum_buffer", "grad_avg"}
"""States that a parameter may lack although others have them, by options of its group."""

_Files = Mapping[str, Mapping[str, str]]
"""The file of each state, by parameter, then state."""


def trained_parameters(
    store: Store, files: _Files, known: Mapping[str, Shape]
) -> tuple[list[Foreign], dict[str, dict[str, Any]]]:
    """Tensors of the trained parameters and their states, and states that are plain numbers.

    `known`: shapes in the model files; if empty, every parameter with files is trained.
    """
    tensors: list[Foreign] = []
    numbers: dict[str, dict[str, Any]] = {}
    _check_whole(files)
    for name in known or files:
        states = files.get(name, {})
        if ZERO_MASTER not in states:
            raise FormatError(f"the parameter {name!r} has no {ZERO_MASTER}.pt")
        ref = _tensor(store, states[ZERO_MASTER])
        flat = name in known and ref.shape == (prod(known[name]),)
        shape = known[name] if flat else ref.shape
        for state, path in states.items():
            if state == STEP:
                held, number = _step(store, name, path)
                tensors += held
                numbers |= {name: number} if number else {}
            else:
                place = ref.source if state == ZERO_MASTER else partial(_place, store, path, ref)
                parts = (StoredPart.of(whole(shape), path, place),) if prod(shape) else ()
                kind = "param" if state == ZERO_MASTER else state
                tensors.append(Foreign(tensor_name(name, state), ref.dtype, shape, kind, parts))
    return tensors, numbers


def _check_whole(files: _Files) -> None:
    """NotFound if a parameter lacks the file of a state that other parameters have."""
    kinds = {frozenset(states.keys() - _OF_SOME) for states in files.values()}
    for name, states in files.items():
        own = states.keys() - _OF_SOME
        whole = next((kind for kind in kinds if own < kind), None)
        if whole is not None and (own or STEP in states):
            raise _missing(name, min(whole - own), states)


def check_steps(files: _Files, held: Iterable[Foreign], numbers: Mapping[str, Any]) -> None:
    """NotFound if a parameter lacks the step that others with the same states have."""
    tensors = {tensor.name for tensor in held if tensor.state == STEP}
    kinds = {name: frozenset(states.keys() - _OF_SOME) for name, states in files.items()}
    lacking = {n for n in files if n not in numbers and tensor_name(n, STEP) not in tensors}
    stepped = {kinds[name] for name in files.keys() - lacking}
    for name in sorted(lacking):
        if kinds[name] and kinds[name] in stepped:
            raise _missing(name, STEP, files[name])


def _missing(name: str, state: str, states: Mapping[str, str]) -> NotFound:
    return NotFound(
        f"the parameter {name!r} has no {state}.pt, which others have",
        key=next(iter(states.values())),
        hint="was the checkpoint copied whole?",
    )


def _place(store: Store, path: str, like: TensorRef) -> FilePlace:
    """Return the place of a state; called when it is read."""
    ref = _tensor(store, path)
    if (ref.dtype, ref.shape) != (like.dtype, like.shape):
        raise FormatError(
            f"{ref.dtype} {ref.shape}, the parameter is {like.dtype} {like.shape}", key=path
        )
    return ref.path, ref.offset


def _tensor(store: Store, path: str) -> TensorRef:
    ref = read_tree(store, path, PARAM).get(PARAM, TensorRef)
    if not ref.contiguous:
        raise FormatError(f"a tensor of strides {ref.strides}", key=path)
    return ref


def _step(store: Store, name: str, path: str) -> tuple[list[Foreign], dict[str, Any]]:
    tree = read_tree(store, path, PARAM)
    value = tree.root.get(PARAM)
    if isinstance(value, TensorRef):
        return [value.foreign(tensor_name(name, STEP), STEP)], {}
    return [], {STEP: other_state.number(tree, STEP, value)}


def subgroup_steps(
    tree: Tree, said: Sequence[dict[str, Shape]], files: _Files
) -> tuple[list[Foreign], dict[str, dict[str, Any]]]:
    """Steps of ZeRO-3, which `optimizer_state.pt` has by sub-group."""
    tensors: list[Foreign] = []
    numbers: dict[str, dict[str, Any]] = {}
    for i, group in enumerate(said if "optimizer_state_dict" in tree.root else ()):
        step = flat_states(tree, i).get(STEP)
        for name in group if step is not None else ():
            if STEP in files[name] or len(files[name]) == 1:
                continue
            if isinstance(step, TensorRef):
                tensors.append(step.foreign(tensor_name(name, STEP), STEP))
            else:
                numbers[name] = {STEP: other_state.number(tree, STEP, step)}
    return tensors, numbers


def universal_optim_extra(
    tree: Tree, said: Sequence[dict[str, Shape]], numbers: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The extra `optim`: hyper-parameters by group, `said` being the parameters of each."""
    hypers = param_groups(tree)
    owners = {i: g for g, group in enumerate(hypers) for i in group.get("params") or ()}
    if not owners and len(said) == len(hypers):
        owners = {i: i for i in range(len(said))}
    flats = [FlatGroup(group, {}, {}, {}, {}, owners.get(i, -1)) for i, group in enumerate(said)]
    found = other_state.optim_extra([(tree, flats)])
    found["$optimizer"]["state"] |= numbers
    return found
