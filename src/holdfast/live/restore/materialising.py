"""Memory for modules on the meta device.  Places that had one tensor get one tensor.

    encoder.running_mean ----+
                             +----> one tensor without memory        becomes        one tensor with memory
    decoder.running_mean ----+

torch gives each place a tensor of its own.  So all modules of a state are looked at together: a tensor gets
its memory once, tensors that lie in one storage get one, and every place that had the tensor gets the new
one, be it a parameter or a buffer, in one module or in several.

New memory holds whatever lay there before.  If the load then fails, it is filled with NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.base.errors import UsageError, need
from holdfast.base.text import listed
from holdfast.live.state.ignoring import trainable_marks
from holdfast.live.state.modules import named_buffers, submodules, unwrap
from holdfast.live.state.placed import memory_of
from holdfast.live.state.recognising import State, modules_in
from holdfast.live.state.tensor_kinds import PLAIN_TENSORS, fill_with_nan

need("torch", nn.Module, "_apply")
need("torch", torch.UntypedStorage, "_cdata")

OFFLOADED = "_hf_hook"
"""Attribute of modules around whose forward pass accelerate moves weights."""

Registration = tuple[dict[str, Any], str]
"""The parameters or buffers of a module, and a name among them."""


def materialise(modules: Iterable[nn.Module]) -> None:
    """Give tensors on the meta device real memory, uninitialised.  A shared tensor stays shared."""
    roots = []
    for module in modules:
        if trainable_marks:
            from holdfast.live.state.trainable import check_not_meta

            check_not_meta(module)
        roots.append(unwrap(module))
    roots = [root for root in roots if any(map(_has_meta, submodules(root)))]
    for root in roots:
        _check_saved(root, roots)
        _check_not_offloaded(root)
    if roots:
        _Memories(roots).give()


class _Memories:
    """The meta tensors of some modules, all their places, and the new tensors."""

    def __init__(self, roots: list[nn.Module]) -> None:
        self._roots = roots
        self._places: dict[int, list[Registration]] = {}
        self._metas: dict[int, torch.Tensor] = {}
        for owner, name, tensor in _tensors_of(roots):
            if tensor.is_meta:
                self._metas[id(tensor)] = tensor
                self._places.setdefault(id(tensor), []).append((owner, name))
        self._offloaded = {i for root in roots for i in _kept_on_cpu(root)}
        self._made: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.Tensor] = {}
        """Memory for each storage that several tensors lie in."""
        self._shared = self._find_shared()

    def give(self) -> None:
        for root in self._roots:
            root._apply(self._make)
        for places in self._places.values():
            places.sort(key=lambda place: not isinstance(place[0][place[1]], nn.Parameter))
            (first, name), *others = places
            for owner, other in others:
                owner[other] = first[name]

    def _find_shared(self) -> set[int]:
        """Storages in which several tensors lie."""
        count: dict[int, int] = {}
        for tensor in self._metas.values():
            if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()._cdata
                count[storage] = count.get(storage, 0) + 1
        return {storage for storage, n in count.items() if n > 1}

    def _make(self, t: torch.Tensor) -> torch.Tensor:
        if not t.is_meta:
            return t
        if id(t) not in self._made:
            self._metas[id(t)] = t  # a gradient, say: kept, so that its id stays its own
            self._made[id(t)] = self._new(t)
        return self._made[id(t)]

    def _new(self, t: torch.Tensor) -> torch.Tensor:
        device = torch.device("cpu") if id(t) in self._offloaded else _device_for(t)
        shared = type(t) in PLAIN_TENSORS and t.layout is torch.strided and bool(self._shared)
        if not shared or (storage := t.untyped_storage()._cdata) not in self._shared:
            return torch.empty_like(t, device=device)
        if storage not in self._storages:
            size = t.untyped_storage().nbytes()
            self._storages[storage] = torch.empty(size, dtype=torch.uint8, device=device)
        memory = self._storages[storage]
        empty = torch.empty(0, dtype=t.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), t.storage_offset(), t.shape, t.stride())


def _tensors_of(roots: list[nn.Module]) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield each parameter and buffer of the modules with where it is registered."""
    seen: set[int] = set()
    for part in (part for root in roots for part in root.modules()):
        if id(part) in seen:
            continue
        seen.add(id(part))
        for owner in (part._parameters, part._buffers):
            for name, tensor in owner.items():
                if tensor is not None:
                    yield owner, name, tensor


def _check_saved(root: nn.Module, roots: list[nn.Module]) -> None:
    """UsageError for buffers on the meta device that no checkpoint has, under any name."""
    kept = {id(b) for one in roots for _, b in named_buffers(one)}
    kept |= {id(p) for one in roots for p in one.parameters()}
    lost = [name for name, b in root.named_buffers() if b.is_meta and id(b) not in kept]
    if lost:
        raise UsageError(
            f"buffers {listed(lost, 5)} are on the meta device and are in no checkpoint",
            hint="they are not persistent: compute them on the real device first",
        )


def _check_not_offloaded(root: nn.Module) -> None:
    """UsageError where the weights are on the meta device because a hook of accelerate keeps them elsewhere
    (`cpu_offload`, `disk_offload`, `device_map=`): its next forward pass would put those in place of what
    was loaded."""
    for path, part in root.named_modules():
        own = (*part._parameters.items(), *part._buffers.items())
        metas = [name for name, t in own if t is not None and t.is_meta]
        if metas and OFFLOADED in vars(part):
            raise UsageError(
                f"{f'{path}.{metas[0]}'.strip('.')!r}: its values are offloaded by accelerate, which would "
                "put its own in place of what is loaded",
                hint="load before the model is offloaded or dispatched, or take the hooks away first: "
                "accelerate.hooks.remove_hook_from_submodules(model)",
            )


def _kept_on_cpu(root: nn.Module) -> set[int]:
    """The ids of parameters that FSDP2 keeps on the CPU (`CPUOffloadPolicy`), whatever their mesh is of."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    parts = [part for part in root.modules() if isinstance(part, kind)]
    states = [need("torch", part, "_get_fsdp_state")[0]() for part in parts]
    params = (p for state in states for group in _groups_of(state) for p in group.fsdp_params)
    return {id(p.sharded_param) for p in params if p.offload_to_cpu}


def _groups_of(state: Any) -> list[Any]:
    """The parameters of a module that FSDP2 gathers together; an older torch has at most one such group."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in need("torch", state, "_fsdp_param_group") if group is not None]


def _has_meta(part: nn.Module) -> bool:
    own = (*part._parameters.values(), *part._buffers.values())
    return any(t.is_meta for t in own if t is not None)


def _device_for(tensor: torch.Tensor) -> torch.device:
    if isinstance(tensor, DTensor):
        kind = tensor.device_mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.accelerator.current_device_index())
    # get_default_device() of torch 2.9 fails after set_default_device(None)
    return torch.empty(0).device


# -- a load that fails --------------------------------------------------------------------------


@contextmanager
def nan_if_it_fails(state: State) -> Iterator[None]:
    """A block.  If it fails, tensors that were on the meta device before and are real now become NaN."""
    places = [
        (own, name)
        for _, module in modules_in(state)
        for part in submodules(unwrap(module))
        for own in (part._parameters, part._buffers)
        for name, tensor in own.items()
        if tensor is not None and tensor.is_meta
    ]
    try:
        yield
    except BaseException:
        for own, name in places:
            made = own.get(name)
            if isinstance(made, torch.Tensor) and not made.is_meta:
                fill_with_nan(memory_of(made.detach()))
        raise
