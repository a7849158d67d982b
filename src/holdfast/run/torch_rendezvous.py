"""torch's dynamic rendezvous, over a connection that can be replaced.

torch makes a handler for one connection.  When that fails, the handler is of no use any more, and a
new handler would be a new node to the others.  Here the handler is kept, and is given the store and
the backend of a new connection: to the next of several endpoints, if there are several.

etcd forgets the state of a rendezvous after two hours, and no key of its store.  A later run of the same
name counts its rounds from 0 again, and would find what was said in those of the earlier one.  So the first
node of a run puts an identifier into the state, which all others take from there, and it is part of each
key.

`Rendezvous` leaves the private parts of torch's handler to this file.  A method that asks the host
blocks until it answers: `Rendezvous` calls it from a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

T = TypeVar("T")

LATER_CALL_S = 3.0
"""Seconds that a later round with at least MIN nodes waits for those that lived when the last one ended."""
SILENT_S = 10.0
"""Seconds without an answer after which a connection is given up, while the nodes are to meet."""
MOVE_S = 2.0
"""The same where there is another endpoint, and at any time."""
RUN = "holdfast_run"
"""An attribute of the state of torch's rendezvous: which run it is, of all that had its name."""


@contextmanager
def as_lost_connection() -> Iterator[None]:
    """In this block whatever a client of the host raises is the error of a lost connection."""
    try:
        yield
    except RendezvousError:
        raise
    except Exception as error:
        raise RendezvousConnectionError(f"{type(error).__name__}: {error}") from error


class _Calls(RendezvousTimeout):  # type: ignore[misc]
    """torch's limits, with a last call that depends on the round."""

    def __init__(self, known: RendezvousTimeout, round_number: Callable[[], int]) -> None:
        super().__init__(known.join, known.last_call, known.close, known.heartbeat)
        self._round_number = round_number

    @property
    def last_call(self) -> timedelta:
        return self._last_call if self._round_number() == 0 else timedelta(seconds=LATER_CALL_S)


class _Backend:
    """torch's backend, that tells when it has answered, and can be given up."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.answered_at = time.monotonic()
        self.is_given_up = False

    @property
    def name(self) -> str:
        return str(self._backend.name)

    def get_state(self) -> Any:
        return self._ask(self._backend.get_state)

    def set_state(self, state: bytes, token: Any = None) -> Any:
        return self._ask(lambda: self._backend.set_state(state, token))

    def _ask(self, question: Callable[[], T]) -> T:
        if self.is_given_up:
            raise RendezvousConnectionError("this connection was given up")
        with as_lost_connection():
            answer = question()
        self.answered_at = time.monotonic()
        return answer


class TorchRendezvous:
    """torch's handler, as which the others know this node, and the connection that it asks over."""

    def __init__(
        self,
        create: Callable[[RendezvousParameters], DynamicRendezvousHandler],
        given: RendezvousParameters,
        pause_s: float,
    ) -> None:
        self._create, self._given = create, given
        self._endpoints = given.endpoint.split(",") if given.backend != "c10d" else [given.endpoint]
        self._timers: list[Any] = []
        self.expected = 0
        """Number of nodes with which the next round is complete; 0: not known."""
        self.turned_at = time.monotonic()
        """When the thread that asks last had no question open."""
        self._is_connecting = False
        self.handler = self._connected()
        self._settle(pause_s)

    # -- what it knows ----------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The state of torch's rendezvous, as it was when the host was asked last."""
        return self.handler._state_holder.state

    @property
    def store(self) -> Any:
        """The store of all rounds."""
        return dist.PrefixStore(self._run, self.handler._store)

    @property
    def store_of_round(self) -> Any:
        """The part of it in which the keys of the current round are."""
        return self.handler._get_store()

    @property
    def _run(self) -> str:
        """The run, in keys; empty before its first node has come."""
        return str(getattr(self.state, RUN, ""))

    @property
    def is_waiting(self) -> bool:
        """The others train, and this node waits to be taken in."""
        state, node = self.state, self.handler._this_node
        return bool(state.complete and node in {*state.redundancy_list, *state.wait_list})

    @property
    def least(self) -> int:
        """Number of nodes without which there is no round."""
        return int(self._given.min_nodes)

    @property
    def outlives_nodes(self) -> bool:
        """The host is no node of the run: it may answer again, whichever nodes are lost."""
        return bool(self._given.backend != "c10d")

    @property
    def endpoint(self) -> str:
        """The endpoint to which a connection was made, or tried, last."""
        return str(self._given.endpoint)

    # -- taking part ------------------------------------------------------------------------------

    def meet(self) -> RendezvousInfo | None:
        """Meet the others; None if they train, and this node still waits to be taken in."""
        for name in ("_shared_tcp_store_server", "_bootstrap_store_info"):
            setattr(self.handler, name, None)  # else this round's ranks would see the last one's
        try:
            info = self.handler.next_rendezvous()
            self.expected = 0
        except RendezvousTimeoutError:
            if self.state.complete:
                return None
            raise
        return info

    def strike(self, member: Any) -> None:
        """Strike off a node whose launcher has ended, as if it had been silent for long."""
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
        self.stop_heartbeats()
        deadline = time.monotonic() + SILENT_S
        self.handler._op_executor.run(dynamic_rendezvous._RendezvousExitOp(), deadline)

    def stop_heartbeats(self) -> None:
        self.handler._stop_heartbeats()

    def _settle(self, pause_s: float) -> None:
        """Have the handler look often, and wait for nobody who will not come."""
        handler = self.handler
        holder = handler._state_holder
        holder._cache_duration = pause_s
        self._ask_over(holder._backend)
        executor = handler._op_executor
        add, store_of_round = executor._add_to_participants, handler._get_store

        def add_and_begin() -> None:
            if not self._run:
                setattr(holder.state, RUN, uuid4().hex)
            add()
            count = len(holder.state.participants)
            if not holder.state.complete and self._given.min_nodes <= self.expected <= count:
                executor._mark_rendezvous_complete()

        executor._add_to_participants = add_and_begin
        handler._get_store = lambda: dist.PrefixStore(self._run, store_of_round())
        if self._given.get("last_call_timeout") is None:
            calls = _Calls(handler.settings.timeout, lambda: int(holder.state.round))
            object.__setattr__(handler.settings, "timeout", calls)

    # -- the connection ---------------------------------------------------------------------------

    @property
    def can_move(self) -> bool:
        """There is another endpoint."""
        return len(self._endpoints) > 1

    @property
    def silent_s(self) -> float:
        """Seconds for which a question has had no answer; 0 while a connection is made."""
        last = max(self._backend.answered_at, self.turned_at)
        return 0.0 if self._is_connecting else time.monotonic() - last

    @property
    def is_silent(self) -> bool:
        """The host has been silent for so long that the connection is to be given up."""
        return self.silent_s > (MOVE_S if self.can_move else SILENT_S)

    def give_up(self) -> RendezvousConnectionError:
        """Give up the connection: nothing more is asked over it.  Return the error that says so."""
        silent_s = self.silent_s
        self._backend.is_given_up = True
        return RendezvousConnectionError(f"no answer for {silent_s:.0f} s")

    def reconnect(self) -> None:
        """Ask over a new connection from now on, as the same node."""
        self._turn()
        fresh, handler = self._connected(), self.handler
        handler._heartbeat_lock = threading.Lock()
        if self.outlives_nodes:
            handler._store.client = fresh._store.client
        else:
            handler._store = fresh._store
        self._ask_over(fresh._state_holder._backend)

    def renew_heartbeats(self, *, begin: bool) -> None:
        """Stop the timer that gave signs of life over the last connection; `begin` another."""
        timer, self.handler._keep_alive_timer = self.handler._keep_alive_timer, None
        if timer is not None:
            timer._ctx.stop_event.set()
            self._timers.append(timer)  # who lets go of it waits for its thread
        if begin:
            self.handler._start_heartbeats()

    def _connected(self) -> DynamicRendezvousHandler:
        """Return a handler with a new connection, to the first endpoint that answers."""
        self._is_connecting = True
        try:
            for _ in self._endpoints[1:]:
                self._given.endpoint = self._endpoints[0]
                with suppress(RendezvousConnectionError):
                    return self._created()
                self._turn()
            self._given.endpoint = self._endpoints[0]
            return self._created()
        finally:
            self._is_connecting, self.turned_at = False, time.monotonic()

    def _created(self) -> DynamicRendezvousHandler:
        handler = self._create(self._given)
        if self.outlives_nodes:
            from holdfast.run.etcd_store import LosableEtcdStore

            handler._store = LosableEtcdStore(handler._store)
        return handler

    def _turn(self) -> None:
        """Have the next endpoint be the first."""
        self._endpoints = [*self._endpoints[1:], self._endpoints[0]]

    def _ask_over(self, backend: Any) -> None:
        """Have the handler ask over this backend, of the newest connection."""
        self._backend = self.handler._state_holder._backend = _Backend(backend)
