"""Models of which only the trained parameters are saved: `holdfast.trainable_only`.

With LoRA 99 % of a model never change: they are in the files that training began with, and would be written
again at every save.  The step lists the parameters that are left out, by name, dtype and shape, and a
restore compares the list with the live model: an unsaved parameter is never taken for a saved one.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from holdfast.base.arguments import instance_of
from holdfast.base.entry import public
from holdfast.base.errors import UsageError, warn_user
from holdfast.core.format.extras import FROZEN
from holdfast.live.sources import Source
from holdfast.live.state.ignoring import trainable_marks
from holdfast.live.state.modules import named_parameters, reshard, unwrap
from holdfast.live.state.named import Collected, Prepared
from holdfast.live.state.placed import dtype_name

M = TypeVar("M", bound=nn.Module)


@public
def trainable_only(model: M) -> M:
    """Neither save nor restore parameters of a model that need no gradient.  Returns the model.

    What counts is `requires_grad` when a save or a restore begins.  Buffers, optimizer states and the names
    of everything else stay as they are.  Each step lists what was left out, and a restore insists that
    the live model has the same parameters frozen: StateMismatch by name.  Their values have to be there
    already, from `from_pretrained`, for example.
    """
    instance_of(model, nn.Module, "trainable_only", "model", "a module")
    trainable_marks[unwrap(model)] = None
    return model


def frozen_in(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that are left out, by each of their names."""
    root = unwrap(module)
    reshard(root)
    frozen = {
        id(p)
        for part in root.modules()
        if part in trainable_marks
        for p in part.parameters()
        if not p.requires_grad
    }
    return {name: p for name, p in named_parameters(module) if id(p) in frozen}


def is_marked(module: nn.Module) -> bool:
    """True if a module, or one in it, is saved without what is frozen."""
    return any(part in trainable_marks for part in unwrap(module).modules())


def leave_out(live: Collected, key: str, module: nn.Module, source: Source) -> set[int]:
    """Note in `live` which parameters are left out; return their ids."""
    if not is_marked(module):
        return set()
    frozen = frozen_in(module)
    if any(source.master(p) is not None for p in frozen.values()):
        raise UsageError(
            f"{key!r}: trainable_only() cannot leave out parameters of a {type(module).__name__}, which a "
            "framework keeps elsewhere",
            hint="save it whole",
        )
    listed = {name: [dtype_name(p.dtype), [*p.shape]] for name, p in frozen.items()}
    live.extras.setdefault(f"{key}.{FROZEN}", {}).update(listed)
    live.rules[f"{key}.{FROZEN}"] = "merge"
    if not live.before and frozen:
        every = {id(p): p for _, p in named_parameters(module)}
        least = {id(p): p for p in frozen.values()}
        share = _bytes(least) / _bytes(every)
        warn_user(
            f"{key!r}: trainable_only() leaves out {len(least)} of {len(every)} parameters, {share:.1%} of "
            "their bytes: have them in the model before restore()"
        )
    return {id(p) for p in frozen.values()}


def find_frozen(live: Prepared, key: str, module: nn.Module) -> set[int]:
    """Note in `live`, in a restore, which parameters are left out; return their ids."""
    frozen = frozen_in(module)
    live.frozen |= {
        f"{key}.{name}": (dtype_name(p.dtype), tuple(p.shape)) for name, p in frozen.items()
    }
    return {id(p) for p in frozen.values()}


def check_not_meta(module: nn.Module) -> None:
    """UsageError for a frozen parameter on the meta device: no checkpoint has its values."""
    if lost := [name for name, p in frozen_in(module).items() if p.is_meta]:
        raise UsageError(
            f"{lost[0]!r} is on the meta device, and trainable_only() leaves it out: its values are in no "
            "step",
            hint="load the weights that training began with first, or save the model whole",
        )


def _bytes(params: dict[int, nn.Parameter]) -> int:
    return max(sum(p.numel() * p.element_size() for p in params.values()), 1)
