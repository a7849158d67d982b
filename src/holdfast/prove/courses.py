"""What a training went through: a tick for each step of its first optimizer, on each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.prove.messages import Batch, BeforeStep, Item, LoadedNames, WasLoaded, distance

_WEIGHTS = {
    "param": 12.0, "state": 4.0, "batch": 4.0, "scheduler": 2.0, "group": 1.0, "average": 1.0,
    "counter": 1.0, "number": 1.0, "loss": 1.0, "scaler": 0.5, "buffer": 0.5,
}  # fmt: skip
"""What speaks for the step at which a process goes on.  Generators do not: they begin anew anyway."""
_WEIGHT_OF_FIRST = 3.0
"""Of parameters that are those of the first step: everything else may have been restored."""
_NEAR, _AS_OTHERS = 2.0, 6.0
_SAVE = 0.2
"""Share of the largest change of files that makes another one a save."""


@dataclass
class TrainingTick:
    """Everything at one step of the first optimizer, as it takes it."""

    items: dict[str, Item]
    batches: list[Batch] = field(default_factory=list)
    losses: list[Item] = field(default_factory=list)
    loaded: list[WasLoaded] = field(default_factory=list)
    """Objects that took a state_dict since the tick before."""
    names: dict[int, str] = field(default_factory=dict)
    trained: frozenset[int] = frozenset()
    others: frozenset[str] = frozenset()
    """Keys of what other optimizers step, which did so before this tick."""
    optimizers: tuple[str, ...] = ()
    """Names of the optimizers, in the order in which they stepped first."""


@dataclass
class Segment:
    """The ticks of one attempt of one process: it goes on from step `begin`."""

    rank: int
    begin: int
    ticks: list[TrainingTick] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    """Names of parameters in the course, by those that this process gives them."""

    def add(self, tick: TrainingTick) -> None:
        """Take the next tick, with the names of the course."""
        if self.renamed:
            tick.items = {self._of_course(k): item for k, item in tick.items.items()}
        self.ticks.append(tick)

    def _of_course(self, key: str) -> str:
        kind, _, name = key.partition(" ")
        if kind in ("param", "grad") and name in self.renamed:
            return f"{kind} {self.renamed[name]}"
        if kind == "state":
            for own, known in self.renamed.items():
                if name.startswith(f"{own}."):
                    return f"state {known}{name.removeprefix(own)}"
        return key


@dataclass
class SeenSave:
    """What was saved after a step."""

    step: int
    leaves: dict[str, Item]
    process: int = 0
    """A number of its own for each process that saves."""


@dataclass
class Life:
    """From a start of the command to its end."""

    segments: list[Segment] = field(default_factory=list)
    saves: list[SeenSave] = field(default_factory=list)
    """What was seen to be saved, with tensors."""
    notes: list[SeenSave] = field(default_factory=list)
    """What was seen to be saved besides: numbers."""
    written: list[tuple[int, int]] = field(default_factory=list)
    """Steps after which files had changed, and the bytes of these files."""
    world: int = 1
    status: int | None = None
    """Exit status of the command, where it ended by itself."""
    unseen: dict[str, str] = field(default_factory=dict)

    def saved(self) -> list[int]:
        """Return the steps after which something was saved, whatever it was saved with.

        Files that are small beside the largest are not a save: claims, notes, settings.
        """
        least = _SAVE * max((size for _, size in self.written), default=0)
        return sorted(
            {*(step for step, size in self.written if size >= least), *(s.step for s in self.saves)}
        )


class Gathering:
    """Puts together the ticks of one process, whose other optimizers step between those of the first."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._before: list[BeforeStep] = []
        self._loaded: list[WasLoaded] = []
        self._names: dict[int, str] = {}
        self._trained: set[int] = set()

    def add(self, step: BeforeStep, known: Sequence[str] = ()) -> TrainingTick | None:
        """Return the tick that is complete with this step, if it is one of the first optimizer.

        `known`: the names that optimizers had before, in the order in which they step.
        """
        if step.optimizer not in self.order:
            self.order.append(step.optimizer)
        step.items = self.of_course(step.items, step.optimizer, known)
        if step.optimizer != self.order[0]:
            self._before.append(step)
            return None
        items, others = dict(step.items), set()
        for one in self._before:
            for key, item in one.items.items():
                while key in items:
                    key += "'"
                items[key] = item
                others.add(key)
        steps = (*self._before, step)
        tick = TrainingTick(
            items, [b for s in steps for b in s.batches], [x for s in steps for x in s.losses],
            self._loaded, dict(self._names), frozenset(self._trained),
            frozenset(others), tuple((*known, *self.order[len(known) :])),
        )  # fmt: skip
        self._before, self._loaded = [], []
        return tick

    def of_course(
        self, items: dict[str, Item], optimizer: str, known: Sequence[str]
    ) -> dict[str, Item]:
        """Return the items of an optimizer that has stepped, with the name that it had in the course."""
        name = (*known, *self.order[len(known) :])[self.order.index(optimizer)]
        own, before = f"group {optimizer}.", f"group {name}."
        return {k.replace(own, before, 1): item for k, item in items.items()}

    def again(self, tick: TrainingTick) -> None:
        """Put what was loaded before a tick to the next one."""
        self._loaded = [*tick.loaded, *self._loaded]

    def note(self, message: WasLoaded | LoadedNames) -> None:
        """Take what was loaded, and what it is called."""
        if isinstance(message, WasLoaded):
            self._loaded.append(message)
        else:
            self._names |= message.names
            self._trained |= set(message.trained)


def kind_of(key: str) -> str:
    return key.partition(" ")[0]


def renamed(tick: TrainingTick, course: Sequence[TrainingTick]) -> dict[str, str]:
    """Return the names that parameters had in the course, if this process has others in the same places."""
    own = [k.partition(" ")[2] for k in tick.items if kind_of(k) == "param"]
    known = [k.partition(" ")[2] for k in course[0].items if kind_of(k) == "param"]
    new = [name for name in own if name not in known]
    gone = [name for name in known if name not in own]
    return dict(zip(new, gone, strict=True)) if len(new) == len(gone) else {}


def moving(course: Sequence[TrainingTick]) -> set[str]:
    """Return the keys whose values change in the course."""
    first: dict[str, int] = {}
    out = set()
    for tick in course:
        for key, item in tick.items.items():
            if first.setdefault(key, item.digest) != item.digest:
                out.add(key)
    if "draws torch" in first and "draws torch" not in out:
        out.discard("generator torch")  # nothing depends on what is drawn
    absent = {k for k in first if any(k not in tick.items for tick in course)}
    return out | absent


def begin_of(
    tick: TrainingTick, course: Sequence[TrainingTick], of_others: Iterable[int] = ()
) -> int:
    """Return after which step of the course a process went on whose first tick this is.

    The step at which the most is equal: the parameters first, then what else was restored, and the batch.
    `of_others`: after which steps other ranks went on.
    """
    absent = {k for t in course for k in t.others if k not in tick.items}
    keys = moving(course) - absent
    by_kind: dict[str, list[str]] = {}
    for key in keys:
        by_kind.setdefault(kind_of(key), []).append(key)
    scores = [sum(_evidence(tick, other, by_kind, at == 0)) for at, other in enumerate(course)]
    for at in set(of_others):
        scores[at] += _AS_OTHERS
    params = by_kind.get("param", [])
    if params and not any(_same(tick, other, params) for other in course):
        gaps = [_gap(tick, other, params) for other in course]
        scores[gaps.index(min(gaps))] += _NEAR
    best = max(scores)
    return max(at for at, score in enumerate(scores) if score == best)


def _evidence(
    tick: TrainingTick, other: TrainingTick, by_kind: Mapping[str, list[str]], is_first: bool
) -> Iterable[float]:
    for kind, keys in by_kind.items():
        weight = _WEIGHT_OF_FIRST if is_first and kind == "param" else _WEIGHTS.get(kind, 0.0)
        if weight:
            yield weight * _same(tick, other, keys) / len(keys)
    if other.losses and tick.losses[-1:] == other.losses[-1:]:
        yield _WEIGHTS["loss"]
    if other.batches and [b.digest for b in tick.batches[-1:]] == [
        b.digest for b in other.batches[-1:]
    ]:
        yield _WEIGHTS["batch"]


def _same(tick: TrainingTick, other: TrainingTick, keys: Iterable[str]) -> int:
    return sum(digest_of(tick, k) == digest_of(other, k) for k in keys)


def _gap(tick: TrainingTick, other: TrainingTick, keys: Iterable[str]) -> float:
    total = 0.0
    for key in keys:
        a, b = tick.items.get(key), other.items.get(key)
        if a is not None and b is not None and a.sketch and b.sketch:
            total += distance(a.sketch, b.sketch)
    return total


def digest_of(tick: TrainingTick, key: str) -> int | None:
    item = tick.items.get(key)
    return None if item is None else item.digest
