"""States that an optimizer looks for in its next step, compared with the saved states.

An optimizer makes its states when a parameter has none.  States that it finds it takes for its own: those
of another optimizer are a KeyError in the step after the restore, or are never looked at.

The names of the states follow from the optimizer's class and its hyper-parameters, which a restore
replaces, too.  For torch's own classes, a new optimizer of the class makes a step with those
hyper-parameters on one element, which tells the names for every version of torch.  Other classes may do
anything in a step (exchange with other ranks, need a device), so they are not tried.  Their live states are
compared: where each side has names that the other lacks, the two are of different kinds.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.base.errors import StateMismatch
from holdfast.base.text import listed
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.live.restore.param_groups import (
    COMPUTE_OPTIONS,
    hypers_after,
    optimizer_body,
    plain_states,
    without_params,
)
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.state.named import Misfit
from holdfast.live.state.optimizer_wrappers import ELEMENTWISE
from holdfast.live.state.optimizers import LiveOptimizer, NamedGroups

ASKED = ELEMENTWISE | {"Adafactor", "Muon"}
"""Classes of torch whose state names follow from the hyper-parameters and the number of dims."""

SWITCHES = {"amsgrad": True, "centered": True, "momentum": 0.5}
"""Hyper-parameters that add states.  A run may have changed one, and keep states that no step reads."""

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
"""State names of torch's optimizers.  Under other names, a hook of the user's may keep values of its own
beside a parameter's states."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Names of the states of one parameter."""

    needed: frozenset[str]
    """States that a step reads, unless the parameter has none at all."""
    known: frozenset[str]
    """The needed states, and further ones with other hyper-parameters."""
    begins_empty: bool
    """True if a step makes the states where there are none."""


@dataclass
class Fitting:
    """Compares the saved states of an optimizer with those that it looks for."""

    key: str
    hypers: list[dict[str, Any]]
    """Hyper-parameters of each group after the restore."""
    plain: dict[str, dict[str, Any]]
    """Saved states that are no tensors, by parameter."""
    is_partial: bool
    """True if live states that are not loaded stay."""
    checkpoint: Checkpoint
    pairs: NamedGroups
    """Names and parameters of each group."""
    _of_kind: dict[tuple[Any, ...], Expected | None] = field(default_factory=dict)
    _misfits: dict[str, list[str]] = field(default_factory=dict)
    """Parameters whose saved states do not fit, by what is wrong."""
    _idle: dict[str, list[str]] = field(default_factory=dict)
    """Parameters whose saved states no step looks at, by the text that names the states."""

    @staticmethod
    def of(
        checkpoint: Checkpoint, optimizer: LiveOptimizer, options: RestoreOptions
    ) -> Fitting | None:
        """The comparison for an optimizer; None if the checkpoint has no groups of it."""
        key, groups, pairs = optimizer.key, optimizer.groups, optimizer.pairs
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
        """True if the optimizer can go on with the `saved` states of a parameter in group `number`.
        `live`: the states that the parameter has now."""
        others = self.plain.get(name, {})
        new = frozenset(saved).union(s for s, v in others.items() if v is not None)
        old = frozenset(s for s, v in live.items() if v is not None)
        kind = type(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
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
        """The saved states that the optimizer cannot use, or does not look at: one misfit for all
        parameters alike."""
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
    """True if a class is one of torch's in `ASKED`."""
    return kind.__module__.startswith("torch.optim.") and kind.__name__ in ASKED


def expected_states(kind: Any, hyper: dict[str, Any], ndim: int) -> Expected | None:
    """The states that an optimizer of torch's looks for; None if it cannot make a step.

    Hyper-parameters of another class may have the same names and other meanings (`eps` of Adafactor): where
    no step can be made with them, only those count that decide which states there are.
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


# -- LBFGS --------------------------------------------------------------------------------------
# The vectors of an LBFGS are the gradients of all its parameters, one behind the other, kept as states of
# the first.  They mean nothing to an LBFGS of other parameters, or of the same in another order: it would
# fail in its next step, or take a wrong direction.


VECTORS = ("d", "prev_flat_grad")


def misfit(checkpoint: Checkpoint, key: str, pairs: list[tuple[str, torch.Tensor]]) -> str:
    """Why an LBFGS over these parameters cannot go on with the saved states; empty if it can."""
    names = [name for name, _ in pairs]
    start = "an LBFGS keeps one vector of all its parameters together, and "
    groups = optimizer_body(checkpoint, key).get("groups", ())
    order = [name for group in groups for name in group["params"] if name in set(names)]
    if groups and order != names:
        return f"{start}it was saved of them in another order"
    total = sum(p.numel() * (2 if p.is_complex() else 1) for _, p in pairs)
    find = checkpoint.manifest.find
    places = [(name, find(f"{key}.{name}.{v}")) for name in names for v in VECTORS]
    saved = [(name, checkpoint.manifest.tensors[at].shape) for name, at in places if at is not None]
    if any(shape != (total,) or name != names[0] for name, shape in saved):
        lengths = dict.fromkeys(str(shape[0]) for _, shape in saved if shape)
        return f"{start}these have {total} elements here and had {', '.join(lengths)} when saved"
    others = {name for name, states in (plain_states(checkpoint, key) or {}).items() if states}
    return f"{start}was saved of several" if others & set(names[1:]) else ""
