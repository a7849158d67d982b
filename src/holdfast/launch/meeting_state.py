"""The state of torch's rendezvous as JSON, in which nodes read what others have written as data.

torch keeps that state as a pickle, in a store that asks nobody for a password; and who reads a pickle runs
what it says.  So the store gets JSON here, of these fields and no others, and torch gets a pickle that this
process has made itself:

    torch ── pickle ──► as_json ──► store ──► as_pickle ── another pickle ──► torch

A stranger who reaches the store can still end a run, or take part in it.  He runs nothing.
"""

from __future__ import annotations

import pickle
from datetime import datetime
from typing import Annotated

import msgspec
from torch.distributed.elastic.rendezvous import RendezvousStateError, dynamic_rendezvous

from holdfast.base.wire import decode_json

RUN = "holdfast_run"
"""An attribute of the state of torch's rendezvous: which run it is, of all that had its name."""

Node = tuple[str, int, int]
"""Address, process and number, by which torch knows a node."""
Instant = Annotated[datetime, msgspec.Meta(tz=True)]


class MeetingState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of torch's state."""

    round: int
    complete: bool
    closed: bool
    deadline: Instant | None
    participants: list[tuple[Node, int]]
    wait_list: list[Node]
    redundancy_list: list[Node]
    last_heartbeats: list[tuple[Node, Instant]]
    run: str = ""


def as_json(state: bytes) -> bytes:
    """Return the JSON of a pickle that torch has made in this process."""
    torchs = pickle.loads(state)
    return msgspec.json.encode(
        MeetingState(
            round=torchs.round,
            complete=torchs.complete,
            closed=torchs.closed,
            deadline=torchs.deadline,
            participants=[(_named(n), rank) for n, rank in torchs.participants.items()],
            wait_list=[_named(n) for n in torchs.wait_list],
            redundancy_list=[_named(n) for n in torchs.redundancy_list],
            last_heartbeats=[(_named(n), at) for n, at in torchs.last_heartbeats.items()],
            run=getattr(torchs, RUN, ""),
        )
    )


def as_pickle(data: bytes) -> bytes:
    """Return the pickle of a state that some node has put into the store.  RendezvousStateError."""
    try:
        state: MeetingState = decode_json(data, MeetingState)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RendezvousStateError(
            f"the state there is not of `holdfast run` ({error}): torchrun, another version of holdfast "
            "or a stranger has written it; give this run an --rdzv-id, or a port, of its own"
        ) from None
    node, torchs = dynamic_rendezvous._NodeDesc, dynamic_rendezvous._RendezvousState()
    torchs.round, torchs.complete, torchs.closed = state.round, state.complete, state.closed
    torchs.deadline = state.deadline
    torchs.participants = {node(*n): rank for n, rank in state.participants}
    torchs.wait_list = {node(*n) for n in state.wait_list}
    torchs.redundancy_list = {node(*n) for n in state.redundancy_list}
    torchs.last_heartbeats = {node(*n): at for n, at in state.last_heartbeats}
    if state.run:
        setattr(torchs, RUN, state.run)
    return pickle.dumps(torchs)


def _named(node: dynamic_rendezvous._NodeDesc) -> Node:
    return node.addr, node.pid, node.local_id
