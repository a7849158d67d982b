"""Why a resumed training is not where it would be: the causes that are told apart, in their order.

A rule looks at the first step at which the two are apart and at what was saved and loaded before; the first
rule that finds its own signs gives the cause.  `docs/reference/causes.md` says what to do about each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.prove.comparing import NOTHING, Apart, Deviation
from holdfast.prove.courses import Life, SeenSave, Segment, TrainingTick, digest_of, kind_of
from holdfast.prove.messages import Batch, Item, WasLoaded, distance


@dataclass(frozen=True)
class Finding:
    """The first thing that differs: when, where and why."""

    cause: str
    step: int
    rank: int
    what: str
    """The name of the value, with what it is and what it should be."""
    why: str


@dataclass(frozen=True)
class Evidence:
    """What is known of one resume."""

    apart: Apart
    life: Life
    """The life that the resume began."""
    saves: Sequence[SeenSave]
    """What was saved before it."""
    begin: int
    others: Mapping[int, Sequence[TrainingTick]]
    """The courses of all ranks."""
    notes: Sequence[SeenSave] = ()
    """Numbers that were saved before it, apart from tensors."""

    @property
    def loaded(self) -> TrainingTick:
        """The first tick of the resumed process, which has what was loaded."""
        segment = self._segment()
        return segment.ticks[0] if segment is not None else self.apart.found

    @property
    def renamed(self) -> Mapping[str, str]:
        """Names of parameters in the course, by those in the resumed process, where they are others."""
        segment = self._segment()
        return segment.renamed if segment is not None else {}

    def right_params(self) -> list[Deviation]:
        """Return the parameters that do not differ, and those that other ranks have at this step."""
        at = self.apart.step - 1
        others = [t[at] for r, t in self.others.items() if r != self.apart.rank and at < len(t)]
        same = [
            (k, i) for k, i in self.apart.expected.items.items()
            if digest_of(self.apart.found, k) == i.digest
        ]  # fmt: skip
        same += [pair for tick in others for pair in tick.items.items()]
        return [Deviation(k, i, i) for k, i in same if kind_of(k) == "param"]

    def _segment(self) -> Segment | None:
        return next((s for s in self.life.segments if s.rank == self.apart.rank), None)


def of_ranks(life: Life) -> Finding | None:
    """Find ranks that went on from different steps."""
    begins = {s.rank: s.begin for s in life.segments}
    if len(set(begins.values())) < 2:
        return None
    rank = min(begins, key=lambda r: begins[r])
    where = ", ".join(f"rank {r} from {begins[r]}" for r in sorted(begins)[:4])
    return Finding(
        "ranks-disagree", begins[rank] + 1, rank, "the step at which ranks went on", where
    )


def of_begin(
    segment: Segment,
    written: Sequence[int],
    saves: Sequence[SeenSave],
    course: Sequence[TrainingTick],
) -> Finding | None:
    """Find a resume that never happened, or one from an older step than the newest that was saved."""
    if segment.begin == 0 and (written or any(save.step for save in saves)):
        after = max([*written, *(s.step for s in saves)])
        return Finding(
            "no-resume", 1, segment.rank, "the step at which training went on: 0",
            f"something was saved after step {after}, and the first step again is step 1",
        )  # fmt: skip
    by_step = Counter(step for step, _ in {(save.step, save.process) for save in saves})
    whole = [save for save in saves if by_step[save.step] == max(by_step.values())]
    newest = max((_step_of(save, course) for save in whole), default=0)
    if newest > segment.begin:
        return Finding(
            "older-step", segment.begin + 1, segment.rank,
            f"the step at which training went on: {segment.begin} instead of {newest}",
            f"step {newest} had been saved, and nothing was being written any more when it was killed",
        )  # fmt: skip
    return None


def _step_of(save: SeenSave, course: Sequence[TrainingTick]) -> int:
    """The step whose state a save has, by the values in it; 0 if it has none of the training."""
    digests = {leaf.digest for leaf in save.leaves.values()}
    best, most = 0, 0
    for at, tick in enumerate(course):
        count = sum(
            i.digest in digests
            for k, i in tick.items.items()
            if kind_of(k) in ("param", "state") and not i.text and k not in tick.others
        )
        if count > most:
            best, most = at, count
    return best


def cause_of(evidence: Evidence) -> Finding:
    """Name the cause of a difference."""
    for rule in _RULES:
        finding = rule(evidence)
        if finding is not None:
            return finding
    one = evidence.apart.differences[0]
    return _finding(evidence, "unexplained", one, "nothing that was observed before it differs")


def _untrained(e: Evidence) -> Finding | None:
    params = e.apart.of("param")
    if not params or not e.apart.is_first:
        return None
    if any(name.split(".")[-3:-2] == ["params"] for name in e.renamed):
        why = "the optimizer steps tensors that are in no module any more"
        return _finding(e, "untrained-object", params[0], why)
    return _loaded_right(e, "param", params)


def _saved_wrong(e: Evidence) -> Finding | None:
    """What was restored is what was saved, and that was not the value of its step and rank."""
    if not e.apart.is_first or not e.saves:
        return None
    newest = e.saves[-1].step
    leaves = [(p, x) for s in e.saves if s.step == newest for p, x in s.leaves.items()]
    for one in e.apart.differences:
        name = one.key.rpartition(".")[2]
        saved = {x.digest for path, x in leaves if not x.text or path.rpartition(".")[2] == name}
        is_known = one.expected is NOTHING or one.expected.digest in saved
        if is_known or kind_of(one.key) in ("generator", "counter", "batch", "loss", "grad"):
            continue
        rank = _rank_with(e, one)
        if rank is not None and not _are_replicas(e, [one]):
            return _finding(
                e, "not-in-checkpoint", one, f"what was saved of it is that of rank {rank}"
            )
        steps = [
            n for n, t in enumerate(e.apart.course) if digest_of(t, one.key) == one.found.digest
        ]
        expected = e.apart.expected.items.items()
        names = [k for k, i in expected if i.digest == one.found.digest and not i.text]
        if one.found.digest in saved and (steps or names):
            what = f"the value of step {steps[-1]}" if steps else names[0].partition(" ")[2]
            return _finding(e, "not-in-checkpoint", one, f"what was saved of it is {what}")
    return None


def _rank_with(e: Evidence, one: Deviation) -> int | None:
    """Another rank that has, at this step of the course, what was found."""
    at = e.apart.step - 1
    for rank, course in e.others.items():
        is_other = rank != e.apart.rank and at < len(course)
        if is_other and digest_of(course[at], one.key) == one.found.digest:
            return rank
    return None


def _weights(e: Evidence) -> Finding | None:
    params = e.apart.of("param")
    if not params or not e.apart.is_first:
        return None
    one = params[0]
    if _are_replicas(e, params):
        return _finding(
            e, "replicas-differ", one, "all ranks had the same values before, and now do not"
        )
    if all(_is_rounded(d) for d in params):
        return _finding(e, "low-precision", one, _ROUNDED)
    if (
        all(d.expected is not NOTHING for d in params)
        and not _is_any_saved(e, params)
        and _is_any_saved(e, e.right_params())
    ):
        why = "no state that was saved has it, though it has others"
        return _finding(e, "not-in-checkpoint", one, why)
    total = sum(kind_of(k) == "param" for k in e.apart.expected.items)
    return _finding(
        e, "weights", one, f"{len(params)} of {total} parameters are not those of step {e.begin}"
    )


def _states(e: Evidence) -> Finding | None:
    states = e.apart.of("state")
    if not states or not e.apart.is_first:
        return None
    one = next((d for d in states if not d.expected.text), states[0])
    if all(d.found is NOTHING for d in states):
        loaded = [x for x in e.loaded.loaded if x.kind == "group" and x.items["states"].text != "0"]
        brought = {
            x.owner: int(x.items["states"].text) for x in loaded if x.owner in e.loaded.trained
        }
        kept = {k.rpartition(".")[0] for k in e.apart.found.items if kind_of(k) == "state"}
        names = {e.loaded.names.get(owner) for owner in brought}
        is_lost = sum(brought.values()) > len(kept)
        if is_lost and names & {*e.apart.found.optimizers[:1], *e.loaded.optimizers[:1]}:
            why = "the optimizer had loaded its states, and lost them again"
            return _finding(e, "overwritten", one, why)
        if any(x.owner not in e.loaded.trained for x in loaded):
            why = "a state_dict was loaded into an optimizer that is not the one that steps"
            return _finding(e, "untrained-object", one, why)
        why = (
            "the optimizer began without its states"
            if kept
            else "the optimizer began without states"
        )
        return _finding(e, "fresh-optimizer", one, why)
    tensors = [d for d in states if not d.expected.text]
    if tensors and all(_is_rounded(d) for d in tensors):
        return _finding(e, "low-precision", one, _ROUNDED)
    if one.found is not NOTHING and _is_at_first(e, one):
        return _finding(e, "fresh-optimizer", one, "it is back at its first value")
    return _finding(
        e, "fresh-optimizer", one, f"the optimizer's states are not those of step {e.begin}"
    )


def _swapped(e: Evidence) -> Finding | None:
    if not e.apart.is_first:
        return None
    owner = {
        i.digest: k
        for k, i in e.apart.expected.items.items()
        if kind_of(k) == "state" and not i.text
    }
    for one in e.apart.of("state"):
        other = owner.get(one.found.digest)
        if other is not None and other != one.key and not one.found.text:
            return _finding(
                e, "swapped-moments", one, f"it is {other.partition(' ')[2]} of the saved run"
            )
    return None


def _accumulation(e: Evidence) -> Finding | None:
    found, expected = len(e.apart.found.losses), len(e.apart.expected.losses)
    if not e.apart.is_first or found >= expected or not e.apart.of("grad"):
        return None
    return _finding(
        e, "accumulation", e.apart.of("grad")[0],
        f"{found} backward passes instead of {expected} made this step: gradients that were accumulated "
        "before the save are in no state",
    )  # fmt: skip


def _settings(e: Evidence) -> Finding | None:
    groups = e.apart.of("group")
    if not groups:
        return None
    if not e.apart.is_first:
        why = "it was right after the resume, and moves otherwise than in the whole run"
        is_by_hand = not _has_scheduler(e)
        why += ": what the script sets it from is other" if is_by_hand else ""
        return _finding(e, "not-in-checkpoint" if is_by_hand else "scheduler", groups[0], why)
    schedulers = e.apart.of("scheduler")
    one = next((d for d in groups if not d.key.endswith((".lr", ".initial_lr"))), groups[0])
    setting = one.key.rpartition(".")[2]
    if setting not in ("lr", "initial_lr", "momentum", "betas") or not _has_scheduler(e):
        if (right := _loaded_right(e, "group", [one])) is not None:
            return right
        if _is_written_since(e, one):
            why = "a state_dict had brought another value, and this was written over it"
            return _attributes(e) or _finding(e, "overwritten", one, why)
        why = (
            "it is back at its first value"
            if _is_at_first(e, one)
            else "it is neither saved nor first value"
        )
        return _finding(e, "groups-reset", one, why)
    if schedulers and (right := _loaded_right(e, "scheduler", schedulers[:1])) is not None:
        return right
    loads = [x.kind for x in e.loaded.loaded if x.kind in ("group", "scheduler")]
    if "scheduler" not in loads and not schedulers:
        why = "no state_dict was loaded into a scheduler"
    elif schedulers:
        why = f"the scheduler has {_said(schedulers[0])}"
    elif "group" in loads[loads.index("scheduler") :]:
        why = "the scheduler was restored before the optimizer, whose state_dict then set it anew"
    else:
        why = "the scheduler was made, or restored, in another order than the optimizer, and set it anew"
    return _finding(e, "scheduler", one, why)


def _schedulers(e: Evidence) -> Finding | None:
    found = e.apart.of("scheduler")
    if not found:
        return None
    one = found[0]
    right = _loaded_right(e, "scheduler", [one])
    return right or _finding(e, "scheduler", one, _first_or_not(e, one))


def _scaler(e: Evidence) -> Finding | None:
    found = e.apart.of("scaler")
    return _finding(e, "scaler", found[0], _first_or_not(e, found[0])) if found else None


def _attributes(e: Evidence) -> Finding | None:
    """Averages, numbers and counters, and buffers that nothing saves."""
    kinds = ("average", "number", "counter", "copies", "tensor", "buffer")
    for one in e.apart.of(*kinds[: None if e.apart.is_first else -1]):
        if one.kind == "counter" and e.apart.of("batch"):
            continue  # what counts batches differs with them
        is_itself = one.key.endswith(".training") or one.kind == "tensor"
        if one.found.text and {"loss", "generator"} <= e.apart.kinds and not is_itself:
            continue  # a generator changes what is trained
        if (
            one.kind in ("buffer", "tensor")
            and e.apart.kinds & {"param", "batch", "generator"}
            and e.apart.moves(one.key)
            and not _is_from_before(e, one)
        ):
            continue
        if one.kind == "buffer" and _are_replicas(e, [one]):
            why = "other ranks have the value that this one should have"
            return _finding(e, "replicas-differ", one, why)
        if one.kind != "tensor" and _is_rounded(one):
            return _finding(e, "low-precision", one, _ROUNDED)
        if one.kind == "tensor" and _is_setting_elsewhere(e, one):
            why = (
                "it was the tensor of an optimizer's setting, which has another one since the load"
            )
            return _finding(e, "scheduler", one, why)
        return _not_restored(e, one)
    return None


def _is_setting_elsewhere(e: Evidence, one: Deviation) -> bool:
    """Whether a tensor always was what a group of an optimizer has, and this goes on right."""
    return any(
        all(digest_of(t, k) == digest_of(t, one.key) for t in e.apart.course)
        for k in e.apart.expected.items
        if kind_of(k) == "group"
    )


def _not_restored(e: Evidence, one: Deviation) -> Finding:
    """A value of the script that is not what it was: lost by the save, or by the resume."""
    if _is_saved(e, one):
        right = _loaded_right(e, "param", [one])
        if right is not None:
            return replace(right, cause="overwritten")
        return _finding(e, "begun-anew", one, "it was saved, and nothing loaded it")
    where = {"average": "an average", "buffer": "a buffer"}
    thing = "a number" if one.found.text else where.get(one.kind, "an attribute")
    return _finding(
        e, "not-in-checkpoint", one, f"it is {thing}, and no state that was saved has it"
    )


def _batches(e: Evidence) -> Finding | None:
    found = e.apart.of("batch")
    if not found:
        return None
    used = e.apart.used
    ours = [Batch(-1, 0, [])] * used + e.apart.found.batches
    pairs = zip(ours[-used:], e.apart.expected.batches[-used:], strict=True)
    first, expected = next(pair for pair in pairs if pair[0].digest != pair[1].digest)
    one = replace(found[0], found=Item(1, _at(first)), expected=Item(2, _at(expected)))
    if any(b.digest == expected.digest for b in e.apart.found.batches[:-used]):
        return _finding(
            e, "batches-left-out", one, "the resumed run was given it, and passed over it"
        )
    given = [b for tick in e.apart.course for b in tick.batches]
    at = next(n for n, b in enumerate(given) if b is expected)
    places = [n for n, b in enumerate(given) if b.digest == first.digest]
    is_order_fixed = any(
        (b.digest, b.place) == (expected.digest, expected.place) for b in given[:at]
    )
    if places and (first.place != expected.place or is_order_fixed):
        of_epoch = [n for n in places if 0 < at - n <= expected.place]
        near = min(of_epoch or places, key=lambda n: abs(n - at))
        if given[near].place == expected.place:
            why = "it is the batch at this place of another epoch"
            return _finding(e, "sampler-order", one, why)
        if near < at:
            return _finding(e, "batches-repeated", one, f"it was given {at - near} batches before")
        return _finding(e, "batches-left-out", one, f"{near - at} batches are never seen")
    if first.place != expected.place:
        seen = {s for b in given[max(0, at - expected.place) : at] for s in b.samples}
        if seen & set(first.samples):
            why = "samples of this epoch come again, in another order"
            return _finding(e, "batches-repeated", one, why)
        known = {s for b in given for s in b.samples}
        if set(first.samples) <= known:
            return _finding(
                e, "batches-left-out", one, "the iterator of the epoch began at another place"
            )
    known = {s for rank in e.others.values() for t in rank for b in t.batches for s in b.samples}
    own = [d for d in e.apart.of("generator") if d.found.text and d.found.text == d.expected.text]
    if own or (e.apart.of("generator") and not set(first.samples) & known):
        which = (own or e.apart.of("generator"))[0]
        return _finding(e, "generator", which, "the order, or the samples, are drawn with it")
    counts = [d for d in e.apart.of("counter") if _is_at_first(e, d)]
    if counts and not set(first.samples) & known:
        return _not_restored(e, counts[0])  # the samples themselves are made otherwise
    torchs = next((d for d in e.apart.differences if d.key == "generator torch"), None)
    if expected.is_drawn and torchs is not None:
        return _finding(e, "generator", torchs, "the order is drawn with it, and was another one")
    why = "the same place in the epoch, and other samples: another order"
    return _finding(e, "sampler-order", one, why)


def _generators(e: Evidence) -> Finding | None:
    found = e.apart.of("generator")
    if not found:
        return None
    which = found[0].key.partition(" ")[2]
    why = "its state was not restored, or drawn from since"
    if e.apart.kinds <= {"generator"}:
        why += "; nothing else differs yet"
    return _finding(
        e, "generator", replace(found[0], found=Item(0), expected=Item(0)), f"{why} ({which})"
    )


def _replicas(e: Evidence) -> Finding | None:
    """After a right first step, ranks whose parameters were equal go apart."""
    params = e.apart.of("param")
    if params and _are_replicas(e, params):
        return _finding(
            e, "replicas-differ", params[0], "ranks that had the same values now do not"
        )
    return None


_ROUNDED = "its values are those rounded to 16 bits"
_RULES: tuple[Callable[[Evidence], Finding | None], ...] = (
    _untrained, _swapped, _saved_wrong, _weights, _states, _accumulation, _settings, _schedulers, _scaler,
    _attributes, _batches, _generators, _replicas,
)  # fmt: skip


def _are_replicas(e: Evidence, params: Sequence[Deviation]) -> bool:
    """Whether other ranks have what this one should have: all had the same, and they still do."""
    if len(e.others) < 2:
        return False
    for rank, course in e.others.items():
        if rank == e.apart.rank or e.apart.step > len(course):
            continue
        if any(digest_of(course[e.apart.step - 1], d.key) != d.expected.digest for d in params):
            return False
    begins = {s.rank: s for s in e.life.segments}
    at = e.apart.step - 1 - e.begin
    return any(
        at < len(s.ticks) and all(digest_of(s.ticks[at], d.key) == d.expected.digest for d in params)
        for rank, s in begins.items() if rank != e.apart.rank
    )  # fmt: skip


def _loaded_right(e: Evidence, kind: str, differences: Sequence[Deviation]) -> Finding | None:
    """Find what became of values that a state_dict did bring; None if none did."""
    one = differences[0]
    expected = {d.expected.digest for d in differences}
    for load in e.loaded.loaded:
        if kind != "param" and not _may_have(e, load, one):
            continue
        if load.kind == kind and expected <= {i.digest for i in load.items.values()}:
            if load.owner not in e.loaded.trained and kind == "param":
                name = e.loaded.names.get(load.owner, "another object")
                why = f"it was loaded into {name}, which the loop does not train"
                return _finding(e, "untrained-object", one, why)
            why = "it had been loaded, and was overwritten afterwards"
            return _finding(e, "overwritten", one, why)
    return None


def _may_have(e: Evidence, load: WasLoaded, one: Deviation) -> bool:
    """Whether a value may be of the object that took a state_dict: no other one has its name."""
    own = f"{one.kind} {e.loaded.names.get(load.owner, '')}."
    return one.key.startswith(own) or not any(k.startswith(own) for k in e.loaded.items)


def _is_written_since(e: Evidence, one: Deviation) -> bool:
    """Whether an optimizer had loaded a setting, and it is another one now."""
    name = ".".join(one.key.rsplit(".", 2)[1:])
    loads = [x.items for x in e.loaded.loaded if x.kind == "group" and _may_have(e, x, one)]
    return bool(loads) and name in loads[-1] and loads[-1][name].digest != one.found.digest


def _is_any_saved(e: Evidence, differences: Sequence[Deviation]) -> bool:
    """Whether a save before has the right values of one of these."""
    digests = {d.expected.digest for d in differences}
    return any(leaf.digest in digests for save in e.saves for leaf in save.leaves.values())


def _is_rounded(one: Deviation) -> bool:
    a, b = one.found.sketch, one.expected.sketch
    is_near = (
        a is None or b is None or distance(a, b) < 0.02 * (1e-30 + distance(b, [0.0] * len(b)))
    )
    return one.found.narrow and not one.expected.narrow and is_near


def _is_at_first(e: Evidence, one: Deviation) -> bool:
    return digest_of(e.apart.course[0], one.key) == one.found.digest


def _is_from_before(e: Evidence, one: Deviation) -> bool:
    """Whether a buffer has a value that no forward pass of this step explains: one that is older."""
    return any(digest_of(t, one.key) == one.found.digest for t in e.apart.course[: e.begin])


def _first_or_not(e: Evidence, one: Deviation) -> str:
    return "it is back at its first value" if _is_at_first(e, one) else "it was restored otherwise"


def _is_saved(e: Evidence, one: Deviation) -> bool:
    """Whether a save before has a value of this name, or a tensor with its values, if no parameter had."""
    name = one.key.rpartition(".")[2]
    at = e.apart.course[: e.apart.step]
    digests = {digest_of(t, one.key) for t in at}
    digests -= {i.digest for t in at for k, i in t.items.items() if kind_of(k) == "param"}
    for save in (*e.saves, *e.notes):
        for path, leaf in save.leaves.items():
            if leaf.digest in digests and (
                not one.expected.text or path.rpartition(".")[2] == name
            ):
                return True
    return False


def _has_scheduler(e: Evidence) -> bool:
    return any(kind_of(k) == "scheduler" for k in e.apart.expected.items)


def _at(batch: Batch) -> str:
    return (
        "none" if batch.place < 0 else f"batch {batch.place} of its iterator, {batch.digest:016x}"
    )


def _finding(e: Evidence, cause: str, one: Deviation, why: str) -> Finding:
    return Finding(cause, e.apart.step, e.apart.rank, _said(one), why)


def _said(one: Deviation) -> str:
    """A value's name, what it is, and what it should be."""
    name = one.key.partition(" ")[2] or one.kind
    kind = {"grad": "gradient of ", "generator": "generator ", "loss": "", "batch": ""}.get(
        one.kind, ""
    )
    if one.found.text or one.expected.text:
        found, expected = one.found.text or "other values", one.expected.text or "a tensor"
        return f"{kind}{name}: {found} instead of {expected}"
    a, b = one.found.sketch, one.expected.sketch
    if a is not None and b is not None:
        share = distance(a, b) / (distance(b, [0.0] * len(b)) or 1.0)
        return f"{kind}{name}: differs by {share:.1e} of its length"
    return f"{kind}{name}: {'nothing' if one.found is NOTHING else 'other values'}"
