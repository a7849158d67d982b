"""The agent process: one per node and user, in a session of its own.

It listens on a Unix socket for the processes of this node and on TCP for other nodes'; `servers` checks who
may ask.  `machine` decides what to do, and this module does it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from holdfast.base.address import own_address
from holdfast.base.background import weigh_session
from holdfast.base.errors import HoldfastError, OutOfSpace
from holdfast.base.events import counters
from holdfast.base.host import start_time
from holdfast.base.memory_limit import memory_bytes
from holdfast.base.wire import WireError
from holdfast.core.format.manifest import decode_manifest
from holdfast.tiers.memory.node import effects as e
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node import state_machine
from holdfast.tiers.memory.node.home import (
    SOCKET,
    AgentNote,
    home,
    last_agent,
    make_home,
    note_agent,
)
from holdfast.tiers.memory.node.jobs import Job
from holdfast.tiers.memory.node.messages import Slot
from holdfast.tiers.memory.node.persist import commit_late, persist
from holdfast.tiers.memory.node.protect import Encoding, protect
from holdfast.tiers.memory.node.remains import dead_trainers, held_alone
from holdfast.tiers.memory.node.requests import Requests
from holdfast.tiers.memory.node.segment import Segments, job_note
from holdfast.tiers.memory.node.servers import local_app, peer_app
from holdfast.tiers.memory.node.throttle import Throttle
from holdfast.tiers.memory.node.tls import serving
from holdfast.tiers.memory.node.visitors import Visitors, most_strangers

log = logging.getLogger("holdfast.agent")

TICK_S = 1.0
THREADS = {"memory": 2, "peers": 4, "storage": 4, "waiting": 4, "gone": 1}
"""Number of threads, by what they wait for: a slow peer or a full disk must not keep others from
their memory."""
BACKGROUND_POOLS = ("storage", "waiting", "gone")
"""The pools with low priority.  Snapshots, and with them the training, wait for the other pools: these have
the training's priority, as has the thread that answers."""
WEIGH_S = 0.2
"""Seconds after which the priority of the session is set again, if the kernel did not take it."""
IDLE_S = 60.0
"""Seconds without a request after which a connection of another node is closed: a node that vanishes closes
none itself."""


class Agent:
    """The state, and its effects on the world.  All decisions are made on the event loop."""

    def __init__(self, segments: Segments, host: str, budget: int, *, stay: bool) -> None:
        self.segments = segments
        self.card = w.Card(secrets.token_hex(8), host, "")
        self._secret = secrets.token_bytes(32)
        self.state = state_machine.adopted(budget, segments.find(), time.monotonic(), stay=stay)
        self.stopped = asyncio.Event()
        self.ended = ""
        """How this agent ends; empty until it does."""
        self._requests = Requests()
        self._pools = {
            name: ThreadPoolExecutor(
                number, f"holdfast-{name}", partial(os.nice, 19 if name in BACKGROUND_POOLS else 0)
            )
            for name, number in THREADS.items()
        }
        self._yields = False
        """True while the training goes on: in a restart it would wait for whatever this process does."""
        self._num_behind = 0
        """Number of images that are being written to storage."""
        self._weight = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._encodings: list[Encoding] = []
        self._throttles: dict[tuple[str, int, int], Throttle] = {}
        """Throttles by job, rank and cap: one for all that is done for a rank."""
        self._freed: Counter[str] = Counter()
        """Number of times that each job was freed."""

    def end(self, why: str) -> None:
        """Let the agent end; `why` is told to the jobs that go on."""
        self.ended = self.ended or why
        self.stopped.set()

    # -- deciding ---------------------------------------------------------------------------------

    async def ask(self, message: w.Message) -> bytes:
        """Return the answer to a message, encoded."""
        if isinstance(message, w.Clean):  # a job that has ended just now is dead already
            self._notice_dead()
        return await self._requests.answered(partial(self.tell, message))

    def _note_training(self, message: w.Message) -> None:
        """Note if training goes on: it does from its first snapshot until ranks leave, die, or ask what
        is held."""
        if isinstance(message, w.Take):
            self._yields = True
        elif isinstance(message, (w.Ask, w.Bye, w.Gone)):
            self._yields = False

    def _weigh(self) -> None:
        """Set the priority of this whole session, for kernels that weigh sessions against each other.

        It is low only while images go to storage and no snapshot is being made: for a snapshot the training
        may wait.
        """
        yields = self._yields and self._num_behind > 0 and not self.state.is_filling
        weight = 19 if yields else 0
        if weight == self._weight:
            return
        if weigh_session(weight):
            self._weight = weight
        else:
            asyncio.get_running_loop().call_later(WEIGH_S, self._weigh)

    def tell(self, message: w.Message, ask: int = 0) -> None:
        """Take in a message: change the state, and carry out the effects."""
        self._note_training(message)
        before, undone = self.state, False
        self.state, effects = state_machine.step(self.state, message, time.monotonic(), ask)
        failed = ""
        for effect in effects:
            if failed and isinstance(effect, e.Reply):
                effect = e.refuse(effect.ask, OutOfSpace(failed))
            elif undone:
                continue
            try:
                self._do(effect)
            except OSError as error:  # a note that cannot be written: shared memory is full
                failed = f"{self.segments.root}: {error.strerror or error}"
                log.error("%s", failed)
                if isinstance(effect, e.Answer):
                    self._do(e.refuse(effect.ask, OutOfSpace(failed)))
                if isinstance(effect, e.KeepManifest):  # the previous commit stays the newest
                    self.state, undone = before, True
        self._weigh()

    def _do(self, effect: e.Effect) -> None:
        match effect:
            case e.Reply(ask, value):
                self._requests.reply(ask, {"ok": value})
            case e.Refuse(ask, error):
                log.warning("refused: %s: %s", error.kind, error.message)
                self._requests.reply(ask, error)
            case e.Answer(ask, job):
                self._requests.reply(ask, {"ok": self.held(job) if job else self.report()})
            case e.Greet(ask, job):
                self._note_job(self.state.jobs[job])
                self._requests.reply(ask, {"ok": self.card_of(job)})
            case e.Note(job, slot):
                self.segments.note(job, slot)
            case e.KeepManifest(job, attempt, step, manifest, cards):
                if cards:
                    self.segments.keep_peers(job, cards)
                self.segments.keep_manifest(job, attempt, step, manifest)
            case e.KeepPeers(job, cards):
                self.segments.keep_peers(job, cards)
            case e.Remove(job, names, attempts):
                self.segments.remove(job, names, attempts)
                self._later(self._delete_removed())
            case e.RemoveJob(job):
                self.segments.remove_job(job)
                self._freed[job] += 1
                self._throttles = {
                    key: throttle for key, throttle in self._throttles.items() if key[0] != job
                }
                self._later(self._delete_removed())
            case e.Make(job, name, capacity):
                self._later(self._make(job, name, capacity))
            case e.Digest(job, slot):
                digest = partial(self.segments.digest, job, slot)
                self._later(self._digest(job, slot, "memory", digest))
            case e.Encode(job, slot, order):
                slots = self.state.jobs[job].slots.values()
                here = [x for x in slots if x.kind == "share" and x.attempt == slot.attempt]
                files = {x.rank: x.name for x in here if x.phase == "ready"}
                needed = partial(self._is_needed, job, slot)
                work = Encoding(needed)
                self._encodings.append(work)
                throttle = self._throttle(job, slot.rank)
                fill = partial(
                    protect, self.segments, self.card.agent, files, slot, order, throttle, work
                )
                self._later(self._digest(job, slot, "peers", fill))
            case e.Write(slot, order):
                self._later(self._write(slot, order))
            case e.CommitLate(order):
                self._later(self._commit_late(order, self._manifest(order)))
            case e.Exit(why):
                self.end(why)

    def _note_job(self, job: Job) -> None:
        """Write `job.json`; if there is no room, the next rank that says hello tries again."""
        try:
            self.segments.note_job(job.name, job_note(job))
        except OSError as error:
            path = self.segments.path(job.name, "job.json")
            log.error("%s: %s", path, error.strerror or error)

    def _is_needed(self, job: str, slot: Slot) -> bool:
        """True if somebody still waits for what a slot is being filled with.  From any thread."""
        known = self.state.jobs.get(job, Job(job)).slots.get(slot.name)
        return known is not None and known.owner != 0

    def _throttle(self, job: str, rank: int) -> Throttle:
        """Return the throttle that all work for a rank's images shares."""
        cap = self.state.jobs.get(job, Job(job)).bytes_per_s
        return self._throttles.setdefault((job, rank, cap), Throttle(cap))

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _delete_removed(self) -> None:
        await self._in_thread("gone", self.segments.delete_removed)

    async def _make(self, job: str, name: str, capacity: int) -> None:
        """Make a slot's file, unless the job is freed meanwhile: the next job of that name may have
        memory of the same names."""
        life, error = self._freed[job], ""
        made = f".{name}.{life}"
        try:
            if await self._in_thread("memory", self._make_if_wanted, job, made, capacity, life):
                self.segments.place(job, made, name)
        except OSError as failed:
            error = failed.strerror or str(failed)
            self.segments.remove(job, (made,), ())
        if life == self._freed[job] or job not in self.state.jobs:
            self.tell(w.Made(job, name, error))
        else:
            self.segments.remove(job, (made,), ())
            await self._delete_removed()

    def _make_if_wanted(self, job: str, name: str, capacity: int, life: int) -> bool:
        """Make a slot's file unless its job was freed; True if it is still wanted once it is
        made."""
        if life == self._freed[job]:
            self.segments.make(job, name, capacity)
        return life == self._freed[job]

    async def _digest(self, job: str, slot: Slot, pool: str, work: Callable[[], str]) -> None:
        digest, error = "", None
        try:
            digest = await self._in_thread(pool, work)
        except Exception as failed:
            log.warning("%s of %s: %s", slot.name, slot.attempt, failed)
            error = WireError.of(failed)
        self.tell(w.Digested(job, slot.name, slot.attempt, digest, error))

    async def _write(self, slot: Slot, order: w.Persist) -> None:
        error = None
        self._num_behind += 1
        self._weigh()
        try:
            throttle = self._throttle(order.job, order.rank)
            await self._in_thread("storage", persist, self.segments, slot, order, throttle)
        except Exception as failed:
            log.warning("%s to storage: %s", order.key, failed)
            error = WireError.of(failed)
        finally:
            self._num_behind -= 1
        self.tell(w.Wrote(order.job, order.attempt, order.rank, error))

    async def _commit_late(self, order: w.Persist, data: bytes | None) -> None:
        """Commit a step; `data`: its manifest, read before the job's memory may be freed."""
        try:
            if data is None:
                raise HoldfastError("its ranks died before all of them had its images in memory")
            manifest = decode_manifest(data, order.attempt)
            await self._in_thread("waiting", commit_late, order, manifest)
            log.info("committed step %d of attempt %s late", manifest.step, order.attempt)
        except Exception as failed:
            log.warning("attempt %s is not committed: %s", order.attempt, failed)
        self.tell(w.Settled(order.job, order.attempt))

    def _manifest(self, order: w.Persist) -> bytes | None:
        for _, attempt, path in self.segments.manifests(order.job):
            if attempt == order.attempt:
                with contextlib.suppress(OSError):
                    return path.read_bytes()
        return None

    async def _in_thread(self, pool: str, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pools[pool], work, *args)

    async def watch(self) -> None:
        """Notice processes that die, and time that passes."""
        self._later(self._delete_removed())  # what an earlier agent removed
        while not self.stopped.is_set():
            self._notice_dead()
            self.tell(w.Tick())
            if not self.segments.is_home():
                log.info("%s was deleted, with all that was held", self.segments.root)
                self.stopped.set()
            self._encodings = [one for one in self._encodings if not one.over]
            for encoding in self._encodings:
                encoding.end_if_given_up()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.stopped.wait(), TICK_S)

    def _notice_dead(self) -> None:
        for job in list(self.state.jobs.values()):
            if gone := dead_trainers(job):
                log.info("gone: %s", gone)
                self.tell(w.Gone(job.name, gone))

    # -- telling ----------------------------------------------------------------------------------

    def card_of(self, job: str) -> w.Card:
        """Return the card by which a job's ranks know this agent; its token is derived from a secret of
        this agent alone."""
        token = hmac.new(self._secret, job.encode(), "sha256").hexdigest()
        known = self.state.jobs.get(job, Job(job))
        port = self.card.address.rpartition(":")[2]
        address = f"{known.host}:{port}" if known.host else self.card.address
        return msgspec.structs.replace(self.card, address=address, token=token)

    def held(self, name: str) -> w.Held:
        """Return what other nodes and restarted processes need to know of a job."""
        job = self.state.jobs.get(name, Job(name))
        images = tuple(s for s in job.slots.values() if s.phase == "ready")
        manifests = []
        for _, _, path in self.segments.manifests(name):
            with contextlib.suppress(FileNotFoundError):
                manifests.append(path.read_bytes())
        directory = str(self.segments.jobs / name)
        peers = self.segments.peers(name)
        return w.Held(
            self.card_of(name), directory, images, tuple(manifests), peers, job.newest, job.run
        )

    def report(self) -> w.AgentReport:
        jobs = tuple(
            w.JobReport(
                j.name, j.root, j.run, j.used,
                sum(s.phase == "ready" for s in j.slots.values()),
                tuple(step for _, step in j.commits), tuple(sorted(j.trainers)),
                time.time() - (time.monotonic() - j.seen), self._moved(j.name),
            )
            for j in self.state.jobs.values()
        )  # fmt: skip
        fetched, state = counters["memory.peer.bytes"], self.state
        return w.AgentReport(
            os.getpid(), self.card.address, state.budget, state.used, fetched, jobs,
            bool(self.card.fingerprint),
        )  # fmt: skip

    def _moved(self, name: str) -> dict[str, int]:
        """Return the bytes that were moved so far for a job's ranks, by kind of work."""
        return dict(
            sum((p.let for (job, *_), p in self._throttles.items() if job == name), Counter())
        )

    async def is_sound(self, job: str, name: str) -> bool:
        """True if an image is what was written."""
        slot = self.state.jobs[job].slots[name]
        return bool(await self._in_thread("peers", self.segments.is_sound, job, slot))


async def serve(root: Path, host: str, budget: int, *, stay: bool, tls: bool) -> None:
    """Run the agent until it is told to stop, or no longer needed."""
    agent, visitors = Agent(Segments(root), host, budget, stay=stay), Visitors(most_strangers())
    peers = peer_app(agent, visitors.is_known)
    runners = [
        web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=idle_s)
        for app, idle_s in ((local_app(agent), 3600.0), (peers, IDLE_S))
    ]
    for runner in runners:
        await runner.setup()
    context, fingerprint = serving(root) if tls else (None, "")
    server = runners[1].server
    assert server is not None  # it is set up
    port = visitors.let_in(server, context)
    agent.card = msgspec.structs.replace(
        agent.card, address=f"{host}:{port}", fingerprint=fingerprint
    )
    path = root / SOCKET
    path.unlink(missing_ok=True)
    await web.UnixSite(runners[0], str(path)).start()
    os.chmod(path, 0o600)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.end, f"was ended by {number.name}")
    last, started = last_agent(root), start_time(os.getpid()) or ""
    note = AgentNote(os.getpid(), started, agent.card.address, before=(last.pid, last.ended))
    note_agent(root, note)
    log.info("agent %s at %s, budget %d bytes", agent.card.agent, agent.card.address, budget)
    await agent.watch()
    if agent.ended:
        with contextlib.suppress(OSError):  # no room: then nobody is told why
            note_agent(root, msgspec.structs.replace(note, ended=agent.ended))
    path.unlink(missing_ok=True)
    visitors.close()
    for runner in runners:
        await runner.cleanup()
    agent.segments.delete_removed()


def default_budget(root: Path) -> int:
    """Return half of the memory that this process may have, or 90 % of the file system of `root` if that is
    less."""
    stat = os.statvfs(root)
    return min(memory_bytes() // 2, stat.f_blocks * stat.f_frsize * 9 // 10)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="holdfast-agent", description=__doc__)
    p.add_argument("--host", default="", help="this node's address for other nodes")
    p.add_argument("--budget", type=int, default=0, help="bytes; 0: half of the memory")
    p.add_argument("--stay", action="store_true", help="do not leave when there is nothing to keep")
    p.add_argument("--tls", action="store_true", help="serve other nodes by TLS")
    args = p.parse_args(argv)
    root = home()
    make_home(root)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    with held_alone(root) as is_mine:
        if not is_mine:
            log.info("another agent is here already")
            return 0
        budget = args.budget or default_budget(root)
        host = args.host or os.environ.get("HOLDFAST_HOST") or own_address()
        try:
            asyncio.run(_serve_and_leave(root, host, budget, stay=args.stay, tls=args.tls))
        except HoldfastError as error:
            log.error("%s; %s", error.message, error.hint)
            return 1
    return 0


async def _serve_and_leave(root: Path, host: str, budget: int, *, stay: bool, tls: bool) -> None:
    """Run the agent, then end the process, whatever its threads still wait for: a new agent does not
    rely on their work."""
    await serve(root, host, budget, stay=stay, tls=tls)
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
