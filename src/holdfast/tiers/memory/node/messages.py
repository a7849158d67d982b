"""The messages to an agent, and its answers.  Sent as msgpack, one request one answer.

An answer is `{"ok": value}`, or the map of a `WireError`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from holdfast.base.wire import WireError

VERSION = 1
"""Version of the messages, and of what lies in shared memory.  An agent refuses processes of
another one."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """A message to `machine`."""


class Hello(Message, frozen=True):
    """A training process introduces itself."""

    job: str
    root: str
    run: int
    rank: int
    pid: int
    started: str
    """Start time from `holdfast.base.host.start_time`: tells the process from a later one of its number."""
    claim: bytes = b""
    flush_s: float = 0.0
    """Seconds after the last process died at which the newest snapshot goes to storage, by this
    claim; 0: never."""
    bytes_per_s: int = 0
    """Cap for each rank, on what protects and stores its images; 0: none."""
    host: str = ""
    """This node's address for other nodes."""
    budget: int = 0
    """Most bytes for the job; the agent's budget for all jobs is raised to it.  0: the agent's budget.  An
    agent that was started by hand keeps its own budget and host."""
    version: int = VERSION


class Take(Message, frozen=True):
    """Ask for memory for an image of `bytes` bytes; answered with a `Lease`."""

    job: str
    pid: int
    kind: str
    """`share`: a rank's image; `guard`: what it keeps for the others of its group."""
    rank: int
    attempt: str
    step: int
    bytes: int


class Ready(Message, frozen=True):
    """The memory of a lease is filled; answered with the digest of its table, once that is known."""

    job: str
    name: str
    attempt: str
    table: int
    """Offset at which the digest table begins, and the digested bytes end."""
    bytes: int


class Card(msgspec.Struct, frozen=True):
    """The name of an agent, and the address and token by which other nodes ask it about one job."""

    agent: str
    address: str
    token: str
    """Token of the job: it opens no other job."""
    fingerprint: str = ""
    """Fingerprint of its certificate, where it serves by TLS."""


class Member(msgspec.Struct, frozen=True):
    """A member of a group: its rank, its image, and the agent that holds it."""

    rank: int
    bytes: int
    table: int
    digest: str
    card: Card


Seen = tuple[int, int, bytes]


class Protect(Message, frozen=True):
    """All members of a group have their images: fill the memory of a lease with the guard of `rank`.

    Answered with the digest of its table."""

    job: str
    name: str
    attempt: str
    rank: int
    members: tuple[Member, ...]
    num_data: int
    num_parity: int
    table: int
    bytes: int
    begun: tuple[int, ...] = ()
    """Offset up to which each member's image is in the guard already, by member; empty: nothing
    is."""
    seen: tuple[Seen, ...] = ()
    """With `begun`: member, first chunk and digests of its chunks as they went into the guard.  Refused
    if the member's image has others."""


class Persist(Message, frozen=True):
    """Write a rank's image to storage; answered when it is durable there.

    `claim`: given to the agent of rank 0, which commits the step by itself if that rank dies before it says
    `Settled`; it waits `deadline_s` for the files of the others.
    """

    job: str
    attempt: str
    rank: int
    pid: int
    store: str
    key: str
    deadline_s: float
    claim: bytes = b""


class Settled(Message, frozen=True):
    """A training process has committed the durable step itself, or given it up."""

    job: str
    attempt: str


class Commit(Message, frozen=True):
    """All ranks have their part of a snapshot: it is the newest now."""

    job: str
    attempt: str
    step: int
    manifest: bytes
    cards: tuple[Card, ...] = ()
    """Cards of all agents that hold part of it."""
    run: int = 0
    """Run of the process that says so; one older than the job's is refused; 0: not checked."""


class Drop(Message, frozen=True):
    """A snapshot failed: what is still being filled for it is free."""

    job: str
    attempt: str


class Bye(Message, frozen=True):
    """A training process leaves; `finished`: its work is done.  Once rank 0's is, snapshots are no longer
    needed."""

    job: str
    pid: int
    finished: bool


class Finished(Message, frozen=True):
    """Rank 0, on another node, has left, and its work is done."""

    job: str
    run: int


class Ask(Message, frozen=True):
    """Ask what is held for a job; answered with `Held`."""

    job: str


class Status(Message, frozen=True):
    """Ask what is held for all jobs; answered with an `AgentReport`."""


class Clean(Message, frozen=True):
    """Free what dead jobs left: one job, or all of them.  Answered with the names freed."""

    job: str = ""


class Stay(Message, frozen=True):
    """Tell the agent not to leave by itself, as if it was started by hand."""

    budget: int = 0
    """Bytes that it may use from now on; 0: as many as before."""


class Stop(Message, frozen=True):
    """End the agent.  What it holds stays for the next one, unless `free`."""

    free: bool = False


class Made(Message, frozen=True):
    """The outcome of a `Make`."""

    job: str
    name: str
    error: str = ""


class Digested(Message, frozen=True):
    """The outcome of a `Digest`."""

    job: str
    name: str
    attempt: str
    digest: str
    error: WireError | None = None


class Wrote(Message, frozen=True):
    """The outcome of a `Write`."""

    job: str
    attempt: str
    rank: int
    error: WireError | None = None


class Gone(Message, frozen=True):
    """Training processes of a job have died; other processes may have their pids by now."""

    job: str
    pids: tuple[int, ...]


class Tick(Message, frozen=True):
    """Time has passed."""


class Lease(msgspec.Struct, frozen=True):
    """Memory to be filled: a file by its name below the job's directory."""

    name: str
    capacity: int


Phase = Literal["making", "empty", "filling", "ready"]


@dataclass(frozen=True)
class Slot:
    """A file in shared memory."""

    name: str
    capacity: int
    kind: str
    rank: int
    phase: Phase = "empty"
    attempt: str = ""
    step: int = 0
    bytes: int = 0
    table: int = 0
    digest: str = ""
    members: tuple[int, ...] = ()
    """Ranks of the group in order, if this is a guard."""
    num_data: int = 1
    num_parity: int = 0
    owner: int = 0
    """Process that fills it; 0 if it died, or gave it up, while this agent worked on it."""
    ask: int = 0
    """Request that waits for it: as long as it is not 0, this agent makes, digests or encodes it."""

    def emptied(self) -> Slot:
        return replace(self, phase="empty", ask=0)


class Held(msgspec.Struct, frozen=True):
    """The images that an agent holds of one job, and where it serves them."""

    card: Card
    directory: str
    images: tuple[Slot, ...]
    manifests: tuple[bytes, ...]
    peers: tuple[Card, ...] = ()
    """Agents that held part of the newest commit, as they were then."""
    newest: str = ""
    """The attempt of that commit."""
    run: int = 0
    """Newest run of the job that the agent has met."""


def fits(capacity: int, size: int) -> bool:
    """True if memory of `capacity` bytes serves for what needs `size`, and is not much too
    large."""
    return size <= capacity <= size * 5 // 4 + (1 << 20)


STORED, PROTECTED = "stored", "protected"
"""Kinds of work that take as long as storage and other nodes do."""


class JobReport(msgspec.Struct, frozen=True):
    """What is held for one job, for people to read."""

    job: str
    root: str
    run: int
    bytes: int
    images: int
    steps: tuple[int, ...]
    trainers: tuple[int, ...]
    since: float
    moved: dict[str, int] = {}
    """Bytes that were `STORED` and `PROTECTED`, since the agent started."""


class AgentReport(msgspec.Struct, frozen=True):
    """What is held for all jobs, for people to read."""

    pid: int
    address: str
    budget: int
    used: int
    fetched: int
    """Bytes that came from other nodes, since the agent started."""
    jobs: tuple[JobReport, ...]
    tls: bool = False


MESSAGES = (
    Hello | Take | Ready | Protect | Persist | Settled | Commit | Drop | Bye | Ask | Status | Clean
    | Stay | Stop
)  # fmt: skip
"""Messages that may come from other processes."""


def encode(value: Any) -> bytes:
    """Return the bytes that are sent for a message or an answer."""
    return msgspec.msgpack.encode(value)
