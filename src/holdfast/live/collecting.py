"""Collecting all of a live state, named and placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.base.arguments import rules_of
from holdfast.base.errors import need
from holdfast.live.kinds.choosing import kinds_of
from holdfast.live.kinds.kind import Collecting
from holdfast.live.sources import Sources
from holdfast.live.state.devices import devices_in, devices_of
from holdfast.live.state.encoding import RESIZE_RULES
from holdfast.live.state.merged import tell_merged
from holdfast.live.state.modules import module_tensors
from holdfast.live.state.named import Collected, LiveTensor
from holdfast.live.state.recognising import State, check_keys, in_order, modules_in, sources_in
from holdfast.live.state.rng import Rng
from holdfast.live.state.several import normalised
from holdfast.live.state.unsaved_tensors import tell_outside

need("torch", Tensor, "_post_accumulate_grad_hooks")


class RunState:
    """The state of a run: the values that the script handed over, and the generators of random numbers."""

    def __init__(self, given: State, on_resize: dict[str, str]) -> None:
        self.given = given
        self.on_resize = on_resize
        """Rule for each key's extra when the number of ranks changes."""
        self._rng = Rng()
        self.is_complete = False
        """True once the state was complete: saved, or restored into."""
        self._placed: dict[str, LiveTensor] = {}
        """The steady tensors of the last save.  Others may be gone, and are not kept alive."""

    def everything(self) -> State:
        """The state as it is now, with the generators, in one order on all ranks."""
        if self.generators is not None and self.generators.devices is None:
            self.generators.devices = devices_of(
                t for _, module in modules_in(self.given) for t in module_tensors(module)
            )
        return in_order({"rng": self._rng, **self.given})

    @property
    def generators(self) -> Rng | None:
        """The generators; None if the state has another value under `rng`."""
        rng = self.given.get("rng", self._rng)
        return rng if isinstance(rng, Rng) else None

    @property
    def num_tensors(self) -> int:
        """Number of parameters and states at the last save."""
        return len(self._placed)

    def check(self) -> None:
        """Check the state.  The script may have added values after the start."""
        check_keys(
            self.given, "Checkpointer.state is still empty: add what is to be saved to it first"
        )
        rules_of(self.on_resize, RESIZE_RULES, (*self.given, "rng"), "Checkpointer", "on_resize")

    def collect(self) -> Collected:
        """Name and place everything; see `collect`."""
        live = collect(self.everything(), self.on_resize, self._placed)
        self._placed = {name: t for name, t in live.tensors.items() if t.steady}
        if self.generators is not None:
            self.generators.devices = devices_in(live)
        return live


def collect(
    state: State,
    on_resize: dict[str, str] | None = None,
    before: Mapping[str, LiveTensor] | None = None,
) -> Collected:
    """Name and place everything.  Shares memory with the live tensors; encodes the extras.

    `on_resize`: by key, the rule for its extra when the number of ranks changes.  `before`: the tensors of
    the last save; a tensor whose memory is the same is not placed again.  The first save raises UsageError
    for parts of modules and optimizers that would not be saved.
    """
    check_keys(state)
    given = in_order(state)
    state = normalised(given)
    is_first = not before
    if is_first and any(map(_has_hooks, state.values())):
        from holdfast.live.state.in_hooks import check_in_backward, tell_gradient_hooks, tell_hooks

        check_in_backward(given)
        tell_gradient_hooks(given)
        tell_hooks(state)
    kinds = kinds_of(state, given, sources_in(state))
    live = Collected(keys=set(state), before=before or {})
    live.trained = {id(p) for kind in kinds.values() for p in kind.trained()}
    to = Collecting(live, state, on_resize or {}, is_first)
    for key, kind in kinds.items():
        if not _is_nothing(kind.value):
            live.kinds[key] = kind.saved_as, type(given[key]).__qualname__
        kind.collect(to)
    if is_first:
        tell_outside(state)
        tell_merged(state)
    live.before = {}
    return live


def _is_nothing(value: Any) -> bool:
    """True for an empty value, which a rank may have in the place of any kind."""
    return value is None or (isinstance(value, (list, tuple, dict)) and not value)


def collect_step(
    state: State, groups: Mapping[str, Sequence[Sequence[str]]], on_resize: dict[str, str]
) -> Collected:
    """Collect everything that a step changes besides parameters and optimizer states, for its record.

    Extras are those of `collect`, but of an optimizer only its hyper-parameters.  `groups`: by optimizer's
    key, the parameter names of each group.  Tensors of the user's own dicts are in `tensors`.  An object
    with the attribute `in_records = False` is left out.
    """
    live = Collected(keys=set(state), inline_bytes=inf)
    to = Collecting(live, state, on_resize, is_first=False, groups=groups)
    for kind in kinds_of(state, state, Sources()).values():
        kind.collect_step(to)
    return live


def _has_hooks(value: Any) -> bool:
    """True if modules have hooks, of DDP or of parameters, that may keep further state of the training."""
    modules = value if isinstance(value, (list, tuple)) else [value]
    parts = [one for m in modules if isinstance(m, nn.Module) for one in m.modules()]
    return any(isinstance(part, DistributedDataParallel) for part in parts) or any(
        getattr(p, "_post_accumulate_grad_hooks", None) or hasattr(p, "_in_backward_optimizers")
        for part in parts
        for p in part._parameters.values()
        if p is not None
    )
