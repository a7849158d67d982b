"""torch's dynamic rendezvous, over a connection that can be replaced.

torch makes a handler for one connection.  When that fails, the handler is useless, and a new handler would
be a new node for the others.  So the handler is kept here, and gets the store and the backend of a new
connection, to the next endpoint if there are several.

etcd forgets the state of a rendezvous after two hours, but keeps the keys of its store.  A later run of the
same name would count its rounds from 0 again and find the earlier run's messages.  So the first node of a
run puts an identifier into the state, and every key begins with it.  The first node of a round counts as
the first of a run, unless a node comes after it that was in an earlier round.

Only this file touches the private parts of torch's handler.  A method that asks the host blocks until it
answers:  `Rendezvous` calls it from a separate thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    create_handler,
)

from holdfast.base.errors import need
from holdfast.launch.rendezvous_state import RUN_ATTRIBUTE, as_json, as_pickle
from holdfast.launch.sockets import store_at

need("torch", dynamic_rendezvous, "_Action")

T = TypeVar("T")

LATER_CALL_S = 3.0
"""Seconds that a later round with at least MIN nodes waits for the nodes that were alive when the last
ended."""
SILENT_S = 10.0
"""Seconds without an answer after which a connection is given up, while the nodes should meet."""
MOVE_S = 2.0
"""The same if there is another endpoint, at any time."""
STORE_OF_RANKS = partial(store_at, is_master=True, multi_tenant=True)
"""Makes the store at MASTER_ADDR as torch does, except for the address at which it listens."""
OF_HANDLER = (
    "_bootstrap_store_info", "_create_tcp_store_server", "_get_store", "_heartbeat_lock", "_keep_alive",
    "_keep_alive_timer", "_op_executor", "_shared_tcp_store_server", "_start_heartbeats", "_state_holder",
    "_store", "_this_node",
)  # fmt: skip
"""The private parts of torch's handler that are used or replaced here and by the agent."""
TIMER = "RendezvousKeepAliveTimer"
"""Beginning of the names of torch's threads that give signs of life."""


@contextmanager
def as_lost_connection() -> Iterator[None]:
    """In this block every error of the host's client becomes that of a lost connection."""
    try:
        yield
    except (RendezvousError, SignalException):
        raise
    except Exception as error:
        raise RendezvousConnectionError(f"{type(error).__name__}: {error}") from error


class _Calls(RendezvousTimeout):  # type: ignore[misc]
    """torch's time limits, with a last call that depends on the round."""

    def __init__(self, known: RendezvousTimeout, round_number: Callable[[], int]) -> None:
        super().__init__(known.join, known.last_call, known.close, known.heartbeat)
        need("torch", self, "_last_call")
        self._round_number = round_number

    @property
    def last_call(self) -> timedelta:
        return self._last_call if self._round_number() == 0 else timedelta(seconds=LATER_CALL_S)


def _leave(asked: Any, deadline: float) -> Any:
    """torch's operation of leaving a round, extended to waiting nodes."""
    state, actions = asked.state, dynamic_rendezvous._Action
    for there, action in (
        (state.participants, actions.REMOVE_FROM_PARTICIPANTS),
        (state.wait_list, actions.REMOVE_FROM_WAIT_LIST),
        (state.redundancy_list, actions.REMOVE_FROM_REDUNDANCY_LIST),
    ):
        if asked.node in there:
            return actions.ERROR_TIMEOUT if time.monotonic() > deadline else action
    return actions.FINISH


class _Backend:
    """torch's backend, with each request in the context `asked`; it can be given up.

    The wrapped backend sees the state as JSON, torch sees it as a pickle.
    """

    def __init__(self, backend: Any, asked: Callable[[], AbstractContextManager[None]]) -> None:
        self._backend, self._asked = backend, asked
        self.is_given_up = False

    @property
    def name(self) -> str:
        return str(self._backend.name)

    def get_state(self) -> Any:
        return self._of_torch(self._ask(self._backend.get_state))

    def set_state(self, state: bytes, token: Any = None) -> Any:
        data = as_json(state)
        return self._of_torch(self._ask(lambda: self._backend.set_state(data, token)))

    def _of_torch(self, answer: Any) -> Any:
        return answer and (as_pickle(answer[0]), *answer[1:])

    def _ask(self, question: Callable[[], T]) -> T:
        if self.is_given_up:
            raise RendezvousConnectionError("this connection was given up")
        with self._asked():
            return question()


def alone(given: RendezvousParameters) -> DynamicRendezvousHandler:
    """Return the rendezvous of a single node: its store is in this process, without a port."""
    given.local_addr = given.local_addr or "127.0.0.1"  # where the ranks meet
    store = dist.HashStore()
    handler = create_handler(store, C10dRendezvousBackend(store, given.run_id), given)
    need("torch", handler, *OF_HANDLER)
    handler._create_tcp_store_server = STORE_OF_RANKS
    return handler


class TorchRendezvous:
    """torch's handler, which is this node for the others, and its present connection."""

    def __init__(
        self,
        create: Callable[[RendezvousParameters], DynamicRendezvousHandler],
        given: RendezvousParameters,
        pause_s: float,
    ) -> None:
        self._create, self._given = create, given
        self._endpoints = given.endpoint.split(",") if given.backend != "c10d" else [given.endpoint]
        self.expected = 0
        """Number of nodes with which the next round is complete; 0: not known."""
        self.turned_at = time.monotonic()
        """When the asking thread last had no request open."""
        self.answered_at = self.turned_at
        self._given_up: WeakSet[threading.Thread] = WeakSet()
        """Threads that were given up: they must not use a new connection."""
        self._met: tuple[str, int] | None = None
        """The run and the round of the last meeting; None: this node has met nobody yet."""
        self.is_connecting = False
        self.handler = self._connected()
        self._settle(pause_s)

    # -- what it knows ----------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The state of torch's rendezvous at the last request to the host."""
        return self.handler._state_holder.state

    @property
    def store(self) -> Any:
        """The store of all rounds."""
        return dist.PrefixStore(self._run, self.handler._store)

    @property
    def store_of_round(self) -> Any:
        """The part of the store with the keys of the last round."""
        run, number = self._met or ("", 0)
        return dist.PrefixStore(f"{run}/{number}", self.handler._store)

    @property
    def _run(self) -> str:
        """The run's identifier, with which keys begin; empty before the first node has come."""
        return str(getattr(self.state, RUN_ATTRIBUTE, ""))

    @property
    def node(self) -> Any:
        """This node, as the others know it."""
        return self.handler._this_node

    @property
    def is_waiting(self) -> bool:
        """The others train, and this node waits to be taken in."""
        state, node = self.state, self.node
        return bool(state.complete and node in {*state.redundancy_list, *state.wait_list})

    @property
    def least(self) -> int:
        """Least number of nodes in a round."""
        return int(self._given.min_nodes)

    @property
    def outlives_nodes(self) -> bool:
        """The host is not a node of the run: it may answer again whichever nodes are lost."""
        return bool(self._given.backend != "c10d")

    @property
    def endpoint(self) -> str:
        """The endpoint of the last connection that was made or tried."""
        return str(self._given.endpoint)

    # -- taking part ------------------------------------------------------------------------------

    def meet(self) -> RendezvousInfo | None:
        """Meet the others; None if they train, and this node still waits to be taken in."""
        self.renew_heartbeats(begin=False)  # torch would wait for the timer's thread
        try:
            info = self.handler.next_rendezvous()
            self.end_if_given_up()
            self.expected = 0
        except RendezvousTimeoutError:
            if self.state.complete:
                return None
            raise
        return info

    def strike(self, member: Any) -> None:
        """Strike off a node whose launcher has ended, as if its last sign of life were old."""
        holder = self.handler._state_holder
        with self.handler._heartbeat_lock:
            while True:
                holder.sync()
                if member not in holder.state.participants:
                    return
                holder.state.last_heartbeats[member] = datetime.min.replace(tzinfo=timezone.utc)
                holder.mark_dirty()

    def leave(self) -> None:
        """Take this node out of the round."""
        self.renew_heartbeats(begin=False)
        deadline = time.monotonic() + SILENT_S
        self.handler._op_executor.run(_leave, deadline)

    def close(self) -> None:
        """Close the rendezvous, unless this node is out of it and the others can go on."""
        self.renew_heartbeats(begin=False)
        self.handler.num_nodes_waiting()
        state, me = self.state, self.node
        others = {*state.participants, *state.wait_list, *state.redundancy_list} - {me}
        if me in state.participants or len(others) < self.least:
            self.handler.set_closed()

    def _settle(self, pause_s: float) -> None:
        """Have the handler poll often, and not wait for nodes that will not come."""
        handler = self.handler
        need("torch", handler, *OF_HANDLER)
        holder, executor = handler._state_holder, handler._op_executor
        need("torch", holder, "_backend", "_cache_duration")
        need("torch", executor, "_add_to_participants", "_mark_rendezvous_complete")
        holder._cache_duration = pause_s
        self._ask_over(holder._backend)
        add = executor._add_to_participants

        def add_and_begin() -> None:
            state = holder.state
            if self._met is not None and self._met[1] < state.round:
                # a new node may have come first, and have taken itself for the first of a run
                setattr(state, RUN_ATTRIBUTE, self._met[0])
            elif not self._run or not state.participants:
                setattr(state, RUN_ATTRIBUTE, uuid4().hex)
            add()
            count = len(state.participants)
            if not state.complete and self._given.min_nodes <= self.expected <= count:
                executor._mark_rendezvous_complete()

        def store_of_new_round() -> Any:
            for name in ("_shared_tcp_store_server", "_bootstrap_store_info"):
                setattr(handler, name, None)  # else this round's ranks would get the last round's
            self._met = self._run, int(holder.state.round)
            return self.store_of_round

        executor._add_to_participants = add_and_begin
        handler._get_store = store_of_new_round
        handler._create_tcp_store_server = STORE_OF_RANKS
        if self._given.get("last_call_timeout") is None:
            calls = _Calls(handler.settings.timeout, lambda: int(holder.state.round))
            object.__setattr__(handler.settings, "timeout", calls)

    # -- the connection ---------------------------------------------------------------------------

    @property
    def can_move(self) -> bool:
        """Whether there is another endpoint."""
        return len(self._endpoints) > 1

    @property
    def silent_s(self) -> float:
        """Seconds for which a request has had no answer; 0 while a connection is made."""
        last = max(self.answered_at, self.turned_at)
        return 0.0 if self.is_connecting else time.monotonic() - last

    @property
    def is_silent(self) -> bool:
        """Whether the host has been silent for too long, so that the connection must be given up."""
        return self.silent_s > (MOVE_S if self.can_move else SILENT_S)

    @contextmanager
    def asked(self) -> Iterator[None]:
        """The context of a request to the host, by a thread that was not given up."""
        self.end_if_given_up()
        with as_lost_connection():
            yield
        self.end_if_given_up()
        self.answered_at = time.monotonic()

    @property
    def is_given_up(self) -> bool:
        """True in a thread that was given up."""
        return threading.current_thread() in self._given_up

    def end_if_given_up(self) -> None:
        """RendezvousConnectionError in a thread that was given up."""
        if self.is_given_up:
            raise RendezvousConnectionError("this thread was given up")

    def give_up(self, thread: threading.Thread) -> RendezvousConnectionError:
        """Give up the connection and the thread that waits for it: neither sends another request.  Return
        the error to raise."""
        silent_s = self.silent_s
        self.give_up_thread(thread)
        self._backend.is_given_up = True
        return RendezvousConnectionError(f"no answer for {silent_s:.0f} s")

    def give_up_thread(self, thread: threading.Thread) -> None:
        """Give up a thread: it sends no more requests, and the answer that it waits for is dropped."""
        self._given_up.add(thread)

    def reconnect(self) -> None:
        """Use a new connection from now on, as the same node."""
        self._turn()
        with as_lost_connection():
            fresh, handler = self._connected(), self.handler
        if self.outlives_nodes:
            handler._store.client = fresh._store.client
        else:
            handler._store = fresh._store
        self._ask_over(fresh._state_holder._backend)

    def renew_heartbeats(self, *, begin: bool) -> None:
        """Stop the timer for signs of life, whose thread may wait for an answer; `begin`: start a new
        timer."""
        timer, self.handler._keep_alive_timer = self.handler._keep_alive_timer, None
        if timer is not None:
            context, finalizer, thread = need("torch", timer, "_ctx", "_finalizer", "_thread")
            context.stop_event.set()
            finalizer.detach()  # it would wait for that thread
            self.give_up_thread(thread)
        self.handler._heartbeat_lock = threading.Lock()  # a thread given up may hold the old lock
        if begin:
            self.handler._keep_alive()  # a new timer gives its first sign late
            self.end_if_given_up()
            self.handler._start_heartbeats()

    def _connected(self) -> DynamicRendezvousHandler:
        """Return a handler with a new connection to the first endpoint that answers."""
        self.is_connecting = True
        try:
            for _ in self._endpoints[1:]:
                self._given.endpoint = self._endpoints[0]
                with suppress(RendezvousConnectionError):
                    return self._created()
                self._turn()
            self._given.endpoint = self._endpoints[0]
            return self._created()
        finally:
            self.is_connecting, self.turned_at = False, time.monotonic()

    def _created(self) -> DynamicRendezvousHandler:
        handler = self._create(self._given)
        if self.outlives_nodes:
            from holdfast.launch.etcd_store import LosableEtcdStore

            handler._store = LosableEtcdStore(handler._store, self.asked)
        return handler

    def _turn(self) -> None:
        """Make the next endpoint the first."""
        self._endpoints = [*self._endpoints[1:], self._endpoints[0]]

    def _ask_over(self, backend: Any) -> None:
        """Have the handler use this backend, of the newest connection."""
        self._backend = self.handler._state_holder._backend = _Backend(backend, self.asked)
        self.answered_at = time.monotonic()
