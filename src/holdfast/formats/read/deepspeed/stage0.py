"""Optimizers without ZeRO: all their state is in the model file, by number.

Names follow from the model if only one assignment fits (`formats.read.byindex`); parameters of a shape
that no state has count as frozen.  States without a name keep their number: `optim.state.3.exp_avg`.
DeepSpeed's 16-bit optimizers flatten whole groups; the model's own tensors, which are views of the flat
arrays, then give the places of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from holdfast.base.errors import FormatError
from holdfast.core.format.dtypes import DTYPES
from holdfast.formats.read.byindex import proved_names, stated_names
from holdfast.formats.read.deepspeed import other_state
from holdfast.formats.read.deepspeed.tensors import ParamLayout, trained
from holdfast.formats.read.deepspeed.trees import Tree
from holdfast.formats.read.deepspeed.zero import (
    ZERO_MASTER,
    Shape,
    flat_cuts,
    is_expert,
    sorted_group,
)
from holdfast.formats.read.foreign import Foreign
from holdfast.formats.read.torchfile import TensorRef

_Held = tuple[list[Foreign], dict[str, Any]]


def optimizer(model: Tree, params: Mapping[str, TensorRef], expert_rank: int = 0) -> _Held:
    """Tensors and extras of the optimizer in a file; `params` are the model's own, in order.

    For expert-parallel ranks other than the first, only the states of experts.
    """
    tree = model.below("optimizer")
    if "optimizer_state_dict" not in tree.root:
        return _by_number(tree, params, {}, expert_rank)
    inner = tree.below("optimizer_state_dict")
    if "fp32_groups_flat" in tree.root:
        if expert_rank:
            raise FormatError("flattened experts of an optimizer without ZeRO", key=tree.path)
        tensors, extras = _flattened(tree, params)
    else:
        masters = _masters(tree, [g["params"] for g in _groups(inner)])
        tensors, extras = _by_number(inner, params, masters, expert_rank)
    more, said = other_state.of_optimizer(tree)
    return tensors + more, {**extras, **said}


def _groups(tree: Tree) -> list[dict[str, Any]]:
    groups = tree.get("param_groups", list)
    if not all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups):
        raise FormatError("malformed param_groups", key=tree.path)
    return groups


def _masters(tree: Tree, numbers: Sequence[list[int]]) -> dict[int, TensorRef]:
    """The masters by number, if they are kept per parameter."""
    groups = tree.get("fp32_groups", list)
    if [len(g) for g in groups] != [len(n) for n in numbers]:
        raise FormatError("the master copies are not those of the groups", key=tree.path)
    return {i: ref for g, n in zip(groups, numbers) for ref, i in zip(g, n)}


def _by_number(
    tree: Tree, params: Mapping[str, TensorRef], masters: dict[int, TensorRef], expert_rank: int
) -> _Held:
    """Tensors and extras of torch's own form; `masters`: by number, if there are any."""
    groups, states = _groups(tree), tree.get("state", dict)
    shapes = {i: _shape(state) for i, state in states.items()}
    shapes |= {i: ref.shape for i, ref in masters.items()}
    names = _names(groups, shapes, {name: ref.shape for name, ref in params.items()}, expert_rank)
    tensors = [
        ref.foreign(f"model.{names[i]}", "param")
        if names[i] in params
        else ref.foreign(f"optim.{names[i]}.{ZERO_MASTER}", ZERO_MASTER)
        for i, ref in masters.items()
        if i in names
    ]
    numbers: dict[str, dict[str, Any]] = {}
    kept = [(names[i], str(k), v) for i in states if i in names for k, v in states[i].items()]
    for name, key, value in kept:
        if isinstance(value, TensorRef):
            tensors.append(value.foreign(f"optim.{name}.{key}", key))
        else:
            numbers.setdefault(name, {})[key] = other_state.number(tree, key, value)
    found = [
        {
            "params": [names[i] for i in g["params"] if i in names],
            "hyper": other_state.encode_hyper(tree, g),
        }
        for g in groups
    ]
    return tensors, {"optim": {"$optimizer": {"groups": found, "state": numbers}}}


def join(optim: dict[str, Any], more: dict[str, Any]) -> None:
    """Add the extra of another expert-parallel rank."""
    body, other = optim["$optimizer"], more["$optimizer"]
    for group, others in zip(body["groups"], other["groups"]):
        group["params"] += others["params"]
    body["state"] |= other["state"]


def _shape(state: dict[Any, Any]) -> Shape | None:
    """The shape that a parameter's states have."""
    shapes = [v.shape for v in state.values() if isinstance(v, TensorRef) and v.shape]
    return max(shapes, key=prod, default=None)


def _names(
    groups: list[dict[str, Any]],
    shapes: Mapping[int, Shape | None],
    params: Mapping[str, Shape],
    expert_rank: int,
) -> dict[int, str]:
    """A name for every number: the parameter's if known, else `state.<number>`.

    DeepSpeed keeps experts in groups of their own; other groups are the first expert-parallel rank's.
    """
    found: dict[int, str] = {}
    for moe in (False, True):
        some = [group for group in groups if bool(group.get("moe")) is moe]
        if expert_rank and not moe:
            continue
        at = f"state.rank{expert_rank}" if expert_rank else "state"
        found |= {i: f"{at}.{i}" for group in some for i in group["params"]}
        mine = {name: s for name, s in params.items() if is_expert(name) is moe}
        found |= _known(some, shapes, mine)
    return found


def _known(
    groups: list[dict[str, Any]], shapes: Mapping[int, Shape | None], params: Mapping[str, Shape]
) -> dict[int, str]:
    """Names of the numbers whose parameter is stated, or follows from shapes."""
    said = stated_names(groups)
    if said is not None:
        return {i: name for i, name in said.items() if name in params}
    numbers = [group["params"] for group in groups]
    mine = {i for group in numbers for i in group}
    known = {i: shape for i, shape in shapes.items() if shape is not None and i in mine}
    seen = set(known.values())
    trained = [(name, shape) for name, shape in params.items() if shape in seen]
    return proved_names(numbers, known, trained) or {}


def _flattened(tree: Tree, params: Mapping[str, TensorRef]) -> _Held:
    """Tensors and extras of flattened groups; the model's tensors lie alike in 16-bit twins."""
    chains = _chains(params)
    tensors: list[Foreign] = []
    flats = []
    for g, master in enumerate(tree.get("fp32_groups_flat", list)):
        if not isinstance(master, TensorRef) or len(master.shape) != 1:
            raise FormatError(f"the master copy of group {g} is no flat array", key=tree.path)
        size = master.shape[0]
        fitting = [c for c in chains if sum(map(prod, c.values())) == size]
        shapes = fitting[0] if len(fitting) == 1 else {}
        cuts = flat_cuts(shapes, [0] * len(shapes), max(size, 1))
        flat = sorted_group([tree], g, g, shapes, cuts, [master], [{size}])
        flats.append(flat)
        if shapes:
            tensors += [t for n, s in shapes.items() for t in trained(ParamLayout(n, s), [[flat]])]
        else:
            tensors += [
                r[0].foreign(f"zero.group{g}.{s}", "tensor") for s, r in flat.states.items()
            ]
    return tensors, {"optim": other_state.optim_extra([(tree, flats)])}


def _chains(params: Mapping[str, TensorRef]) -> list[dict[str, Shape]]:
    """Parameters that lie end to end in a file, in that order: views of one array."""
    chains: list[dict[str, Shape]] = []
    end = ("", 0)
    for name, ref in sorted(params.items(), key=lambda p: (p[1].path, p[1].offset)):
        if (ref.path, ref.offset) != end or not chains:
            chains.append({})
        chains[-1][name] = ref.shape
        end = (ref.path, ref.offset + prod(ref.shape) * DTYPES[ref.dtype].bytes)
    return chains
