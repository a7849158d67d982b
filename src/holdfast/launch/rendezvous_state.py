"""The state of torch's rendezvous as JSON, so that nodes read each other's state as data.

torch keeps that state as a pickle in a store without a password, and reading a pickle can run code.  So
here the store gets JSON with these fields and no others, and torch gets a pickle made by its own process:

    torch ── pickle ──► as_json ──► store ──► as_pickle ── another pickle ──► torch

A stranger who reaches the store can still end a run or take part in it, but cannot run code.
"""

from __future__ import annotations

import pickle
from datetime import datetime
from typing import Annotated

import msgspec
from torch.distributed.elastic.rendezvous import RendezvousStateError, dynamic_rendezvous

from holdfast.base.errors import need
from holdfast.base.wire import decode_json

need("torch", dynamic_rendezvous, "_NodeDesc", "_RendezvousState")

RUN_ATTRIBUTE = "holdfast_run"
"""The attribute of torch's state that tells runs with the same rendezvous id apart."""

Node = tuple[str, int, int]
"""Address, pid and number by which torch identifies a node."""
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
    """Return the JSON for a pickle that torch has made in this process."""
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
            run=getattr(torchs, RUN_ATTRIBUTE, ""),
        )
    )


def as_pickle(data: bytes) -> bytes:
    """Return the pickle for a state that a node has put into the store.  RendezvousStateError."""
    try:
        state: MeetingState = decode_json(data, MeetingState)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RendezvousStateError(
            f"the state of the rendezvous is not of `holdfast run` ({error}): torchrun, another version of "
            "holdfast or a stranger has written it; give this run its own --rdzv-id or port"
        ) from None
    node, torchs = dynamic_rendezvous._NodeDesc, dynamic_rendezvous._RendezvousState()
    torchs.round, torchs.complete, torchs.closed = state.round, state.complete, state.closed
    torchs.deadline = state.deadline
    torchs.participants = {node(*n): rank for n, rank in state.participants}
    torchs.wait_list = {node(*n) for n in state.wait_list}
    torchs.redundancy_list = {node(*n) for n in state.redundancy_list}
    torchs.last_heartbeats = {node(*n): at for n, at in state.last_heartbeats}
    if state.run:
        setattr(torchs, RUN_ATTRIBUTE, state.run)
    return pickle.dumps(torchs)


def _named(node: dynamic_rendezvous._NodeDesc) -> Node:
    return node.addr, node.pid, node.local_id
