"""Compares what a process went through with the course of the training, and finds the first difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.prove.courses import Segment, TrainingTick, digest_of, kind_of
from holdfast.prove.messages import Item, distance

NOTHING = Item(0, "nothing")
ORDER = (
    "param", "state", "group", "scheduler", "scaler", "average", "number", "counter", "copies", "tensor",
    "batch", "loss", "buffer", "grad", "generator",
)  # fmt: skip
"""Kinds of values, what is restored before what follows from it."""
_IN_BOTH = (
    "average", "number", "scheduler", "scaler", "counter", "copies", "tensor", "generator",
)  # fmt: skip
"""Kinds of which one is compared where both have it: objects are found where the script holds them."""
_ONLY_IF_MOVING = ("counter", "copies", "tensor", "generator")
"""Kinds of which one that never changes in the course says nothing of it."""


@dataclass(frozen=True)
class Deviation:
    """A value that is not the one of the course."""

    key: str
    found: Item
    expected: Item

    @property
    def kind(self) -> str:
        return kind_of(self.key)


@dataclass
class Tolerance:
    """What two runs of a training that is not deterministic by itself may be apart."""

    share: float
    """Of the way that a tensor has come since the step at which the runs part."""
    noisy: set[str] = field(default_factory=set)
    """Kinds of values that two runs alike do not have in common."""


@dataclass
class Apart:
    """The first step at which a process is not where the course was."""

    step: int
    rank: int
    is_first: bool
    """True for the first step after the resume, of each optimizer: what differs was not restored."""
    differences: list[Deviation]
    found: TrainingTick
    course: Sequence[TrainingTick]

    @property
    def expected(self) -> TrainingTick:
        return self.course[self.step - 1]

    @property
    def kinds(self) -> set[str]:
        return {d.kind for d in self.differences}

    @property
    def order(self) -> tuple[int, int]:
        """What comes first of all ranks: the earliest step, then what follows from nothing else."""
        return self.step, ORDER.index(self.differences[0].kind)

    def moves(self, key: str) -> bool:
        """Whether a value changes in the course."""
        return len({digest_of(t, key) for t in self.course}) > 1

    @property
    def used(self) -> int:
        """Batches that the step was made of: an evaluation before the first one is no part of it."""
        number = len(self.expected.batches)
        return fewest_batches(self.course, number) if self.is_first else number

    def of(self, *kinds: str) -> list[Deviation]:
        """Return the differences of some kinds."""
        return [d for d in self.differences if d.kind in kinds]


def fewest_batches(course: Sequence[TrainingTick], most: int) -> int:
    """Return how many batches a step is made of, where evaluations between steps take some, too."""
    return min([most, *(len(t.batches) for t in course if t.batches)])


def first_apart(
    segment: Segment,
    course: Sequence[TrainingTick],
    keys: set[str],
    tolerance: Tolerance | None = None,
) -> Apart | None:
    """Return where a process first left the course of its rank; None if it never did.

    `keys`: what moves in the run that was never killed.
    """
    consequence: Apart | None = None
    for number, tick in enumerate(segment.ticks):
        at = segment.begin + number
        if at >= len(course):
            return None
        late = course[at].others if not number else frozenset()
        used = len(course[at].batches)
        if not number:
            used = fewest_batches(course, used)
        found = [
            d
            for d in _differences(tick, course[at], keys, used)
            if (d.key not in late or d.found is not NOTHING)
            and not (tolerance is not None and _is_near(d, course[segment.begin], tolerance))
        ]
        if not found:
            consequence = None
            continue
        found.sort(key=lambda d: ORDER.index(d.kind))
        is_first = not number or (number == 1 and all(d.key in tick.others for d in found))
        apart = Apart(at + 1, segment.rank, is_first, found, tick, course)
        if consequence is not None or apart.kinds != {"grad"}:
            return consequence or apart
        consequence = (
            apart  # gradients that are made within the step are seen too early to count alone
        )
    return None


def _differences(
    tick: TrainingTick, other: TrainingTick, moves: set[str], used: int
) -> Iterator[Deviation]:
    for key in [*other.items, *(k for k in tick.items if k not in other.items)]:
        if digest_of(tick, key) == digest_of(other, key):
            continue
        kind, is_in_both = kind_of(key), key in tick.items and key in other.items
        if kind not in ORDER or (kind in _IN_BOTH and not is_in_both):
            continue
        if kind in _ONLY_IF_MOVING and key not in moves:
            continue
        yield Deviation(key, tick.items.get(key, NOTHING), other.items.get(key, NOTHING))
    for number in range(1, used + 1):
        found = tick.batches[-number].digest if number <= len(tick.batches) else 0
        if found != other.batches[-number].digest:
            yield Deviation("batch ", Item(found), Item(other.batches[-number].digest))
            break
    fewest = len(tick.losses) if other.others and not tick.others else len(other.losses)
    for number in range(1, min(fewest, len(other.losses)) + 1):
        loss = tick.losses[-number] if number <= len(tick.losses) else NOTHING
        if loss.digest != other.losses[-number].digest:
            yield Deviation("loss ", loss, other.losses[-number])
            break


def _is_near(one: Deviation, begin: TrainingTick, tolerance: Tolerance) -> bool:
    """Whether a value that two runs alike do not have in common is as near as these may be."""
    if one.kind not in tolerance.noisy:
        return False
    a, b, start = one.found.sketch, one.expected.sketch, begin.items.get(one.key)
    if a is None or b is None or start is None or start.sketch is None:
        return True  # what has no sketch is judged by what it leads to
    way = distance(b, start.sketch)
    return distance(a, b) <= tolerance.share * way + 1e-6 * distance(b, [0.0] * len(b))


def whole_of(ticks: Mapping[int, TrainingTick], key: str) -> list[float] | None:
    """Return the sketch of a whole tensor from those of its parts on all ranks; None without one."""
    items = [t.items[key] for _, t in sorted(ticks.items()) if key in t.items]
    if not items:
        return None
    if not any(i.sums for i in items):
        return items[0].sketch
    sketches = [i.sketch for i in items if i.sketch is not None]
    return [sum(column) for column in zip(*sketches, strict=True)] if sketches else None


@dataclass(frozen=True)
class Elsewhere:
    """How far a run on other ranks is from the course at its last step."""

    step: int
    compared: int
    worst: float
    """The largest distance of a parameter, as a share of the way that it has come since the resume."""
    where: str
    samples: int
    """Samples that were given by one and not by the other."""


def elsewhere(
    found: Mapping[int, Sequence[TrainingTick]],
    begin: int,
    course: Mapping[int, Sequence[TrainingTick]],
) -> Elsewhere:
    """Compare parameters as wholes, and samples as a set, from step `begin` on."""
    length = min([len(t) for t in found.values()] + [len(t) - begin for t in course.values()])
    last = {r: t[length - 1] for r, t in found.items()}
    expected = {r: t[begin + length - 1] for r, t in course.items()}
    first = {r: t[begin] for r, t in course.items()}
    worst, where, compared = 0.0, "", 0
    for key in {k for t in expected.values() for k in t.items if kind_of(k) == "param"}:
        a, b, start = whole_of(last, key), whole_of(expected, key), whole_of(first, key)
        if a is None or b is None or start is None:
            continue
        compared += 1
        way = max(distance(b, start), 1e-6 * distance(b, [0.0] * len(b)), 1e-30)
        if distance(a, b) / way > worst:
            worst, where = distance(a, b) / way, key
    ours = _samples(found, 0, length - 1, course, begin)
    theirs = _samples(course, begin, length - 1, course, begin)
    return Elsewhere(begin + length - 1, compared, worst, where, len(ours ^ theirs))


def _samples(
    ticks: Mapping[int, Sequence[TrainingTick]], begin: int, length: int,
    course: Mapping[int, Sequence[TrainingTick]], at: int,
) -> set[int]:  # fmt: skip
    """The samples of the batches that the steps used: of each step, as many batches as the course has."""
    used = len(next(iter(course.values()))[at].batches)
    return {
        sample
        for rank in ticks.values()
        for tick in rank[begin : begin + length]
        for batch in (tick.batches[-used:] if used else [])
        for sample in batch.samples
    }
