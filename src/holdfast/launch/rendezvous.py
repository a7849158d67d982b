"""The rendezvous of several nodes: torch's dynamic rendezvous, asked by its own thread.

torch's agent asks the rendezvous from time to time and waits for the answer: while the host of the
rendezvous is silent, the agent does not watch its own ranks.  Here a separate thread asks, and the agent
reads the last `RoundView`.

torch begins a new round when the last node has left the previous round, and strikes off a node without a
sign of life for a while.  torch's nodes poll once a second; these poll every `pause_s` seconds.  The first
round waits long for late nodes, as torch's does.  A later round begins as soon as all nodes have come that
were alive when the last round ended.

A connection that fails, or is silent while the nodes should meet, is replaced, and the node stays the same
for the others: see `torch_rendezvous`.  The messages between nodes are in `round`.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from holdfast.base.calls import CallThread, Promise, is_done, result_of
from holdfast.base.errors import need
from holdfast.base.wire import decode_json
from holdfast.launch.neighbours import Door, Neighbour
from holdfast.launch.nodes import EndOfRound, Introduction
from holdfast.launch.round import Round, RoundView
from holdfast.launch.sockets import store_at
from holdfast.launch.torch_rendezvous import SILENT_S, TIMER, TorchRendezvous, alone

need("torch", dynamic_rendezvous, "_delay")

T = TypeVar("T")

SLICE_S = 0.2
"""Seconds for which a signal to the launcher may wait."""
KEEP_ALIVE_S, KEEP_ALIVES = 1, 5
"""Seconds between a node's signs of life, and how many may fail, unless `--rdzv-conf` sets them."""
KEEP_ALIVES_OF_SEVERAL = 10
"""Signs of life that may fail if there are several endpoints: moving to another takes time."""
_RETRY_S = 1.0
CARDS_S = 60.0
"""Seconds that a node may take to publish its card."""
TOLD_S = 2.0
"""Seconds after which a node reports that it waits."""
ALONE_S = 30.0
"""Seconds that finished ranks wait for the other nodes when the rendezvous is lost."""
THREAD = "holdfast-rendezvous"
WELL = "holdfast/well"
"""A key for all rounds, set when the run has ended well, so that waiting nodes end well too."""
_LOST = (RendezvousConnectionError, RendezvousStateError, dist.DistError, OSError)


def pause_s(num_nodes: int) -> float:
    """Return the seconds between two polls; more nodes poll less often, since they ask one store."""
    return min(max(0.02, 0.001 * num_nodes), 1.0)


class Rendezvous(RendezvousHandler):  # type: ignore[misc]
    """The rendezvous of the agents of several nodes."""

    def __init__(
        self,
        create: Callable[[RendezvousParameters], DynamicRendezvousHandler],
        given: RendezvousParameters,
        say: Callable[[str], None],
    ) -> None:
        self.introduction = Introduction("", 0, [])
        self.view = RoundView()
        self.round: Round | None = None
        self.is_left = False
        """This node leaves and the others stay: the rendezvous must not be closed."""
        self._say = say
        self._pause_s = pause_s(given.max_nodes)
        self._waits_since = 0.0
        self._lost_since: float | None = None
        """Since when the rendezvous does not answer; None: it does."""
        self._has_ended_well = False
        """The run has ended well, and the others must still be told."""
        is_of_node = given.backend == "c10d"  # nodes that meet at loopback are on this host then
        meets_at = given.endpoint.rpartition(":")[0].strip("[]") if is_of_node else None
        self._door = Door(given.max_nodes, given.local_addr or meets_at)
        self._neighbour: Neighbour | None = None
        self._torchs = TorchRendezvous(create, given, self._pause_s)
        self._begin()

    def check(self) -> None:
        """Move to another endpoint, if there is one and this one is silent."""
        if self._torchs.can_move and self._torchs.is_silent:
            self._complain(self._given_up())

    # -- what the agent says and asks -------------------------------------------------------------

    @property
    def current(self) -> Round:
        """The round; an error before the nodes have met."""
        if self.round is None:
            raise RuntimeError("the nodes have not met")
        return self.round

    def end_round(self, *, is_calm: bool) -> Callable[[], bool]:
        """End the round; the returned function tells later whether this node was the first to end it."""
        of = self.current
        of.ends_calmly = is_calm
        self._asked(of.put)
        return lambda: of.is_first

    def are_all(self, what: str) -> bool:
        """Say that the ranks of this node are `done`, or `out`; return whether those of all nodes are.

        If the rendezvous is lost, the other nodes count as done after `ALONE_S`.
        """
        self.say(what)
        since = (
            None if self._lost_since is None else max(self._lost_since, self.current.last_said_at)
        )
        is_alone = since is not None and time.monotonic() - since > ALONE_S
        return is_alone or (self.view.are_done if what == "done" else self.view.are_out)

    def say(self, what: str, value: bytes = b"1") -> None:
        """Tell the other nodes of the round something, through the store."""
        of = self.current
        if what not in of.said:
            of.said[what], of.last_said_at = value, time.monotonic()
            self._asked(of.put)

    def cards(self) -> tuple[dict[int, EndOfRound], list[int]]:
        """Wait for the cards of all nodes that are not lost; return the cards, and the lost nodes."""
        of = self.current
        until = time.monotonic() + CARDS_S
        while True:
            cards, lost = self.view.cards, of.lost(self.view)
            if of.me in lost or (of.me in cards and len(cards) + len(lost) == len(of.members)):
                state = self._torchs.state
                others = {*state.wait_list, *state.redundancy_list} - set(of.members)
                self._torchs.expected = 0 if of.me in lost else len(cards) + len(others)
                return cards, lost
            self.check()
            is_lost = self._lost_since is not None and not self._torchs.outlives_nodes
            if time.monotonic() > until or is_lost or self._torchs.silent_s > SILENT_S:
                return cards, [n for n in range(len(of.members)) if n not in cards]
            time.sleep(self._pause_s / 2)

    @property
    def least(self) -> int:
        """Least number of nodes in a round."""
        return self._torchs.least

    @property
    def num_others(self) -> int:
        """Number of other nodes, including those that wait, and those between the last round and the
        next."""
        state = self._torchs.state
        there = len({*state.participants, *state.wait_list, *state.redundancy_list})
        return max(there, self._torchs.expected) - 1

    def is_new(self, cause: str) -> bool:
        """Note the cause for leaving something out; False if any node has noted this cause before."""
        text = f"{self.get_run_id()} {cause}"
        key, mine = f"holdfast/left-out/{zlib.crc32(text.encode()):08x}", uuid4().hex
        until = time.monotonic() + SILENT_S
        while True:
            with suppress(TimeoutError, *_LOST):
                answer = self._asked(lambda: self._torchs.store.compare_set(key, "", mine))
                return bytes(result_of(answer, SILENT_S, TimeoutError)) == mine.encode()
            if time.monotonic() > until or not self._torchs.outlives_nodes:
                return False
            time.sleep(_RETRY_S)

    def say_it_ended_well(self) -> None:
        """Tell waiting nodes that the run has ended well, before the rendezvous is closed.

        A node that has not heard from the others leaves alone; if all nodes do, a waiting node would begin
        to train again.
        """
        if self.view.are_out:
            self._has_ended_well = True
            self._asked(self._tell_that_it_ended_well)
        else:
            self.is_left = True

    def leave(self) -> None:
        """Leave the rendezvous at once; the others go on, and need not wait for a missing sign of life."""
        self.is_left = True
        if self._calls.has_ended:
            return
        if self.round is None:  # the thread waits for others
            self._torchs.give_up_thread(self._calls.thread)
            self._begin()
        with suppress(TimeoutError, *_LOST):
            result_of(self._asked(self._torchs.leave), SILENT_S / 2, TimeoutError)
        self._end()

    # -- what torch asks --------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        self.round, self.view, self._waits_since = None, RoundView(), time.monotonic()
        until = time.monotonic() + self._torchs.handler.settings.timeout.join.total_seconds()
        while True:
            try:
                met = _awaited(self._asked(self._met), self._while_it_waits)
                if met is not None:
                    info, self.round = met
                    return info
            except _LOST as error:
                if self.is_left or time.monotonic() > until:
                    raise
                self._complain(error)
                time.sleep(_RETRY_S)

    def _met(self) -> tuple[RendezvousInfo, Round] | None:
        """Meet the others, and exchange introductions; None if a node was lost before that."""
        if self._lost_since is not None:
            self._reconnect()
            self._answers()
        try:
            info = self._torchs.meet()
        except RendezvousClosedError:
            if self._torchs.is_waiting and self._torchs.store.check(
                [f"{WELL}/{self.get_run_id()}"]
            ):
                raise RendezvousGracefulExitError("the run has ended well") from None
            raise
        if info is None:
            return None
        state = self._torchs.state
        members = sorted(state.participants, key=lambda node: int(state.participants[node]))
        me = self._torchs.node
        if len(members) != info.world_size or members[info.rank] != me:  # struck off meanwhile
            return None
        store, door = info.store, self._door
        mine = msgspec.structs.replace(self.introduction, door=door.port, secret=door.secret)
        store.set(f"holdfast/node/{info.rank}", msgspec.json.encode(mine))
        keys = [f"holdfast/node/{n}" for n in range(info.world_size)]
        while not store.check(keys):
            self._torchs.handler.num_nodes_waiting()
            now = self._torchs.state.participants
            for key, member in zip(keys, members, strict=True):
                if member not in now and (member == me or not store.check([key])):
                    return None
            time.sleep(self._pause_s)
        told = [decode_json(store.get(key), Introduction) for key in keys]
        self._torchs.end_if_given_up()
        of = Round(store, info.rank, members, told)
        self._neighbour = Neighbour.of(of.nodes, of.me)
        return info, of

    def num_nodes_waiting(self) -> int:
        """Return 0, whatever is true: torch would restart at once, but the agent decides when."""
        return 0

    def get_backend(self) -> str:
        return str(self._torchs.handler.get_backend())

    @property
    def use_agent_store(self) -> bool:
        return bool(self._torchs.handler.use_agent_store)

    def is_closed(self) -> bool:
        return bool(_awaited(self._asked(self._torchs.handler.is_closed)))

    def set_closed(self) -> None:
        _awaited(self._asked(self._torchs.handler.set_closed))

    def get_run_id(self) -> str:
        return str(self._torchs.handler.get_run_id())

    def shutdown(self) -> bool:
        """Close the rendezvous: the run is over, unless this node alone leaves it."""
        until = time.monotonic() + SILENT_S

        def check() -> None:
            if time.monotonic() > until or (
                self._torchs.is_connecting and not self._torchs.outlives_nodes
            ):
                raise RendezvousConnectionError("no answer")
            if self._torchs.can_move and self._torchs.is_silent:
                raise self._given_up()

        try:
            while not self.is_left:
                try:
                    _awaited(self._asked(self._close), check)
                    break
                except (RendezvousError, *_LOST) as error:
                    if time.monotonic() > until or not self._torchs.outlives_nodes:
                        return False
                    self._complain(error)
                    time.sleep(_RETRY_S)
            return True
        finally:
            self._end()

    def _close(self) -> None:
        if self._lost_since is not None and self._torchs.outlives_nodes:
            self._reconnect()
        self._tell_that_it_ended_well()
        self._torchs.close()

    def _tell_that_it_ended_well(self) -> None:
        if self._has_ended_well:
            self._torchs.store.set(f"{WELL}/{self.get_run_id()}", b"1")
            self._has_ended_well = False

    # -- the thread -------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._torchs.turned_at = time.monotonic()  # the new thread asks nothing for `pause_s`
        self._calls = CallThread(THREAD, self._between, self._pause_s)

    def _end(self) -> None:
        """End the thread: torch aborts the process if a thread is inside torch when Python ends."""
        self._calls.end()
        self._torchs.give_up_thread(self._calls.thread)
        self._calls.thread.join(SILENT_S)
        self._torchs.renew_heartbeats(begin=False)  # last: the thread may have restarted them

    def _asked(self, work: Callable[[], T]) -> Promise[T]:
        """Have the thread do `work`, and promise its result."""

        def ask() -> T:
            self._torchs.end_if_given_up()
            self._turned()
            try:
                return work()
            finally:
                self._turned()

        return self._calls.submit(ask)

    def _turned(self) -> None:
        """Note that the thread has no question open."""
        if not self._torchs.is_given_up:
            self._torchs.turned_at = time.monotonic()

    def _between(self) -> float:
        """Look at the others; return the seconds until the next look."""
        self._turned()
        try:
            if self._lost_since is not None:
                self._reconnect()
            self._look()
            self._answers()
            return self._pause_s
        except Exception as error:  # the run would stand still without this thread
            if not self._torchs.is_given_up:
                self._complain(error)
            return _RETRY_S
        finally:
            self._turned()

    def _look(self) -> None:
        of = self.round
        if of is None:
            return
        self._door.visitors()
        waiting = int(self._torchs.handler.num_nodes_waiting())
        members = frozenset(self._torchs.state.participants)
        if self._neighbour is not None and self._neighbour.is_gone():
            self._torchs.strike(of.members[self._neighbour.number])
            self._neighbour = None
        view = of.look(members, waiting)
        if self.round is of:
            self.view = view
        of.put()

    # -- the connection ---------------------------------------------------------------------------

    def _reconnect(self) -> None:
        """Make a new connection, as the same node."""
        self._torchs.reconnect()
        of = self.round
        if of is not None:
            of.go_on(self._torchs.store_of_round)
        self._torchs.renew_heartbeats(begin=of is not None)

    def _answers(self) -> None:
        if self._lost_since is not None:
            self._lost_since = None
            self._say("the rendezvous answers again")

    def _complain(self, error: Exception) -> None:
        if self._lost_since is not None:
            return
        self._lost_since = time.monotonic()
        cause = error.__cause__ or error
        why = str(cause).partition("\n")[0] or type(cause).__name__
        if not isinstance(error, _LOST):
            why += "\n" + "".join(traceback.format_exception(error))
        self._say(f"the rendezvous at {self._torchs.endpoint} does not answer: {why}")

    def _while_it_waits(self) -> None:
        """Report once that this node is not needed now; give up a silent connection, and its thread."""
        now = time.monotonic()
        if not self._torchs.is_waiting:
            self._waits_since = now
        elif self._waits_since + TOLD_S < now:
            self._waits_since = math.inf
            self._say("this node waits: the other nodes train, and it joins them when they need it")
        if self._torchs.is_silent:
            raise self._given_up()

    def _given_up(self) -> RendezvousConnectionError:
        """Give up the connection, and the thread that waits for it; return the error to raise."""
        error = self._torchs.give_up(self._calls.thread)
        self._begin()
        return error


def is_inside() -> bool:
    """Tell whether a thread waits inside torch for a silent rendezvous: torch would abort at Python's
    end."""
    return any(thread.name.startswith((THREAD, TIMER)) for thread in threading.enumerate())


def _awaited(answer: Promise[T], check: Callable[[], None] = lambda: None) -> T:
    """Wait for the answer in short slices, so that signals reach this thread."""
    while not is_done(answer, SLICE_S):
        check()
    return answer.result()


def watched(
    create: Callable[[RendezvousParameters], RendezvousHandler],
    given: RendezvousParameters,
    say: Callable[[str], None],
) -> RendezvousHandler:
    """Return the rendezvous that `given` asks for: a `Rendezvous` where several nodes may meet."""
    if given.backend not in ("c10d", "etcd-v2"):
        return create(given)
    if given.max_nodes == 1:
        return alone(given)
    given.config.setdefault("keep_alive_interval", KEEP_ALIVE_S)
    attempts = KEEP_ALIVES_OF_SEVERAL if "," in given.endpoint else KEEP_ALIVES
    given.config.setdefault("keep_alive_max_attempt", attempts)
    return Rendezvous(create, given, say)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In this block an attribute of torch's has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def quick(say: Callable[[str], None]) -> Iterator[None]:
    """In this block torch's rendezvous polls every `pause_s` seconds instead of once a second."""
    delay, create = dynamic_rendezvous._delay, registry.get_rendezvous_handler
    pause = 1.0

    def shorter(seconds: float | tuple[float, float]) -> None:
        delay(seconds if isinstance(seconds, tuple) else min(seconds, pause))

    def watched_here(given: RendezvousParameters) -> RendezvousHandler:
        nonlocal pause
        pause = pause_s(given.max_nodes)
        return watched(create, given, say)

    with (
        replaced(dynamic_rendezvous, "_delay", shorter),
        replaced(registry, "get_rendezvous_handler", watched_here),
        replaced(c10d_rendezvous_backend, "TCPStore", store_at),
    ):
        yield
