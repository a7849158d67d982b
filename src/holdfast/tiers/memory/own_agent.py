"""What one rank of a job asks of the agent of its node.

An agent may die at any time; its successor adopts the memory that it finds.  So before a rank asks an agent
for memory, it says hello, and tells it the newest commit if the predecessor did not hear of that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from holdfast.base.errors import AgentUnreachable, HoldfastError, SegmentLost, UsageError
from holdfast.base.events import emit
from holdfast.base.host import start_time
from holdfast.base.threads import in_threads
from holdfast.base.wire import decode_msgpack
from holdfast.core.codec.digest import hexdigest
from holdfast.core.group import Group
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.client import Client
from holdfast.tiers.memory.node.effects import FREED
from holdfast.tiers.memory.node.fetch import Peer
from holdfast.tiers.memory.node.home import last_agent
from holdfast.tiers.memory.node.inventory import ELSEWHERE_S, ELSEWHERE_THREADS, elsewhere
from holdfast.tiers.memory.options import Memory

if TYPE_CHECKING:
    from holdfast.live.saving.durable import Durable


SHORT_S = 10.0
"""Seconds that a message may take that only frees memory early, and could be left out."""


class OwnAgent:
    """This rank's connection to the agent of its node."""

    def __init__(
        self, durable: Durable, options: Memory, news: list[str], *, job: str, host: str
    ) -> None:
        """Start an agent unless there is one, and say hello.  UsageError if it serves without the TLS that
        is asked for.  `news`: takes warnings for the user."""
        self.job = job
        self.news = news
        self.client = Client(deadline_s=durable.saver.deadline_s)
        self.budget_bytes = 0
        """Bytes of memory that this job may take on this node; 0: as many as there are."""
        self._durable = durable
        self._options = options
        self._host = host
        self._unsettled = set[str]()
        """Attempts of durable steps that are over, of which the agent was not told yet."""
        self._untold: w.Commit | None = None
        """The commit that the others know of and this node's agent does not yet; None if there is none."""
        self.card: w.Card
        """Name of the agent, and the address and token by which others reach it."""
        self.hello()

    @property
    def rank(self) -> int:
        return self._durable.group.rank

    def hello(self) -> None:
        """Start an agent unless there is one, and introduce this rank to it."""
        self._start()
        try:
            self._introduce()
        except AgentUnreachable:  # it has just left
            self._start()
            self._introduce()
        if self._options.tls and not self.card.fingerprint:
            raise UsageError(
                "Memory(tls=True): the agent of this node serves without TLS",
                hint="`holdfast agent stop`, then start again; by hand: `holdfast agent start --tls`",
            )

    def _start(self) -> None:
        # without this job's budget: the agent serves other jobs, too, and learns a larger one by `Hello`
        self.client.start(self._host, tls=self._options.tls)

    def _introduce(self) -> None:
        pid, options, durable = os.getpid(), self._options, self._durable
        message = w.Hello(
            self.job,
            durable.store.url,
            durable.run,
            self.rank,
            pid,
            start_time(pid) or "0",
            msgspec.json.encode(durable.steps.claim),
            options.flush_after_s or 0.0,
            options.bytes_per_s,
            self._host,
            options.budget_bytes,
        )
        card = self.client.ask(message, w.Card)
        if not self.budget_bytes or card != self.card:
            of_all_jobs = self.client.ask(w.Status(), w.AgentReport).budget
            self.budget_bytes = min(of_all_jobs, options.budget_bytes or of_all_jobs)
        self.card = card

    def _greet(self, step: int) -> None:
        """Say hello, as the agent may be another one than before, and tell it the newest commit if it was
        not told."""
        before = self.card
        self.hello()
        if before != self.card:
            self._tell_of_successor(step)
        self.settle()
        if self._untold is not None and self._untold.run == self._durable.run:
            self.client.ask(self._untold)
        self._untold = None

    def _tell_of_successor(self, step: int) -> None:
        emit("agent.restarted", step=step)
        here = last_agent(self.client.root)
        pid, ended = here.before
        kept = "" if ended == FREED else ", with the snapshots that it held"
        self.news.append(
            f"the agent of this node, process {pid}, {ended or 'was killed, or crashed'}: process "
            f"{here.pid} has taken its place{kept}"
        )

    # -- one snapshot -----------------------------------------------------------------------------

    def lease(self, kind: str, attempt: str, step: int, size: int) -> w.Lease:
        """Return a lease of memory of the agent; if the agent has died, of a new one."""
        message = w.Take(self.job, os.getpid(), kind, self.rank, attempt, step, size)
        if kind == "share":
            self._greet(step)
        try:
            lease: w.Lease = self.client.ask(message, w.Lease)
        except (AgentUnreachable, SegmentLost):
            self._greet(step)
            lease = self.client.ask(message, w.Lease)
        return lease

    def commit(self, commit: w.Commit) -> None:
        """Tell the agent here, or its successor, of a commit that other ranks know of, before it gives out
        memory again."""
        self._untold = commit
        try:
            self.client.ask(commit)
        except AgentUnreachable:
            self.hello()
            self._tell_of_successor(commit.step)
            self.client.ask(commit)
        self._untold = None

    def settle(self, *attempts: str) -> None:
        """Tell the agent which durable steps are committed or given up.  If it does not answer, it is told
        when it does: until then it keeps their images, and would commit them after this process."""
        self._unsettled.update(attempts)
        with suppress(HoldfastError):
            for attempt in sorted(self._unsettled):
                self.client.ask(w.Settled(self.job, attempt), timeout_s=SHORT_S)
                self._unsettled.discard(attempt)

    def adopt(self, commit: w.Commit) -> None:
        """Tell the agent that the restored snapshot is the newest here, too: its memory must not be given
        out."""
        self._untold = commit
        with suppress(HoldfastError):
            self.client.ask(commit)
            self._untold = None

    def drop(self, attempt: str) -> None:
        """Free the memory of a snapshot that failed.  Best effort: an agent that is gone has nothing to
        drop."""
        with suppress(HoldfastError):
            self.client.ask(w.Drop(self.job, attempt), timeout_s=SHORT_S)

    # -- all that it holds ------------------------------------------------------------------------

    def held(self, timeout_s: float = 0.0) -> w.Held:
        """Return what the agent holds of this job."""
        held: w.Held = self.client.ask(w.Ask(self.job), w.Held, timeout_s=timeout_s)
        return held

    def ask_all(self) -> tuple[list[w.Held], str]:
        """Return what every agent holds of this job, and the name of this node's.  Collective."""
        group, mine = self._durable.group, None
        self.client.ask_again()
        with suppress(HoldfastError):
            self.hello()
            mine = self.held(self._durable.saver.deadline_s)
        agent = mine.card.agent.encode() if mine is not None else b""
        first = group.all_gather(agent).index(agent)  # one rank answers for its node
        helds = gather_held(group, self.job, mine if self.rank == first else None)
        return helds, mine.card.agent if mine is not None else ""

    def say_bye(self, *, finished: bool) -> None:
        """Say bye to the agent.  If it has died and left memory to be freed, start a successor for that."""
        try:
            self._leave(finished)
        except AgentUnreachable:
            is_kept = (self.client.root / "jobs" / self.job).exists()
            if not finished or not is_kept or self.client.look() != "nobody":
                raise
            self._start()
            self._leave(finished)

    def _leave(self, finished: bool) -> None:
        """Say bye.  Rank 0, if finished, also tells all other agents: until then their snapshots may be
        needed."""
        self.settle()
        others = self.held(SHORT_S).peers if finished and self.rank == 0 else ()
        self.client.ask(w.Bye(self.job, os.getpid(), finished), timeout_s=SHORT_S)
        others = tuple(card for card in others if card.agent != self.card.agent)
        tell_finished(self.job, self._durable.run, others)


# -- what the agents of all nodes hold ------------------------------------------------------------
# Manifests are large, and many agents know the same ones: each manifest is sent to each rank once, and all
# other messages name it by its digest.


Manifests = dict[bytes, bytes]
"""Encoded manifests, by the digest of their bytes."""


def gather_held(group: Group, job: str, mine: w.Held | None) -> list[w.Held]:
    """Return what all agents hold, also those of nodes that the job no longer runs on, if they
    still answer.

    `mine`: what this node's agent holds, given on one of its ranks.  Collective.
    """
    own = manifests_of([mine] if mine is not None else [])
    briefs = group.all_gather(w.encode(_brief(mine)) if mine is not None else b"")
    helds = {r: decode_msgpack(data, w.Held) for r, data in enumerate(briefs) if data}
    sender_of: dict[bytes, int] = {}
    for rank, held in helds.items():
        for digest in held.manifests:
            sender_of.setdefault(digest, rank)
    known = {
        digest: group.broadcast(own[digest] if rank == group.rank else None, rank)
        for digest, rank in sender_of.items()
    }
    here = [_whole(held, known) for held in helds.values()]
    return here + _held_elsewhere(group, job, here, known)


def tell_finished(job: str, run: int, cards: Iterable[w.Card]) -> None:
    """Tell agents of other nodes that rank 0 has left, with its work done.  An agent out of reach keeps its
    snapshots."""

    def tell(card: w.Card) -> None:
        with suppress(HoldfastError):
            Peer(card, ELSEWHERE_S).tell(f"/v1/{job}/finished/{run}")

    in_threads(tell, list(cards), ELSEWHERE_THREADS)


def _held_elsewhere(group: Group, job: str, here: list[w.Held], known: Manifests) -> list[w.Held]:
    """Return what agents that are not among `here` hold; rank 0 asks them."""

    def ask() -> bytes:
        found = elsewhere(job, here)
        news = {d: m for d, m in manifests_of(found).items() if d not in known}
        return w.encode((list(map(_brief, found)), news))

    kind = tuple[list[w.Held], dict[bytes, bytes]]
    found, news = decode_msgpack(group.from_rank0(ask), kind)
    return [_whole(held, known | news) for held in found]


def manifests_of(helds: Iterable[w.Held]) -> Manifests:
    return {_digest(data): data for held in helds for data in held.manifests}


def _digest(manifest: bytes) -> bytes:
    return hexdigest(manifest).encode()


def _brief(held: w.Held) -> w.Held:
    """Return `held` with digests in the place of its manifests."""
    return msgspec.structs.replace(held, manifests=tuple(map(_digest, held.manifests)))


def _whole(held: w.Held, known: Manifests) -> w.Held:
    """Return `held` with manifests in the place of their digests."""
    return msgspec.structs.replace(held, manifests=tuple(known[d] for d in held.manifests))
