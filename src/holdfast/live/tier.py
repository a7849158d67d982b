"""What a session asks of a tier: one protocol, whose methods are the moments in the life of a run.

A tier is a place that a run keeps its state in, or a way of leading on from there.  A run has a list of
them, from the farthest to the nearest:

    the home behind the root    the root    memory of the nodes    records of every step

The session asks each of them, in this order, and for what ends or carries a save in the opposite one:

    a step       act > due > begin            the durable save, if one is due, goes first, and is carried by
                                              the nearest tier that can: check_save > carry > saving
    a restart    flush > shelf > trail        what there is; then the choice, by `candidates`
                 settle > adopt > announce    if the run went back to an older state
                 go_on > ready                between them what was restored is saved, if it has to be
    the end      leave, wait, unheard, close

All ranks call all methods in the same order, on the training thread.  What a tier does not define is
nothing to it.  Two modules of the session know tiers by name: `session/checkpointer.py`, whose arguments
switch them on, and `session/steering.py`, which tunes the frequencies of snapshots and records, and the
batches of records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Protocol

from holdfast.base.notices import Notices
from holdfast.core.checkpoint.claiming import Claim
from holdfast.core.group import Group
from holdfast.core.layout import Mesh
from holdfast.live.every import Every
from holdfast.live.saving import Save, Saver
from holdfast.live.saving.durable import Durable
from holdfast.live.state.named import Collected
from holdfast.live.state.recognising import State

if TYPE_CHECKING:
    from holdfast.live.restore.candidates import Candidate, Identity
    from holdfast.live.saving.attaching import Attached
    from holdfast.live.saving.progress import TierProgress, TierStatus
    from holdfast.live.saving.steps import Follower
    from holdfast.live.shelves import Shelf, Trail

Collect = Callable[[], Collected]
"""Reads the live state."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A durable save as the session asks for it."""

    step: int
    _: KW_ONLY
    must: bool
    """True if it is made whatever is in flight."""
    yields: bool = False
    """True if it is left out all the same when that waits for storage in vain."""
    live: bool = False
    """True if it is not to be made from a replica, which could be lost meanwhile."""
    attached: Attached | None = None


@dataclass(frozen=True, slots=True)
class Reached:
    """The state that a restore has reached."""

    state: Identity | None
    """Its run and step; None if there was nothing to restore."""
    save_bytes: int
    """Bytes of the full step that was read."""
    is_complete: Callable[[], bool]
    """Tells whether it is all of the live state.  Collective."""


@dataclass(frozen=True, slots=True)
class LogOfRun:
    """The records that a run writes beside its steps."""

    follower: Follower
    """Deletes records that are not needed, in the root or in another store."""
    flush: Callable[[float], None]
    """Waits, for these seconds at most, until every record so far is in storage."""
    upload_every_s: float


class RunParts(Protocol):
    """The parts of a run that its tiers share, and are made from."""

    group: Group
    state: Callable[[], State]
    """Returns the live state."""
    notices: Notices
    mesh: Mesh | None
    on_resize: dict[str, str]
    is_tuned: bool
    """True if frequencies follow measurements."""
    claim: Claim
    saver: Saver
    durable: Durable
    """The saves to the root."""

    def __iter__(self) -> Iterator[Tier]:
        """Yield the tiers that are made, from the farthest to the nearest."""
        ...


class Tier(Protocol):
    """A place, or a way, in which a run keeps its state."""

    name: str
    """Its name in `Restored.tier`, in events, and in the table that makes it."""
    news: list[str]
    """Messages that the user is to be told; whoever tells them takes them out."""
    progress: TierProgress | None = None
    """How far it has come; None if it has nothing to tell of that."""
    follows_steps: bool = False
    """True if it keeps something of every step, so that the number of none may be wrong."""
    carries: bool = False
    """True if durable saves go through it."""
    outlives: bool = False
    """True if it has work to do, and to tell of, when the script has dropped the Checkpointer; then it must
    hold no state of the training."""

    def copy_records(self, log: LogOfRun) -> None:
        """Copy records, too, if it copies steps to another place.  Called before the first step."""
        return

    # -- a step of the training -------------------------------------------------------------------

    def complete(self) -> None:
        """Note that the state has all that it will have, if it was handed over empty."""
        return

    def act(self, step: int, every: Every) -> bool:
        """Keep what the step has changed.  True if that has to lead on from a durable save, made now."""
        return False

    def due(self, step: int, every: Every) -> bool:
        """True if a save of its own is due."""
        return False

    def begin(self, collect: Collect, step: int, *, must: bool) -> Save:
        """Begin a save of its own.  Blocks as `Saver.begin`.  `must`: whatever is in flight."""
        raise AssertionError(f"{self.name} makes no saves of its own")

    # -- a durable save ---------------------------------------------------------------------------

    def check_save(self, step: int) -> None:
        """UsageError if there must not be a durable save under this number."""
        return

    def prepare(self, collect: Collect, every: Every) -> Save | None:
        """Have memory ready for the first save; return the rehearsal, if there is one.  If it `carries`."""
        return None

    def carry(self, collect: Collect, asked: Asked) -> Save:
        """Begin a durable save.  If it `carries`; blocks as `Saver.begin`."""
        raise AssertionError(f"{self.name} carries no saves")

    def saving(self, save: Save) -> None:
        """Note that a durable save has begun."""
        return

    # -- a restart --------------------------------------------------------------------------------

    def there(self) -> str:
        """Return what it holds of runs before that the claim of the root does not tell of, in words."""
        return ""

    def flush(self) -> None:
        """Wait until what was made is where a restart reads it."""
        return

    def shelf(self) -> Shelf | None:
        """Return the full steps that it holds; None if it never holds any.  Blocks."""
        return None

    def trail(self, shelves: Sequence[Shelf]) -> Trail | None:
        """Return what leads on from the steps on these shelves; None if nothing ever does.  Blocks."""
        return None

    def lacks(self, taken: Candidate, root: Shelf, *, num_replayed: int) -> bool:
        """True if it lacks a step that records will lead on from, and the root has to save that anew."""
        return False

    def has_moved_on(self) -> bool:
        """True if it has kept a step that this run has made, on this rank.  If it `follows_steps`."""
        return False

    def settle(self, limit_s: float) -> None:
        """Wait until nothing is under way; Deadline."""
        return

    def pause(self) -> AbstractContextManager[object]:
        """Return a block within which nothing of it commits: the run takes its homes anew."""
        return nullcontext()

    def adopt(self, claim: Claim, base: int | None) -> None:
        """Go on as another run, which went back to step `base`.  In the block of `pause`: does not wait."""
        return

    def announce(self, run: int) -> None:
        """Let those who keep what it makes know that it is another run now.  After the block."""
        return

    def go_on(self, reached: Reached, every: Every) -> bool:
        """Lead on from the restored state; True if it does."""
        return False

    def ready(self) -> None:
        """Get ready for the next step, after `go_on`, and when what had to be saved is being saved."""
        return

    # -- the end ----------------------------------------------------------------------------------

    def wait(self, limit_s: float | None) -> None:
        """Wait until what was made outlives this process.  Deadline or TimeoutError."""
        return

    def status(self) -> TierStatus | None:
        """Return how far it has come, at once, without asking anybody; None if it has nothing to tell."""
        return None if self.progress is None else self.progress.status

    def found(self, step: int, since: float | None) -> None:
        """Note that a restart went on from a step that it holds, since that time; None if unknown."""
        if self.progress is not None:
            self.progress.found(step, since)

    def unheard(self) -> list[str]:
        """Return what the user would be told, beside failed saves, if the run ended now."""
        return []

    def leave(self) -> None:
        """Wait for nobody any more: the training ends by an error."""
        return

    def close(self, limit_s: float, *, finished: bool, is_asked: bool) -> None:
        """Wait for what is pending, so long at most, and end.  `finished`: the training has come to its
        end; `is_asked`: the user has named the limit."""
        return
