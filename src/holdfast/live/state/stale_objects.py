"""Objects of the state that the training no longer uses: what trains is not what is saved.

A state is made once, and a script may go on with something else:

    optim = AdamW(model.parameters(), lr=1e-4)      made anew after restore(): the state's one never steps
    model.head = nn.Linear(512, 10)                 the optimizer steps the head that was there before
    model = copy.deepcopy(model)                    the state's model never changes

Then each step has old moments, or nothing that was trained, and no save fails.  Facts tell: which
optimizers step (torch's hook on all of them), which parameters they have, and which tensors were written
(`writes`).  That an optimizer of the state rests is no fact of that kind: it may begin later, or step less
often, once in many micro-batches say.  So it counts only where another optimizer, which is not in the
state, steps in its place, and so does that its models do not change.  That other one has to stay: one for
each task, as in meta-learning, begins anew by design.

What the state has may be inside of what was handed over: a wrapper around an optimizer, an object with both
model and optimizer.  All that can be reached from a value by attributes belongs to it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.base.text import listed
from holdfast.live.state.modules import module_tensors
from holdfast.live.state.observer import StepCounts, calls_hooks
from holdfast.live.state.optimizer_wrappers import params_of
from holdfast.live.state.recognising import State, is_of_framework, parameters_in, stages
from holdfast.live.state.unchanged_state import StateMarks
from holdfast.live.state.unsaved_tensors import tensors_held
from holdfast.live.state.writes import Mark, count_and_address

CALLS = 10
"""Calls of `Checkpointer.step` after the start and after a restore that are looked at."""
STEPS = 3
"""Steps of another optimizer that make it one that trains."""
REACHED = 5000
"""Objects that are looked at for optimizers, at most."""
SAMPLED_TENSORS = 8
"""Tensors of a state of which values are compared, too."""

Notice = tuple[str, str, str]
"""Name of a notice, its text, and what it is about."""


class StaleObjects:
    """Finds objects of the state that do not train, while others train in their place."""

    def __init__(self, counts: StepCounts) -> None:
        self._counts = counts
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begin anew: at the start, or with a step that was restored."""
        self._begun = self._last = step
        self._calls = 0
        self._seen: _AtFirst | None = None
        self._tensors: dict[int, Any] = {}
        self._is_arranged_anew = False
        self._known: tuple[Any, ...] = ()
        """Ids of the state's values, its optimizers' and the number of its tensors, at the last look."""
        self._since: dict[str, int] = {}
        """The look at which each optimizer of the state had stepped last."""
        self._met: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        """Each stranger, the look at which it was first seen, and its number of steps then, by its id."""
        self._forget_counts()

    def _forget_counts(self) -> None:
        self._counts.clear()
        self._totals: dict[str, int] = {}
        self._at: dict[int, dict[str, int]] = {}
        """Numbers of steps that the state had made when a stranger was first seen, by the stranger's id."""

    @property
    def is_watching(self) -> bool:
        """True if the next calls of `step` are to be looked at."""
        return self._calls < CALLS

    def look(self, state: State, step: int, num_tensors: int, *, is_save: bool) -> list[Notice]:
        """Compare, at a call of `step` or at a save.  `num_tensors`: of the state, at the save before."""
        stepped = self._counts.by_optimizer()
        if is_save and not self.is_watching and self._is_as_before(state, stepped, num_tensors):
            self._forget_counts()
            return []
        own = _optimizers_of(state)
        first, is_new = self._seen is None, step != self._last
        if self._seen is None:
            self._seen = _AtFirst(state, step, own)
            self._tensors = _tensors_of(state, own)
        self._calls += is_new or first
        self._last = step
        self._note_totals(step, own, dict((id(one), n) for one, n in stepped))
        found = list(self._others(state, own, stepped, at_once=is_save and first))
        is_last = self._calls == CALLS and is_new
        if not found and (is_last or is_save) and not first:
            found += self._replaced(state, own, stepped)
        if not found and is_last:
            found += self._unchanged(state, own, stepped)
        self._know(state, own, num_tensors)
        if not self.is_watching and is_save:
            self._forget_counts()
        return found

    def _is_as_before(self, state: State, stepped: list[tuple[Any, int]], num_tensors: int) -> bool:
        """True if nothing steps that was not known, and the state is made of the same."""
        values, optimizers, num = self._known or ((), frozenset(), 0)
        if values != tuple(map(id, state.values())) or not all(
            id(o) in optimizers for o, _ in stepped
        ):
            return False
        return num == num_tensors and not self._is_arranged_anew

    def _know(self, state: State, own: dict[str, list[Any]], num_tensors: int) -> None:
        """Remember what the state is made of; where that has changed, the next save is compared with this
        one."""
        self._is_arranged_anew = bool(self._known) and self._known[2] != num_tensors
        if self._is_arranged_anew:
            self._tensors = _tensors_of(state, own)
        known = frozenset(map(id, _flat(own)))
        self._known = tuple(map(id, state.values())), known, num_tensors

    def _note_totals(self, step: int, own: dict[str, list[Any]], times: dict[int, int]) -> None:
        """Note how many steps the optimizers of each value have made."""
        for key, parts in own.items():
            total = sum(times.get(id(one), 0) for one in parts)
            if total > self._totals.get(key, 0):
                self._since[key] = step
            self._totals[key] = total

    # -- another optimizer --------------------------------------------------------------------------

    def _others(
        self,
        state: State,
        own: dict[str, list[Any]],
        stepped: list[tuple[Any, int]],
        *,
        at_once: bool,
    ) -> Iterator[Notice]:
        """An optimizer that is not in the state steps parameters of it.  `at_once`: there may be no other
        look, so that one with states counts although it is not known whether it stays."""
        known = set(map(id, _flat(own)))
        strangers = [(one, n) for one, n in stepped if id(one) not in known]
        if not strangers or not own or self._counts.has_compiled:
            return
        names = _names_of(state)
        for stranger, number in strangers:
            is_late = self._calls > 1 and number < STEPS
            base = self._at.setdefault(id(stranger), dict(self._totals) if is_late else {})
            stays = self._stays(stranger, number) or (at_once and stranger.state)
            if number < STEPS or not stays or any(_reaches(stranger, known)):
                continue
            hit = {
                id(p): names[id(p)]
                for p in params_of(stranger)
                if id(p) in names and p.requires_grad
            }
            resting = {
                key: _ids_of(parts)
                for key, parts in own.items()
                if self._totals[key] == base.get(key, 0) and any(map(calls_hooks, parts))
            }
            idle = [key for key, ids in resting.items() if hit.keys() & ids]
            if hit and not idle and len(resting) == len(own):
                idle = [*resting]
            kind = type(stranger).__name__
            if idle:
                since = self._since.get(idle[0], self._begun)
                models = listed(sorted({key for key, _ in hit.values()}))
                yield "never-steps", _never_steps(idle, since, kind, models), idle[0]
            elif hit and stranger.state:  # without any, nothing of it is lost
                shown = listed([".".join(name) for name in hit.values()])
                yield "another-optimizer", _another(kind, shown), shown

    def _stays(self, stranger: Any, number: int) -> bool:
        """True if an optimizer was seen at an earlier look, and has stepped since."""
        ref, look, before = self._met.get(id(stranger), (None, 0, 0))
        if ref is None or ref() is not stranger:
            self._met[id(stranger)] = weakref.ref(stranger), self._last, number
            return False
        return self._last != look and number != before

    # -- parts that were replaced -------------------------------------------------------------------

    def _replaced(
        self, state: State, own: dict[str, list[Any]], stepped: list[tuple[Any, int]]
    ) -> Iterator[Notice]:
        """Parameters of an optimizer that steps are no longer in a model, whose own are in no optimizer."""
        there = {id(t) for value in state.values() for t in _all(value)}
        if _ids_of(_flat(own)) <= there:
            return
        names = _names_of(state)
        times = {id(one): number for one, number in stepped}
        has = _ids_of([*_flat(own), *(one for one, _ in stepped)])
        plain = {
            id(t)
            for v in state.values()
            if not isinstance(v, Optimizer)
            for _, t in tensors_held(v)
        }
        for key, parts in own.items():
            mine = [p for one in parts if times.get(id(one), 0) >= STEPS for p in params_of(one)]
            gone = [p for p in mine if id(p) not in names and id(p) not in plain]
            gone = [p for p in gone if p.requires_grad and not self._was_written(p)]
            served = {names[id(p)][0] for p in mine if id(p) in names}
            if not gone or not served:
                continue
            lost = [
                f"{of}.{name}"
                for of, name, p in parameters_in(state)
                if of in served
                and p.requires_grad
                and id(p) not in has
                and not self._was_written(p)
            ]
            if lost:
                yield "parts-replaced", _parts_replaced(key, len(gone), lost), key

    def _was_written(self, p: torch.Tensor) -> bool:
        """True if a parameter was written since the first look, if it was there then."""
        before = self._tensors.get(id(p))
        return before is not None and before != count_and_address(p)

    # -- nothing changes ----------------------------------------------------------------------------

    def _unchanged(
        self, state: State, own: dict[str, list[Any]], stepped: list[tuple[Any, int]]
    ) -> Iterator[Notice]:
        """Nothing that is trained has changed in all these calls, in which others were."""
        mine = set(map(id, _flat(own)))
        seen = self._seen
        if self._counts.has_compiled or seen is None or is_of_framework(state):
            return
        if not stepped and seen.state_marks is not None and seen.state_marks.is_same(state):
            yield "never-changes", _nothing_changes([*state], seen.step), ""
        if not seen.models:
            return
        if any(id(one) in mine for one, _ in stepped) or not seen.is_same(state):
            return
        kinds = [type(one).__name__ for one, number in stepped if number >= STEPS]
        if kinds:
            yield "never-changes", _never_changes([*seen.models, *own], seen.step, kinds[0]), ""


def has_trained(state: State, counts: StepCounts) -> bool:
    """True if an optimizer of a state, or another one of its parameters, has stepped since the counts were
    begun with it.  A state without optimizers is not trained."""
    own = _flat(_optimizers_of(state))
    stepped, has_compiled = counts.since_forget()
    if not own or has_compiled:
        return bool(own)
    known, params = {id(one) for one in own}, _ids_of(own) | _names_of(state).keys()
    return any(id(one) in known or _ids_of([one]) & params for one in stepped)


# -- texts -------------------------------------------------------------------------------------------


def _never_steps(idle: list[str], since: int, kind: str, models: str) -> str:
    return (
        f"{listed(idle)} has not stepped since step {since}; another {kind} steps parameters of {models}, "
        f"and its states are not saved: hand over the one that steps (state[{idle[0]!r}] = ...)"
    )


def _another(kind: str, shown: str) -> str:
    return (
        f"another {kind}, not in the state, steps parameters of it ({shown}): its states are not saved, "
        "and begin anew after a restart: hand it over, too"
    )


def _parts_replaced(key: str, number: int, lost: list[str]) -> str:
    return (
        f"{key} has {number} parameter(s) that no model of the state has any more, and {listed(lost)} is "
        "in no optimizer and is not trained: make the optimizer after the last change of the model, or "
        "add_param_group() what is new"
    )


def _never_changes(keys: list[str], since: int, kind: str) -> str:
    return (
        f"{listed(keys)} has not changed since step {since}, while another {kind} steps parameters: what "
        "trains is not what is saved, and a restart finds it as it was; hand over the objects that the "
        "loop uses"
    )


def _nothing_changes(keys: list[str], since: int) -> str:
    return (
        f"nothing of the state ({listed(keys)}) has changed since step {since}: what trains is not what is "
        "saved, and a restart finds it as it was; hand over the objects that the loop uses, and set "
        "ckpt.state[...] where it makes new ones"
    )


class _AtFirst:
    """The values of a state at one time."""

    def __init__(self, state: State, step: int, own: dict[str, list[Any]]) -> None:
        self.step = step
        models = [key for key, v in state.items() if any(p.requires_grad for p in _all(v))]
        stepped = _ids_of(_flat(own))
        served = [key for key in models if any(id(p) in stepped for p in _all(state[key]))]
        self.models = served or models
        """The models that are trained: an average of another one's weights changes with that one."""
        tensors = [t for key in self.models for t in _all(state[key])]
        self._marks = _marks(tensors)
        self.state_marks = None if own else StateMarks(state)  # an optimizer may begin later

    def is_same(self, state: State) -> bool:
        """True if no tensor of the models was written or moved since, or is another."""
        tensors = [t for key in self.models if key in state for t in _all(state[key])]
        now = _marks(tensors)
        same = len(now) == len(self._marks)
        return same and not any(a.differs(b) for a, b in zip(now, self._marks))


def _all(value: Any) -> list[torch.Tensor]:
    return [t for module in stages(value) or () for t in module_tensors(module)]


def _marks(tensors: list[torch.Tensor]) -> list[Mark]:
    """Marks that tell whether tensors change; of some of them by values, too."""
    every = max(1, len(tensors) // SAMPLED_TENSORS)
    return [Mark.of(t) if n % every else Mark.sampled(t) for n, t in enumerate(tensors)]


# -- optimizers and their parameters ------------------------------------------------------------------


def _optimizers_of(state: State) -> dict[str, list[Any]]:
    """The optimizers that each value of a state is or leads to, by key."""
    found = {
        key: [one for one in _reachable(value) if isinstance(one, Optimizer)]
        for key, value in state.items()
        # a scheduler has nothing of the optimizer that it steers
        if not hasattr(value, "last_epoch")
    }
    return {key: parts for key, parts in found.items() if parts}


def _flat(own: dict[str, list[Any]]) -> list[Any]:
    return [one for parts in own.values() for one in parts]


def _reachable(root: Any) -> Iterator[Any]:
    """Yield a value and the objects that it leads to by attributes and containers."""
    todo, met = deque([(root, 0)]), {id(root)}
    while todo and len(met) < REACHED:
        value, depth = todo.popleft()
        yield value
        for one in _children(value) if depth < 6 else ():
            if id(one) not in met:
                met.add(id(one))
                todo.append((one, depth + 1))


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, set, deque)):
        inner = value if len(value) < REACHED else ()
    elif isinstance(value, nn.Module):
        inner = [v for v in vars(value).values() if not isinstance(v, dict)]
    else:
        kept = getattr(value, "__dict__", None)
        names = ("state", "param_groups", "defaults") if isinstance(value, Optimizer) else ()
        inner = [v for n, v in kept.items() if n not in names] if isinstance(kept, dict) else ()
    plain = (str, bytes, int, float, type(None), torch.Tensor, type)
    return [one for one in inner if not isinstance(one, plain)]


def _reaches(optimizer: Any, known: set[int]) -> Iterator[bool]:
    """True for each known optimizer that one is made around: then its steps are theirs."""
    yield from (id(one) in known for one in _reachable(optimizer) if isinstance(one, Optimizer))


def _ids_of(optimizers: list[Any]) -> set[int]:
    return {id(p) for one in optimizers for p in params_of(one)}


def _names_of(state: State) -> dict[int, tuple[str, str]]:
    """Key and name of each parameter of the modules of a state, by its id."""
    return {id(p): (key, name) for key, name, p in parameters_in(state)}


def _tensors_of(state: State, own: dict[str, list[Any]]) -> dict[int, Any]:
    """Marks that tell of each parameter whether it was written later, by its id."""
    params = [t for value in state.values() for t in _all(value)]
    params += [p for one in _flat(own) for p in params_of(one)]
    return {id(p): count_and_address(p) for p in params}
