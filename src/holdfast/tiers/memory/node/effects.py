"""What an agent is to do, as values, which `agent` carries out in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.base.errors import HoldfastError
from holdfast.base.wire import WireError
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.jobs import State
from holdfast.tiers.memory.node.messages import Slot

STOPPED = "was stopped by `holdfast agent stop`"
FREED = "was stopped by `holdfast agent stop --free`, which freed what it held"
"""How an agent ends that is told to."""


@dataclass(frozen=True)
class Reply:
    ask: int
    value: Any


@dataclass(frozen=True)
class Refuse:
    ask: int
    error: WireError


@dataclass(frozen=True)
class Make:
    """Create a file with all its memory; answered by `Made`."""

    job: str
    name: str
    capacity: int


@dataclass(frozen=True)
class Note:
    """Write a slot's header, before any later effect."""

    job: str
    slot: Slot


@dataclass(frozen=True)
class Digest:
    """Digest a slot up to its table, write the table; answered by `Digested`."""

    job: str
    slot: Slot


@dataclass(frozen=True)
class Encode:
    """Fill a guard from the images of its group; answered by `Digested`."""

    job: str
    slot: Slot
    order: w.Protect


@dataclass(frozen=True)
class Write:
    """Write an image to storage; answered by `Wrote`."""

    slot: Slot
    order: w.Persist


@dataclass(frozen=True)
class CommitLate:
    """Wait for the files of all ranks, and commit the durable step in the place of rank 0."""

    order: w.Persist


@dataclass(frozen=True)
class KeepManifest:
    job: str
    attempt: str
    step: int
    manifest: bytes
    cards: tuple[w.Card, ...] = ()


@dataclass(frozen=True)
class KeepPeers:
    """Keep the cards of the agents that hold part of the newest commit: they change when one dies and
    has a successor."""

    job: str
    cards: tuple[w.Card, ...]


@dataclass(frozen=True)
class Remove:
    """Remove files of a job: slots by name, and manifests by attempt."""

    job: str
    names: tuple[str, ...] = ()
    attempts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RemoveJob:
    job: str


@dataclass(frozen=True)
class Answer:
    """Answer with what is held of a job, or with a report on all jobs if `job` is empty.  Only `agent`
    knows addresses and reads manifests."""

    ask: int
    job: str


@dataclass(frozen=True)
class Greet:
    """Answer with the agent's card, and note who belongs to a job."""

    ask: int
    job: str


@dataclass(frozen=True)
class Exit:
    """End the agent."""

    why: str
    """How it ends, for jobs that go on: `was stopped by ...`."""


Effect = (
    Reply | Refuse | Make | Note | Digest | Encode | Write | CommitLate
    | KeepManifest | KeepPeers | Remove | RemoveJob | Answer | Greet | Exit
)  # fmt: skip
Result = tuple[State, list[Effect]]


def refuse(ask: int, error: HoldfastError) -> Refuse:
    """Return the effect that answers a request with an error."""
    return Refuse(ask, WireError.of(error))
