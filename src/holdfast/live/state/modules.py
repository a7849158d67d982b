"""Modules of the live state: the user's module under wrappers, and names of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from holdfast.base.errors import need
from holdfast.live.sources import frameworks
from holdfast.live.state.module_wrappers import Wrappers, first_names, parts
from holdfast.live.state.tensor_kinds import check_unit

need(
    "torch", nn.Module,
    "_load_from_state_dict", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


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
    """Names that frameworks give to tensors of an unwrapped module, by path; other tensors keep their
    path."""
    found: dict[str, Sequence[str]] = {}
    for framework in frameworks():
        found |= framework.names(module)
    return found


def reshard(module: nn.Module) -> None:
    """Put FSDP2's sharded parameters back in the place of gathered ones."""
    every = submodules(module)
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


def submodules(root: nn.Module) -> dict[nn.Module, None]:
    """A module and all in it, each once: three times as fast as `modules()`, which names them."""
    found: dict[nn.Module, None] = {root: None}
    left = [root]
    while left:
        for part in left.pop()._modules.values():
            if part is not None and part not in found:
                found[part] = None
                left.append(part)
    return found


def module_tensors(root: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of a module and all in it.  Megatron's DDP has a list in the place of
    `buffers()`."""
    return [
        t
        for part in submodules(root)
        for t in (*part._parameters.values(), *part._buffers.values())
        if t is not None
    ]


def has_extra_state(kind: type[nn.Module]) -> bool:
    """True if modules of a class have state of their own."""
    return kind.get_extra_state is not nn.Module.get_extra_state


def extra_states(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with state of their own (`get_extra_state`)."""
    module = unwrap(module)
    few = {part for part in submodules(module) if has_extra_state(type(part))}
    names = names_in(module) if few else {}
    for prefix, part in first_names(module, few):
        own = f"{prefix}_extra_state"
        yield names.get(own, (own,))[0], part


def derives(part: nn.Module) -> bool:
    """True if a module has a way to load, or hooks after a load, that are not torch's: it may derive values
    from its tensors then (`state.own_loading`)."""
    if not (part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks):
        own = part.__dict__.get("_load_from_state_dict") or type(part)._load_from_state_dict
        return not _is_torchs(own)
    hooks = (*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values())
    return not all(map(_is_torchs, (type(part)._load_from_state_dict, *hooks)))


def _is_torchs(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(("torch.", "holdfast."))
