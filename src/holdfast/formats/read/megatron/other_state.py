"""Reading other state than weights (`common.pt`, per-rank objects, optimizers) as extras.

Values come from pickles that name Megatron's own classes (enums in the arguments, mostly).  They are
kept as text: nothing of Megatron is imported or called.

Megatron-Core writes the hyper-parameters of each parameter group but not its parameters, which it groups
again when it loads.  This module uses the same rule: biases and vectors have no weight decay; experts
have groups of their own, and so has the embedding if its learning rate is decoupled.  All parameters
share one step counter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from holdfast.base.errors import Corrupt, FormatError
from holdfast.core.format import extras
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.format.extras import inlined
from holdfast.core.store import Store, read_range
from holdfast.formats.read.dcp import section_range, section_tree
from holdfast.formats.read.foreign import Foreign
from holdfast.formats.read.plaindata import PLAIN_GLOBALS, plain_value
from holdfast.formats.read.torchfile import TensorRef, read_file
from holdfast.formats.read.unpickle import UnknownInstance, record

COMMON = "common.pt"
_INLINE_BYTES = 64 << 10


class _Known(dict[tuple[str, str], Any]):
    """A table of plain data, with Megatron's classes as `UnknownInstance`s."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, tuple) and _is_megatron(key[0]))

    def __missing__(self, key: tuple[str, str]) -> Any:
        if not _is_megatron(key[0]):
            raise KeyError(key)
        return record(f"{key[0]}.{key[1]}")


def _is_megatron(module: str) -> bool:
    return module.split(".", 1)[0] == "megatron"


def _member(owner: Any, name: Any) -> UnknownInstance:
    """Stand-in for `getattr`, as which Python 3.11 pickles enums: for Megatron's classes alone."""
    if not (
        isinstance(owner, UnknownInstance) and _is_megatron(owner.name) and isinstance(name, str)
    ):
        raise FormatError("a pickle that takes an attribute of something")
    return UnknownInstance(f"{owner.name}.{name}")


def known() -> dict[tuple[str, str], Any]:
    """Return the globals that Megatron's pickles may name."""
    return _Known(
        PLAIN_GLOBALS
        | {
            ("signal", "Signals"): lambda number: number,
            ("builtins", "getattr"): _member,
            ("__builtin__", "getattr"): _member,
        }
    )


def read_common(store: Store, folder: str) -> dict[str, Any]:
    """`common.pt`, tensors as `TensorRef`s."""
    key = folder + COMMON
    found = read_file(store, key, known())
    if not isinstance(found, dict):
        raise FormatError("not the common state of Megatron-Core", key=key)
    return {str(k): v for k, v in found.items()}


def extra_state(store: Store, info: UnknownInstance) -> Any:
    """Return a module's extra state: Transformer Engine's bytes or tensor, unchanged.

    An archive with unknown classes is kept as `{"archive": bytes}`.
    """
    try:
        return section_tree(store, info, known())
    except Corrupt:
        raise
    except FormatError:
        path, start, stop = section_range(info)
        return {"archive": bytes(read_range(store, path, start, stop - start))}


class ExtrasValues:
    """Encodes values as extras, with small tensors inlined."""

    def __init__(self, store: Store) -> None:
        self.tensors: list[Foreign] = []
        """Tensors that are too large to be inlined."""
        self._store = store

    def encode(self, key: str, value: Any) -> Any:
        """`value` as the extra `key`."""
        return extras.encode(value, lambda leaf, path: self._leaf(leaf, f"{key}.{path}"))

    def _leaf(self, leaf: Any, name: str) -> Any:
        if isinstance(leaf, TensorRef):
            return self._tensor(leaf, name)
        if isinstance(leaf, UnknownInstance) and leaf.name == "BytesIO":
            state = leaf.get("state")
            return extras.encode(bytes(state[0]) if state else b"")
        if isinstance(leaf, UnknownInstance) and _is_megatron(leaf.name):
            return leaf.name + (f"({', '.join(map(repr, leaf.args))})" if leaf.args else "")
        return self.encode(name, plain_value(leaf))

    def _tensor(self, t: TensorRef, name: str) -> Any:
        size = prod(t.shape) * DTYPES[t.dtype].bytes
        check_contiguous(t, name)
        if size > _INLINE_BYTES:
            self.tensors.append(t.foreign(name, "tensor"))
            return {"$at": name}
        data = read_range(self._store, t.path, t.offset, size) if size else b""
        return extras.inlined(t.dtype, t.shape, bytes(data))


def check_contiguous(t: TensorRef, name: str) -> None:
    """FormatError for a tensor that is not read as row-major elements."""
    if not t.contiguous:
        raise FormatError(f"{name!r}: strides {t.strides}", key=t.path)


# -- optimizers -----------------------------------------------------------------------------------


_Group = dict[str, Any]
_Shapes = Mapping[str, tuple[int, ...]]


def _inner(saved: Any) -> Iterator[dict[str, Any]]:
    """The torch optimizers in Megatron's optimizer state: one, or several in a chain."""
    if isinstance(saved, dict) and "param_groups" in saved:
        yield saved
    elif isinstance(saved, dict) and "optimizer" in saved:
        yield from _inner(saved["optimizer"])
    elif isinstance(saved, dict) and saved and all(isinstance(k, int) for k in saved):
        for _, one in sorted(saved.items()):
            yield from _inner(one)
    elif isinstance(saved, list):
        for one in saved:
            yield from _inner(one)


def scaler_of(saved: Any) -> Any:
    """The loss scaler's state, which all optimizers of a chain share."""
    found = (
        saved
        if isinstance(saved, list)
        else list(saved.values())
        if isinstance(saved, dict)
        else []
    )
    for one in [saved, *found]:
        if isinstance(one, dict) and "grad_scaler" in one:
            return one["grad_scaler"]
    return None


def groups_of(saved: Any) -> list[_Group]:
    """The hyper-parameters of all groups, with the marks by which Megatron distinguishes groups."""
    found = [g for one in _inner(saved) for g in one["param_groups"]]
    if not all(isinstance(g, dict) for g in found):
        raise FormatError("malformed param_groups")
    return [{k: v for k, v in g.items() if k != "params"} for g in found]


def grouped(
    groups: list[_Group], shapes: _Shapes, args: Mapping[str, Any]
) -> list[list[str]] | None:
    """The parameters of each group; None if they do not follow from Megatron's rule."""
    found: list[list[str]] = [[] for _ in groups]
    marks = [_mark_of_group(g) for g in groups]
    matters = [len({m[i] for m in marks}) > 1 for i in range(3)]
    for name, shape in shapes.items():
        mark = _mark_of_param(name, shape, args)
        hits = [
            number
            for number, m in enumerate(marks)
            if all(a == b or not counts for a, b, counts in zip(m, mark, matters))
        ]
        if len(hits) != 1:
            return None
        found[hits[0]].append(name)
    return found


def _mark_of_group(g: _Group) -> tuple[bool, bool, bool]:
    """(no weight decay, experts, a learning rate of its own)"""
    own_rate = bool(g.get("is_decoupled_lr")) or g.get("default_config") is False
    return g.get("wd_mult", 1.0) == 0.0, bool(g.get("is_expert_parallel")), own_rate


def _mark_of_param(
    name: str, shape: tuple[int, ...], args: Mapping[str, Any]
) -> tuple[bool, bool, bool]:
    decays = bool(args.get("apply_wd_to_qk_layernorm")) and (
        "q_layernorm." in name or "k_layernorm." in name
    )
    no_decay = (len(shape) == 1 or name.endswith(".bias")) and not decays
    own_rate = name in ("embedding.word_embeddings.weight", "output_layer.weight")
    return no_decay, ".local_experts." in name, own_rate


def steps_of(saved: Any, groups: list[_Group]) -> TensorRef | float | None:
    """Number of steps taken: a tensor that is stored once, or a number in the groups."""
    for one in _inner(saved):
        state = one.get("state")
        step = state.get("common_step") if isinstance(state, dict) else None
        if isinstance(step, (TensorRef, int, float)):
            return step
    found = {g["step"] for g in groups if isinstance(g.get("step"), (int, float))}
    if len(found) > 1:
        raise FormatError(f"parameter groups at different steps: {sorted(found)}")
    return next(iter(found), None)


def extra_of(
    values: ExtrasValues,
    groups: list[_Group],
    members: list[list[str]],
    steps: TensorRef | float | None,
) -> dict[str, Any]:
    """The extra of an optimizer; a plain step number becomes a tensor of each parameter."""
    plain: dict[str, Any] = {}
    if isinstance(steps, (int, float)):
        step = {"step": inlined("float32", (), struct.pack("<f", steps))}
        plain = {name: step for params in members for name in params}
    hypers = [
        {"params": params, "hyper": values.encode("optim", _hyper(group))}
        for group, params in zip(groups, members)
    ]
    return {"$optimizer": {"groups": hypers, "state": plain}}


def _hyper(group: _Group) -> _Group:
    """Drop `is_expert_parallel`, which concerns the placement of experts, not their training."""
    return {k: v for k, v in group.items() if k != "is_expert_parallel"}


def step_tensors(steps: TensorRef | float | None, params: list[str]) -> list[Foreign]:
    """The shared step counter as a state of every parameter."""
    if not isinstance(steps, TensorRef):
        return []
    return [steps.foreign(f"optim.{name}.step", "step") for name in params]
