"""States that an optimizer will look for in its next step, and whether those that were saved are such.

An optimizer makes its states when a parameter has none; where it finds some, it takes them for its own.
Another one's, put there, are a KeyError in the step after the restore, or are never looked at.

Which names an optimizer has follows from its class and its hyper-parameters, which a restore replaces, too.
Of torch's own this is found out by letting a new one of that class make a step with those hyper-parameters
on one element, which holds for every version of torch.  Others may do anything in a step (exchange with
other ranks, need a device), so they are not asked.  Of these the states that are there tell: where names
are lacking on both sides, they are not of one kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from holdfast.base.errors import StateMismatch
from holdfast.base.text import listed
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.live.restore.groups import (
    COMPUTE_OPTIONS,
    NamedGroups,
    hypers_after,
    plain_states,
    without_params,
)
from holdfast.live.sources import ParamGroup
from holdfast.live.state.named import Misfit
from holdfast.live.state.wrapped import ELEMENTWISE

ASKED = ELEMENTWISE | {"Adafactor", "Muon"}
"""Classes of torch whose states' names follow from the hyper-parameters and the number of dims."""

SWITCHES = {"amsgrad": True, "centered": True, "momentum": 0.5}
"""Hyper-parameters that add states.  A run may have changed one: then states are kept that nobody reads."""

OF_TORCH = frozenset(
    [
        "acc_delta",
        "col_var",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "grad_avg",
        "max_exp_avg_sq",
        "momentum_buffer",
        "mu_product",
        "row_var",
        "square_avg",
        "step_size",
        "sum",
    ]
)
"""Names that say of which of torch's optimizers a state is.  Under any other a hook of the user's may keep
something of its own with a parameter's states."""


class Only(Protocol):
    """Options of a load that tell whether it is of some names alone."""

    @property
    def only(self) -> tuple[str, ...] | None: ...


@dataclass(frozen=True, slots=True)
class Expected:
    """Names of the states of one parameter."""

    needed: frozenset[str]
    """States that a step reads, unless the parameter has none at all."""
    known: frozenset[str]
    """The needed states, and those that it may have with other hyper-parameters."""
    begins_empty: bool
    """True if a step makes the states where there are none."""


@dataclass
class Fitting:
    """Compares the states that were saved of an optimizer with those that it expects."""

    key: str
    hypers: list[dict[str, Any]]
    """Hyper-parameters of each group, as they will be."""
    plain: dict[str, dict[str, Any]]
    """Saved states that are no tensors, by parameter."""
    is_partial: bool
    """True if states that are not loaded stay."""
    checkpoint: Checkpoint
    pairs: NamedGroups
    """Names and parameters of each group."""
    _of_kind: dict[tuple[Any, ...], Expected | None] = field(default_factory=dict)
    _misfits: dict[str, list[str]] = field(default_factory=dict)
    """Parameters whose saved states do not fit, by what is wrong."""
    _idle: dict[str, list[str]] = field(default_factory=dict)
    """Parameters whose saved states will not be looked at, by the text that names these."""

    @staticmethod
    def of(
        checkpoint: Checkpoint,
        key: str,
        groups: list[ParamGroup],
        pairs: NamedGroups,
        options: Only,
    ) -> Fitting | None:
        """For the optimizer of a key; None if the checkpoint has no groups that could be its own."""
        if options.only is not None:
            now = [without_params(group) for group, _ in groups]
            return Fitting(key, now, {}, True, checkpoint, pairs)
        tree, plain = checkpoint.manifest.extras.get(key), plain_states(checkpoint, key)
        if plain is None:
            return None
        try:
            hypers = hypers_after(key, tree, groups, pairs)
        except StateMismatch:  # told where groups are put back
            return None
        return Fitting(key, hypers, plain, False, checkpoint, pairs)

    def fits(
        self,
        number: int,
        name: str,
        optimizer: Optimizer,
        p: torch.Tensor,
        saved: Iterable[str],
        live: dict[str, Any],
    ) -> bool:
        """True if the optimizer of a parameter, which is in this group, can go on with the states that
        were saved of it.  `live`: those that it has now."""
        others = self.plain.get(name, {})
        new = frozenset(saved).union(s for s, v in others.items() if v is not None)
        old = frozenset(s for s, v in live.items() if v is not None)
        kind = type(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            from holdfast.live.restore.lbfgs import misfit

            if why := misfit(self.checkpoint, self.key, self.pairs[number]):
                self._misfits.setdefault(why, []).append(name)
            return not why
        if is_asked(kind):
            expected = self._expected(kind, self.hypers[number], p.ndim)
            if expected is None:
                return True
            is_right = _is_right(expected, new, new | old if self.is_partial else new)
            is_idle = is_right and new and not new & expected.known and not new <= old
            if is_right and not is_idle:
                return True
            keeps = expected.needed
        elif self.is_partial or not (new and old and new - old and old - new):
            return True  # names may lack on one side, where the other has made more steps
        else:
            is_right, keeps = False, old
        why = f"states saved are {_listed(new)}; those of {kind.__name__} are {_listed(keeps)}"
        told = self._idle if is_right else self._misfits
        told.setdefault(why, []).append(name)
        return is_right

    def misfits(self) -> list[Misfit]:
        """What the optimizer cannot go on with, and what it has no use for itself, once for all parameters
        alike in this."""
        return [
            Misfit(self.key, f"{why} ({listed(names, 1)})", is_idle)
            for is_idle, found in ((False, self._misfits), (True, self._idle))
            for why, names in found.items()
        ]

    def _expected(self, kind: type, hyper: dict[str, Any], ndim: int) -> Expected | None:
        which = (kind, ndim, *((s, bool(hyper[s])) for s in SWITCHES if s in hyper))
        if which not in self._of_kind:
            self._of_kind[which] = expected_states(kind, hyper, ndim)
        return self._of_kind[which]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _is_right(expected: Expected, new: frozenset[str], after: frozenset[str]) -> bool:
    if not after:
        return expected.begins_empty
    if not new:  # nothing is loaded, and the optimizer has what it had
        return True
    return expected.needed <= after and not (new - expected.known) & OF_TORCH


def is_asked(kind: type) -> bool:
    """True if a class is one of torch's in `ASKED`: a step of it tells which states it has."""
    return kind.__module__.startswith("torch.optim.") and kind.__name__ in ASKED


def expected_states(kind: Any, hyper: dict[str, Any], ndim: int) -> Expected | None:
    """The states that an optimizer of torch's will look for; None if it cannot make a step.

    Another one's hyper-parameters may have the same names and other meanings (`eps` of Adafactor): where it
    makes no step with them, only those count that decide which states it has.
    """
    deciding = {k: v for k, v in hyper.items() if k in SWITCHES}
    on = {k: SWITCHES[k] for k in deciding}
    for given in (hyper, deciding):
        try:
            needed, begins_empty = _after_a_step(kind, given, ndim)
            known, _ = _after_a_step(kind, {**given, **on}, ndim)
        except Exception:  # the optimizer's own step, which is to come, tells why
            continue
        return Expected(needed, needed | known, begins_empty)
    return None


def _after_a_step(kind: Any, hyper: dict[str, Any], ndim: int) -> tuple[frozenset[str], bool]:
    """Names of the states after a step on one element, and whether it made them itself.

    The step is made without its hooks, which are for the training's; nothing is drawn at random.
    """
    for begins_empty in (True, False):
        with torch.device("cpu"), torch.no_grad():
            p = torch.nn.Parameter(torch.ones((1,) * ndim, dtype=torch.float32))
            p.grad = torch.ones_like(p)
            one = kind([p])
            (group,) = one.param_groups
            plain = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in hyper.items()}
            group |= plain | {way: False for way in COMPUTE_OPTIONS if way in group}
            if begins_empty:
                one.state.clear()
            try:
                inspect.unwrap(kind.step)(one)
            except KeyError:
                if not begins_empty:
                    raise
                continue
            return frozenset(one.state.get(p, {})), begins_empty
    raise AssertionError("one of the two has returned")
