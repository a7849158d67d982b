"""The log of a root: its records, and each recorded step as a checkpoint.  Torch-free."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.base.errors import (
    FormatError,
    HoldfastError,
    NotFound,
    Unavailable,
    UnsupportedVersion,
)
from holdfast.base.events import emit
from holdfast.core.checkpoint.lineage import Owns
from holdfast.core.checkpoint.names import (
    AND_LOG,
    RootKeys,
    Saved,
    run_of_log,
    step_prefix,
)
from holdfast.core.checkpoint.recorded import parse_segment, segments
from holdfast.core.checkpoint.reserved_space import missing_bytes
from holdfast.core.format.checking import check
from holdfast.core.format.manifest import FORMAT_VERSION, FileEntry, Manifest
from holdfast.core.store import Reader, Store
from holdfast.core.store.contract import reads_of
from holdfast.core.store.views import JoinedStore, PartReader, ViewStore
from holdfast.tiers.records.segment import (
    Applied,
    Identity,
    Record,
    SegmentHeader,
    SegmentPlan,
    plan_key,
    read_header,
    read_plan,
)
from holdfast.tiers.records.space import by_age, newest_of
from holdfast.tiers.records.writer_registry import ended

if TYPE_CHECKING:
    from holdfast.core.checkpoint.opened import Checkpoint


class LogSegment(msgspec.Struct, frozen=True):
    """A segment in the log whose header is sound."""

    key: str
    start: int
    """Byte of the file at which its records begin."""
    header: SegmentHeader


def leads_on(store: Store, step: int, run: int | None) -> bool:
    """True if a record that was not given up leads on from `step` of `run`, or of any run."""
    log = open_log(store)[0]
    parents = {s.parent for s in log.steps.values() if not log.is_given_up(s.identity)}
    return any(at == step and run in (None, of_run) for of_run, at in parents)


def read_headers(store: Store, keys: Iterable[str]) -> list[LogSegment]:
    """Headers of those segments that can be read.  Damaged ones are left out; UnsupportedVersion and
    Unavailable are raised."""
    segments = []
    for key in keys:
        try:
            segments.append(read_segment(store, key))
        except NotFound:
            continue  # deleted since it was listed
        except (UnsupportedVersion, Unavailable):
            raise  # it may be sound
        except HoldfastError as error:
            emit("log.damaged", key=key, error=str(error))
    return segments


def read_segment(store: Store, key: str) -> LogSegment:
    """A segment by its header.  NotFound, Corrupt, FormatError, UnsupportedVersion."""
    reader = store.open(key)
    try:
        header, start = read_header(reader, key)
    finally:
        reader.close()
    _, _, _, rank = parse_segment(key) or (0, 0, 0, -1)
    if header.rank != rank:
        raise FormatError(f"a segment of rank {header.rank}", key=key)
    return LogSegment(key, start, header)


def tidy_log(store: Store) -> None:
    """Delete the records that no committed step needs, as `mark_log` chooses them."""
    with RootKeys(store, below=AND_LOG) as keys:
        mark_log(keys, keys.saved)


def mark_log(
    keys: RootKeys, saved: list[Saved], owns: Owns = lambda _: True, *, max_bytes: int = 0
) -> None:
    """Mark for deletion the records that no step in `saved` needs.  `keys`: of the steps and the log.

    * Records that the caller does not own stay, and are not counted.
    * Records of later runs than the newest that has saved stay: their full save may be on its way.
    * The entry of a writer goes once a later run has saved, unless the writer is known to be at work.
    * Above half of `max_bytes`, the oldest records that the newest state does not need go, until half is
      free.  Else, if a disk has no room for another full save, such records go until half of them is gone,
      or more if more room is missing.
    """
    if not saved:
        return
    oldest, saving = min(s.step for s in saved), newest_of(saved)[0]
    kept: dict[str, int] = {}
    """Length of each segment that stays; negative where it is unknown and not needed."""
    plans: list[tuple[int, str]] = []
    others: set[int] = set()
    """Runs with segments that the caller does not own: their plans stay."""
    sizes = {key: keys.sizes[key] for key in keys.below("log/")}
    keys.marked += ended(keys.store, sizes, saving)
    if max_bytes and any(size < 0 for size in sizes.values()):
        sizes = dict(keys.store.entries("log/"))
    for key, size in sizes.items():
        parsed, run = parse_segment(key), run_of_log(key)
        if run is None or not owns(Saved(run, 0 if parsed is None else parsed[1])):
            others |= set() if run is None or parsed is None else {run}
            continue  # not ours
        if parsed is None:
            plans += [(run, key)] if key.endswith(".json") else []
        elif parsed[2] <= oldest and run <= saving:
            keys.marked.append(key)
        else:
            kept[key] = size
    runs = others | {run_of_log(key) or 0 for key in kept}
    for run, key in plans:
        if run not in runs and run < max(runs, default=saving):
            keys.marked.append(key)
    if max_bytes and sum(kept.values()) > max_bytes // 2:
        _make_room(keys, saved, kept, max_bytes // 2)
    elif kept and (missing := missing_bytes(keys.store, keys.known.save_bytes, keys.marked)):
        sizes = {key: size for key, size in keys.store.entries("log/") if key in kept}
        total = sum(sizes.values())
        _make_room(keys, saved, sizes, min(total // 2, total - missing))


def _make_room(keys: RootKeys, saved: list[Saved], sizes: dict[str, int], most: int) -> None:
    """Mark the oldest segments that the newest state does not need, until at most `most` bytes are left."""
    left = sum(sizes.values())
    replayed = _replayed(keys.store, saved, sizes)
    for size, key, needed in by_age(sizes.items(), newest_of(saved)):
        if left > most and not needed and key not in replayed:
            keys.marked.append(key)
            left -= size


def _replayed(store: Store, saved: list[Saved], kept: Iterable[str]) -> set[str]:
    """Segments that lead to the newest state, if runs have recorded since the newest full step's: if such a
    run went back, they may be older than that step."""
    run, _ = newest_of(saved)
    if all((run_of_log(key) or 0) <= run for key in kept):
        return set()
    _, steps = newest_history(open_log(store)[0], saved)
    return {segment.key for step in steps for segment in step.segments}


def open_log(store: Store) -> tuple[Log, list[str]]:
    """All records of a root, and the keys of segments and plans that cannot be read."""
    keys = segments(store)
    sound = read_headers(store, keys)
    log = Log(store, sound, keys)
    plans = log.unread_plans()
    log.leave_out(plans)
    unread = {*keys} - {one.key for one in sound}
    damaged = {*plans} - log.deleted
    return log, sorted(damaged | {key for key in unread if _is_there(store, key)})


def _is_there(store: Store, key: str) -> bool:
    """True if a file is still there: a training beside this may delete it after it was listed."""
    try:
        store.size(key)
    except NotFound:
        return False
    return True


def newest_history(log: Log, saved: Iterable[Saved]) -> tuple[Saved, list[RecordedStep]]:
    """The full step among `saved` from which records lead to the newest state, and these records: what a
    restart takes."""

    def newness(way: tuple[Saved, list[RecordedStep]]) -> tuple[Identity, int]:
        base, steps = way
        return (steps[-1].identity if steps else (base.run, base.step)), base.step

    return max(((base, log.after((base.run, base.step))) for base in saved), key=newness)


def leading(store: Store, saved: Collection[Saved]) -> int:
    """The full step with which a restart begins: after a run went back, it may be older than the newest."""
    newest = max(saved)
    if all((run_of_log(key) or 0) <= newest.run for key in segments(store)):
        return newest.step
    return newest_history(open_log(store)[0], saved)[0].step


@dataclass
class RecordedStep:
    """One recorded step, with the records of all ranks."""

    run: int
    step: int
    parent: Identity
    world: int
    plan: str
    records: dict[int, tuple[LogSegment, Record]] = field(default_factory=dict)
    """Each rank's record, and the segment that it is in."""

    @property
    def identity(self) -> Identity:
        return self.run, self.step

    @property
    def segments(self) -> list[LogSegment]:
        """The segments that its records are in."""
        return [segment for segment, _ in self.records.values()]

    @property
    def is_whole(self) -> bool:
        return len(self.records) == self.world

    def applied(self, first: int = 0) -> dict[str, dict[int, Applied]]:
        """The steps of each optimizer, by key and rank, in the order in which rank `first` made them."""
        applied: dict[str, dict[int, Applied]] = {}
        for rank, (_, record) in sorted(
            self.records.items(), key=lambda one: (one[0] != first, one)
        ):
            for one in record.applied:
                applied.setdefault(one.key, {})[rank] = one
        return applied

    def groups(self, key: str, rank: int) -> tuple[tuple[str, ...], ...]:
        return self.records[rank][0].header.groups.get(key, ())

    def names(self, key: str, rank: int) -> set[str]:
        """An optimizer's parameters on a rank."""
        return {name for group in self.groups(key, rank) for name in group}

    def ranks_without(self, key: str) -> set[int]:
        """The ranks that did not make an optimizer's step."""
        return {
            rank
            for rank, (_, record) in self.records.items()
            if all(one.key != key for one in record.applied)
        }

    def with_gradient(self, key: str) -> set[str]:
        """Parameters that had a gradient, on whatever rank had them.  FormatError if ranks differ."""
        have: set[str] = set()
        lack: set[str] = set()
        for rank, one in self.applied().get(key, {}).items():
            have |= self.names(key, rank) - set(one.missing)
            lack |= set(one.missing)
        if both := have & lack:
            raise FormatError(
                f"step {self.step}: {min(both)!r} has a gradient on one rank and none on another",
                step=self.step,
            )
        return have

    def unchanged(self) -> set[str]:
        """Names of recorded tensors that the step left unchanged on every rank."""
        return set.intersection(*(set(r.unchanged) for _, r in self.records.values()))


class Log:
    """The recorded steps for which every rank's record is there."""

    def __init__(
        self, store: Store, segments: Collection[LogSegment], keys: Collection[str]
    ) -> None:
        """`keys`: of all segments in one listing; `segments`: those of them that can be read."""
        self.store = store
        self._unread = {*keys} - {one.key for one in segments}
        self._begun: dict[int, int] = {}
        """The lowest step of each run that leads on from an earlier run's state, or may do so."""
        for run, first, _, _ in filter(None, map(parse_segment, self._unread)):
            self._note_beginning(run, first)
        for one in segments:
            for record in one.header.records:
                if record.parent[0] < one.header.run:
                    self._note_beginning(one.header.run, record.step)
        self._plans: dict[tuple[int, str], Manifest] = {}
        self._read: dict[tuple[int, str], SegmentPlan] = {}
        self._left_out: set[str] = set()
        self.deleted: set[str] = set()
        """Keys of plans that were deleted with their segments after the listing."""
        steps: dict[tuple[int, int, str], RecordedStep] = {}
        for segment in segments:
            h = segment.header
            for record in h.records:
                step = steps.setdefault(
                    (h.run, record.step, h.plan),
                    RecordedStep(h.run, record.step, record.parent, h.world, h.plan),
                )
                if (record.parent, h.world) == (step.parent, step.world) and h.rank < h.world:
                    step.records[h.rank] = (segment, record)
        self.steps = {s.identity: s for s in steps.values() if s.is_whole}

    def _note_beginning(self, run: int, step: int) -> None:
        self._begun[run] = min(step, self._begun.get(run, step))

    def copies(self, steps: Collection[RecordedStep]) -> list[str]:
        """Keys of these steps' files that are read from the home behind the root, because they are damaged
        or missing in the root."""
        if not isinstance(self.store, JoinedStore):
            return []
        keys = {plan_key(step.run, step.plan) for step in steps}
        keys |= {segment.key for step in steps for segment in step.segments}
        return sorted(keys & (self.store.damaged | self.store.missing))

    @cached_property
    def follows(self) -> Mapping[Identity, list[RecordedStep]]:
        """The steps that lead on from each state."""
        follows: dict[Identity, list[RecordedStep]] = {}
        for step in self.steps.values():
            if plan_key(step.run, step.plan) not in self._left_out:
                follows.setdefault(step.parent, []).append(step)
        return follows

    def unread_plans(self) -> list[str]:
        """Keys of the plans that cannot be read: without its plan a record is only bytes."""
        unread = []
        for run, name in sorted({(s.run, s.plan) for s in self.steps.values()}):
            key = plan_key(run, name)
            try:
                self._read[run, name] = self._plan(run, name)
            except (UnsupportedVersion, Unavailable):
                raise  # it may be sound
            except HoldfastError as error:
                unread.append(key)
                if isinstance(error, NotFound) and not self._has_segments(run, name):
                    self.deleted.add(key)
                else:
                    emit("log.damaged", key=key, error=str(error))
        return unread

    def _has_segments(self, run: int, plan: str) -> bool:
        """True if any segment with records of this plan is there still."""
        steps = (step for step in self.steps.values() if (step.run, step.plan) == (run, plan))
        keys = {segment.key for step in steps for segment in step.segments}
        return any(_is_there(self.store, key) for key in keys)

    def leave_out(self, plans: Iterable[str]) -> None:
        """Leave out all records of these plans, given by key: `after` does not go through them."""
        self._left_out.update(plans)
        for run, step in self.steps:
            if plan_key(run, self.steps[run, step].plan) in self._left_out:
                self._note_beginning(run, step)

    def after(self, base: Identity) -> list[RecordedStep]:
        """The steps that lead on from a state, in order.

        Where two runs went on from one state, the later run's records count, even if they are damaged: the
        earlier run's were given up.
        """
        chain: list[RecordedStep] = []
        at, seen, is_history = base, {base}, self.is_given_up(base)
        while ways := [step for step in self.follows.get(at, ()) if step.identity not in seen]:
            step = max(ways, key=lambda step: step.identity)
            if self.is_given_up(step.identity) and not is_history:
                break
            chain.append(step)
            at = step.identity
            seen.add(at)
        return chain

    def is_given_up(self, state: Identity) -> bool:
        """True if a later run went back to before a state: it has recorded that number or a lower one."""
        run, step = state
        return any(later > run and first <= step for later, first in self._begun.items())

    def newer_steps(self, state: Identity) -> list[int]:
        """Steps that were recorded after a state, by its run or a later one, and were not given up."""
        unread = filter(None, map(parse_segment, self._unread))
        found = {*self.steps, *((run, last) for run, _, last, _ in unread)}
        return sorted(one[1] for one in found if one > state and not self.is_given_up(one))

    def open(
        self,
        step: RecordedStep,
        extras: dict[str, Any],
        per_rank: dict[str, Any],
        store: Store | None = None,
    ) -> Checkpoint:
        """A recorded step as a checkpoint, whose digests are verified when it is read.  `store`: where its
        files are read, if not in the log's store."""
        shell = self._manifest(step)
        files = tuple(_file(step, rank) for rank in sorted(step.records))
        manifest = msgspec.structs.replace(
            shell, step=step.step, files=files, extras=extras, per_rank=per_rank
        )
        check(manifest)
        for name in ("placement", "by_name"):  # the same for all records of these sizes
            manifest.__dict__[name] = getattr(shell, name)
        places = {
            step_prefix(step.step) + _path(step, rank): (segment, record)
            for rank, (segment, record) in step.records.items()
        }
        from holdfast.core.checkpoint.opened import Checkpoint

        return Checkpoint(LogStore(store or self.store, places), manifest)

    def plan(self, step: RecordedStep) -> SegmentPlan:
        """The plan of a step's records.  NotFound, Corrupt, FormatError, UnsupportedVersion."""
        key = (step.run, step.plan)
        if key not in self._read:
            self._read[key] = self._plan(step.run, step.plan)
        return self._read[key]

    def _plan(self, run: int, name: str) -> SegmentPlan:
        """Read a plan, or its copy in the second of two homes if it is damaged in the first."""
        try:
            return read_plan(self.store, run, name)
        except UnsupportedVersion:
            raise
        except FormatError as error:
            if not isinstance(self.store, JoinedStore):
                raise
            plan = read_plan(self.store.second, run, name)
            emit("log.damaged", key=plan_key(run, name), error=str(error))
            self.store.damaged.add(plan_key(run, name))
            return plan

    def _manifest(self, step: RecordedStep) -> Manifest:
        """The manifest of a step's plan, with the lengths of this step's packed tensors."""
        shell = self._plan_manifest(step)
        sizes = {name: n for _, record in step.records.values() for name, n in record.sizes.items()}
        if not sizes:
            return shell
        tensors = tuple(
            msgspec.structs.replace(t, shape=(sizes[t.name],)) if t.name in sizes else t
            for t in shell.tensors
        )
        return msgspec.structs.replace(shell, tensors=tensors)

    def _plan_manifest(self, step: RecordedStep) -> Manifest:
        """What the manifests of all steps of a plan share."""
        key = (step.run, step.plan)
        if key not in self._plans:
            plan = self.plan(step)
            self._plans[key] = Manifest(
                FORMAT_VERSION, 0, step.run, "log", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), {},
                plan.mesh, plan.chunk_bytes, plan.algorithm, plan.shardings, plan.tensors,
                plan.aliases, (), {}, {},
            )  # fmt: skip
        return self._plans[key]


def _path(step: RecordedStep, rank: int) -> str:
    return f"log-{step.run}/r{rank:05d}.safetensors"


def _file(step: RecordedStep, rank: int) -> FileEntry:
    record = step.records[rank][1]
    return FileEntry(
        rank,
        _path(step, rank),
        record.bytes,
        record.data,
        record.extras,
        record.table,
        record.digest,
    )


class LogStore(ViewStore):
    """The images of records in segments, by key."""

    shows = "a log of records"

    def __init__(self, store: Store, places: dict[str, tuple[LogSegment, Record]]) -> None:
        self.url = store.url
        self.read_bytes, self.read_threads = reads_of(store)
        self._store = store
        self._places = places

    def _place(self, key: str) -> tuple[LogSegment, Record]:
        if key not in self._places:
            raise NotFound("no such record", key=key)
        return self._places[key]

    def open(self, key: str) -> Reader:
        segment, record = self._place(key)
        once = getattr(self._store, "open_once", self._store.open)
        return PartReader(once(segment.key), segment.start + record.at)

    def size(self, key: str) -> int:
        return self._place(key)[1].bytes
