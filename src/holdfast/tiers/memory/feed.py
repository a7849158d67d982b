"""The gradient feed: snapshots are copied from a replica on the host, which gradients alone keep current.

Instead of the state, every step's gradients go to the host, where twins of the optimizers make the same
steps (the CPU replica of LowDiff+, Yao et al., 2025).  The twins have the part of the model that this rank
saves, and no more.  A snapshot copies from them, so it needs no window; training only waits for the copy of
its gradients.

The replica is compared with the live state before it is used: the snapshot after the one that it learned
from is of the live state, too.  So is every durable save, or one of several (`Memory(prove_every=)`).  If
they differ, an event gives the difference (`feed.drift`), and the replica learns anew.  On CPUs they do not
differ (tested); a device may compute in another way than the host, and then a snapshot's manifest says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf
from typing import Any

import numpy as np
import torch

from holdfast.base.errors import HoldfastError, UsageError
from holdfast.base.events import emit
from holdfast.core.format.image import Image
from holdfast.core.layout import Box, whole
from holdfast.live.ragged import is_ragged
from holdfast.live.saving import Draft, SaveOperation, error_text
from holdfast.live.saving.exactness import Exactness
from holdfast.live.saving.planning import SavePlan
from holdfast.live.state.arrays import raw_array
from holdfast.live.state.modules import named_parameters
from holdfast.live.state.named import Collected, LiveTensor
from holdfast.live.state.optimizer_wrappers import ELEMENTWISE, is_zero1
from holdfast.live.state.optimizers import check_exact
from holdfast.live.state.placed import Placed
from holdfast.live.state.recognising import State, is_optimizer, modules_in
from holdfast.live.state.several import check_apart
from holdfast.live.state.snapshot import StateView
from holdfast.live.state.writes import Marks
from holdfast.tiers.memory.proof import Proof, most_drift
from holdfast.tiers.memory.replica import pieces_of
from holdfast.tiers.memory.twin import Named, ParamPart, named_params
from holdfast.tiers.memory.twins import Twins

Places = dict[tuple[str, Box], tuple[int, int]]
"""Offset and bytes in this rank's image, by tensor and part of it."""


@dataclass
class FedPart:
    """One part of a parameter in a twin, and the names under which it is saved."""

    part: ParamPart
    name: str
    """Name of the weight."""
    prefix: str
    """Prefix of the states' names."""
    box: Box
    optimizer: Any
    """The optimizer that has the states; which tensors they are may change."""
    scalars: frozenset[str]
    """Names of the states of another shape than the weight's."""
    states: dict[str, torch.dtype]
    """Dtypes of the states of the weight's shape, by name."""
    aside: dict[str, torch.Tensor] = field(default_factory=dict)
    """States by name, copied at the mark that is learned from: scalars, and all states of a part that
    is not entirely in this rank's image."""
    weight: torch.Tensor | None = None
    """The weight, copied at that mark, of a part that is not entirely in this rank's image."""


@dataclass
class Covered:
    """The part of the state that the replica covers, which is what this rank saves."""

    named: list[Named] = field(default_factory=list)
    """Each optimizer's parameters by name, as they were when the twins were made."""
    names: list[str] = field(default_factory=list)
    """Names of all tensors of the state."""
    trained: set[str] = field(default_factory=set)
    """Names of the weights and states that optimizers write."""
    places: Places = field(default_factory=dict)
    watched: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    """(optimizer, parameter) of each parameter that is in the replica, at least in part."""


class Feed:
    """The replica of what this rank saves."""

    def __init__(
        self, state: Callable[[], State], rank: int, deadline_s: float, prove_every: int = 1
    ) -> None:
        check_feedable(state())
        self.twins = Twins(
            low_priority=True, check=self._written_elsewhere, after_step=self._after_step
        )
        self.proof = Proof(prove_every)
        self._state = state
        self._rank = rank
        self._deadline_s = deadline_s
        self._fed: list[list[FedPart]] = []
        """The parts in each twin, in the order of the twins."""
        self._named: list[Named] = []
        """Each optimizer's parameters by name, as found on the training thread: sharded parameters can
        only be named while they are not gathered."""
        self._made_for: SavePlan | None = None
        """The plan that the twins were made for; None if they do not fit any more."""
        self._covered = Covered()
        self._tensors: dict[str, LiveTensor] = {}
        """The replica as it is saved, by name."""
        self._written = Marks([])

    # -- training thread --------------------------------------------------------------------------

    def mark(self, number: int) -> None:
        """Mark the point in the training at which the snapshot of that number is taken."""
        self.twins.mark(number, self._set_aside)

    def arranged(self, live: Collected) -> Collected:
        """Return the same state, with each weight's states behind it; the replica is dropped if an
        optimizer has other parameters now."""
        state = self._state()
        self._named = named_params(state, optimizers(state))
        live = together(live, self._named)
        if self._made_for is not None and _params(self._named) != _params(self._covered.named):
            self._made_for = None
            self.twins.forget("an optimizer has other parameters now")
        return live

    def follows(self, live: Collected, *, durable: bool) -> bool:
        """True if a snapshot of this state can be taken from the replica."""
        if not self.twins.current or (durable and self.proof.is_next):
            return False
        if list(live.tensors) != self._covered.names:
            self.twins.forget("the state has other tensors now")
        return self.twins.current and self.proof.is_passed

    def _set_aside(self) -> None:
        """Copy aside what cannot be learned from the image."""
        self._written = self._writes()
        with torch.no_grad():
            for some in self._fed:  # not into the twins: a snapshot may still be copying from them
                for fed in some:
                    live = fed.optimizer.state.get(fed.part.param, {})
                    states = {s: live[s] for s in fed.scalars if s in live}
                    if not self._is_saved(fed):
                        states |= {s: fed.part.of(live[s]) for s in fed.states if s in live}
                        fed.weight = fed.part.of(fed.part.param).cpu().clone()
                    fed.aside = {k: v.detach().cpu().clone() for k, v in states.items()}

    def _is_saved(self, fed: FedPart) -> bool:
        """True if the weight and all states of a part are in this rank's image."""
        names = [fed.name, *(fed.prefix + s for s in fed.states)]
        return all((name, fed.box) in self._covered.places for name in names)

    def _written_elsewhere(self) -> str:
        """Return why the replica cannot follow, if something other than a step wrote to weights or
        states; else empty.  Called before each step and mark."""
        if self._writes() != self._written:
            return "weights or states were written outside optimizer.step()"
        return ""

    def _after_step(self) -> None:
        self._written = self._writes()

    def _writes(self) -> Marks:
        """Return marks of the weights and states: they equal later ones only if no tensor was written
        or replaced in between."""
        values: list[Any] = [p for _, p in self._covered.watched]
        for optimizer, p in self._covered.watched:
            values += optimizer.state.get(p, {}).values()
        return Marks(values)

    def restart(self) -> None:
        """Drop the twins, as the state is going to be replaced."""
        self.twins.restart()
        self._made_for = None

    # -- saving thread ----------------------------------------------------------------------------

    def moment(self, op: SaveOperation, plan: SavePlan) -> StateView:
        """Return the state of a snapshot, as the replica has it.  Blocks until the twins have come to it;
        HoldfastError if the replica is lost meanwhile."""
        if plan is not self._made_for:
            self.twins.forget("the ranks have planned anew")
        if not self.twins.at(op.number, self._deadline_s):
            raise HoldfastError(
                "the replica was lost while the snapshot waited for it", step=op.step
            )
        emit("feed.followed", step=op.step)
        in_window = [n for n in op.live.tensors if n not in op.live.aside]
        called = dict(zip(in_window, op.moment.versions))
        rest = {n: t for n, t in op.live.tensors.items() if n not in self._covered.trained}
        aside = op.live.aside & rest.keys()
        live = replace(op.live, tensors={**rest, **self._tensors}, aside=aside, devices=None)
        versions = [
            called[n] if n in rest else t.version for n, t in live.tensors.items() if n not in aside
        ]
        corners = {k: v for k, v in op.moment.corners.items() if k[0] in rest}
        return StateView(live, versions, op.moment.ready, corners)

    # -- memory thread ----------------------------------------------------------------------------

    def filled(self, op: SaveOperation, draft: Draft) -> None:
        """Use a snapshot's complete image for the replica.  An error here ends the replica, but not the
        snapshot."""
        try:
            if draft.layout is not None and op.replica is None and not self.twins.closed:
                self._use_image(op, draft, draft.layout[0])
        except Exception as error:
            self.twins.end(error_text(error))
        self.twins.go_on(op.number)

    def _use_image(self, op: SaveOperation, draft: Draft, image: Image) -> None:
        """Make the replica, let it learn from an image of the live state, or compare it with that."""
        if draft.plan is not self._made_for:
            self._make(draft, image)
        elif self.twins.current:
            self._compare(op, draft.buffer.view)
        else:
            self._learn(op, draft.buffer.view)

    def _make(self, draft: Draft, image: Image) -> None:
        """Make twins for what this rank saves by a plan; they learn from the next snapshot."""
        self.restart()
        plan, named = draft.plan, self._named
        _check_one_optimizer_each(_params(named))
        places = {
            (entry.name, box): (at, size)
            for entry, box, at, size in pieces_of(plan, image, self._rank)
        }
        boxes: dict[str, list[Box]] = {}
        for name, box in places:
            boxes.setdefault(name, []).append(box)
        self._covered = Covered(named, list(draft.live.tensors), places=places)
        wanted, fed = [], []
        for key, optimizer, pairs in named:
            some = list(self._parts(key, optimizer, pairs, draft.live, boxes))
            if some:
                wanted.append((optimizer, [one.part for one in some]))
                fed.append(some)
        devices = {p.device.type for _, p in self._covered.watched}
        self.proof.is_on_device = bool(devices - {"cpu"})

        def then() -> None:
            self._fed, self._made_for = fed, plan

        self.twins.make(wanted, then)

    def _parts(
        self,
        key: str,
        optimizer: Any,
        pairs: list[tuple[str, torch.Tensor]],
        live: Collected,
        boxes: dict[str, list[Box]],
    ) -> Iterator[FedPart]:
        weights = {id(t.source): t for t in live.tensors.values() if t.state == "param"}
        for name, p in pairs:
            weight, prefix = weights[id(p)], f"{key}.{name}."
            names = [s for s in list(optimizer.state.get(p, {})) if prefix + s in live.tensors]
            states = {s: live.tensors[prefix + s] for s in names}
            whole_ones = {s for s, t in states.items() if t.placed.shape == weight.placed.shape}
            self._covered.trained |= {weight.name, *(prefix + s for s in states)}
            here = [weight.name, *(prefix + s for s in whole_ones)]
            found = dict.fromkeys(box for n in here for box in boxes.get(n, ()))
            if not found and any(prefix + s in boxes for s in states):
                found = {_first(weight.placed.box): None}
            if found:
                self._covered.watched.append((optimizer, p))
            for box in found:
                at = box.within(weight.placed.box.start) if box.shape else None
                yield FedPart(
                    ParamPart(f"{prefix}{box}", p, at), weight.name, prefix, box, optimizer,
                    frozenset(states.keys() - whole_ones),
                    {s: states[s].placed.local.dtype for s in whole_ones},
                )  # fmt: skip

    def _learn(self, op: SaveOperation, view: memoryview) -> None:
        def states() -> list[list[dict[str, torch.Tensor]]]:
            return [
                [self._state_of(fed, mine, view) for mine, fed in zip(twin.weights, some)]
                for twin, some in zip(self.twins.all, self._fed)
            ]

        if self.twins.learn(op.number, states):
            self._tensors, self.proof.is_passed = dict(self._saved()), False

    def _state_of(
        self, fed: FedPart, mine: torch.Tensor, view: memoryview
    ) -> dict[str, torch.Tensor]:
        """Return the states of a part as they were in an image, and copy its weight into `mine`."""
        found = dict(fed.aside)
        if self._is_saved(fed):
            with torch.no_grad():
                mine.copy_(self._in_image(fed.name, fed.box, mine, view))
            for state, dtype in fed.states.items():
                like = torch.empty(fed.box.shape, dtype=dtype)
                found[state] = like.copy_(self._in_image(fed.prefix + state, fed.box, like, view))
        elif fed.weight is not None:
            with torch.no_grad():
                mine.copy_(fed.weight)
        fed.aside, fed.weight = {}, None
        return found

    def _in_image(self, name: str, box: Box, like: torch.Tensor, view: memoryview) -> torch.Tensor:
        at, size = self._covered.places[name, box]
        return torch.frombuffer(view[at : at + size], dtype=like.dtype).view(like.shape)

    def _saved(self) -> Iterator[tuple[str, LiveTensor]]:
        """Yield what this rank saves of the replica: (name, tensor)."""
        found: dict[str, list[tuple[Box, torch.Tensor, str, tuple[int, ...]]]] = {}
        for twin, some in zip(self.twins.all, self._fed):
            for mine, states, fed in zip(twin.weights, twin.states(), some):
                shape = tuple(fed.part.param.shape)
                found.setdefault(fed.name, []).append((fed.box, mine.detach(), "param", shape))
                for state, value in states.items():
                    plain = state in fed.scalars
                    entry = (whole(tuple(value.shape)), value, state, tuple(value.shape))
                    found.setdefault(fed.prefix + state, []).append(
                        entry if plain else (fed.box, value, state, shape)
                    )
        for name, parts in found.items():
            placed = [Placed(value, shape, box, None) for box, value, _, shape in parts]
            yield (
                name,
                LiveTensor(name, parts[0][2], placed[0], True, parts[0][1], tuple(placed[1:])),
            )

    def _compare(self, op: SaveOperation, view: memoryview) -> None:
        """Compare the replica with an image of the live state: it passes, or has to learn anew."""
        if not self.twins.at(op.number, self._deadline_s):
            return
        self.proof.compared = op.step
        if op.request.durable:
            self.proof.is_owed = False
        most, share, differing = 0.0, 0.0, ""
        for (name, box), (at, size) in self._covered.places.items():
            t = self._tensors.get(name)
            if t is None or not size:
                continue
            value = t.parts[t.holder(box)]
            mine = value.local[box.within(value.box.start)] if box.shape else value.local
            live = torch.frombuffer(view[at : at + size], dtype=mine.dtype).view(mine.shape)
            if not np.array_equal(raw_array(mine), raw_array(live)):
                off = float((mine.double() - live.double()).abs().nan_to_num(inf).max())
                largest = max(float(live.double().abs().max()), 1e-30)
                share = max(share, off / largest / most_drift(live.dtype))
                differing = differing or name
                most, differing = (off, name) if off > most else (most, differing)
        if differing:
            emit("feed.drift", step=op.step, most=most, tensor=differing)
        if not self.proof.passes(most, share, differs=bool(differing)):
            self.twins.forget("it differs from the live state")

    @property
    def exactness(self) -> Exactness:
        """Exactness of the snapshots from this replica."""
        return self.proof.exactness


def _first(box: Box) -> Box:
    """Return the box of the first element of a box."""
    return Box(box.start, tuple(a + 1 for a in box.start))


def optimizers(state: State) -> dict[str, Any]:
    """Return the optimizers of a state, by key."""
    return {key: value for key, value in state.items() if is_optimizer(value)}


def check_feedable(state: State) -> None:
    """UsageError for optimizers that no twin can follow on parts of a parameter."""
    check_apart(state, 'Memory(feed="gradient")')
    check_exact(state, 'Memory(feed="gradient")')
    found = optimizers(state)
    for key, optimizer in found.items():
        kind = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer) or is_zero1(optimizer):
            raise UsageError(
                f'Memory(feed="gradient"): {key!r} is a {kind}, whose steps cannot be made on the host',
                hint='use torch optimizers, or feed="state"',
            )
        if kind not in ELEMENTWISE or type(optimizer).__module__.split(".")[0] != "torch":
            raise UsageError(
                f'Memory(feed="gradient"): {key!r}, a {kind}, is not known to treat each element by itself',
                hint=f"known are {', '.join(sorted(ELEMENTWISE))} of torch",
            )
    if not found:
        raise UsageError('Memory(feed="gradient") needs an optimizer in the state')
    _check_one_optimizer_each(_params(named_params(state, found)))
    known = {id(p) for _, module in modules_in(state) for _, p in named_parameters(module)}
    if any(id(p) not in known for o in found.values() for g in o.param_groups for p in g["params"]):
        raise UsageError(
            'Memory(feed="gradient"): an optimizer has parameters that no module of the state has',
            hint="hand over every module that is trained",
        )
    if any(is_ragged(p) for _, _, pairs in named_params(state, found) for _, p in pairs):
        raise UsageError(
            'Memory(feed="gradient"): a parameter holds some parts of a whole (global_offsets)',
            hint='use feed="state"',
        )


def _params(named: list[Named]) -> list[tuple[str, set[int]]]:
    """Return (key, ids of the parameters) of each optimizer."""
    return [(key, {id(p) for _, p in pairs}) for key, _, pairs in named]


def _check_one_optimizer_each(params: list[tuple[str, set[int]]]) -> None:
    """UsageError for a parameter of two optimizers: each twin has weights of its own."""
    for (key, mine), (other, others) in combinations(params, 2):
        if mine & others:
            raise UsageError(
                f'Memory(feed="gradient"): {key!r} and {other!r} train the same parameter',
                hint='have one optimizer for each parameter, or use feed="state"',
            )


def together(live: Collected, named: list[Named]) -> Collected:
    """Return the same state, with each weight's states behind it, so that a rank saves most of them
    together."""
    states: dict[int, list[str]] = {}
    for key, optimizer, pairs in named:
        for name, p in pairs:
            full = [f"{key}.{name}.{s}" for s in optimizer.state.get(p, {})]
            states.setdefault(id(p), []).extend(n for n in full if n in live.tensors)
    order: dict[str, LiveTensor] = {}
    for name, t in live.tensors.items():
        order[name] = t
        if t.state == "param":
            order |= {n: live.tensors[n] for n in states.get(id(t.source), ())}
    return replace(live, tensors=order)
