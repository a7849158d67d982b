"""Agents of several nodes exchange their failures, and find the failure to blame.

    node A                              node B
    rank 1 is killed
    ends ─────────────────────────────► its ranks leave, too
    card: rank 1 was killed ──────────► card: rank 2 lost a connection
    both know: A's rank 1 is to blame.  It costs A a restart, and B none

A round is the time from one rendezvous to the next.  An agent that sees a reason to end it says so.  Then
every agent has its ranks leave, and publishes a card with the failures of its node.  From the same cards
all agents find the same failure to blame.  Errors of ranks that lost a peer do not count, and no failure
counts if a node is lost.  A round also ends when a node joins: ranks then fail only because the round ends,
and that costs no restart.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

_OF_A_PEER = re.compile(
    r"Dist\w*Error|gloo|nccl|mpi|ucc|connection|broken pipe|socket|unreachable|time[d-]? ?out"
    r"|AgentError|Deadline|PeerLost|SIGABRT",
    re.IGNORECASE,
)


class Introduction(msgspec.Struct, frozen=True):
    """An agent introduces itself to the others at the beginning of a round."""

    host: str
    num_ranks: int
    addresses: list[str]
    door: int = 0
    """Port that accepts connections as long as the agent lives."""
    secret: str = ""
    """The first bytes that a visitor of the door must send."""
    role: str = ""


class RankFailure(msgspec.Struct, frozen=True):
    """A rank that failed; `how` is one line, `error` the traceback if there is one."""

    rank: int
    pid: int
    step: int
    how: str
    is_sure: bool
    """True if the loss of a peer cannot be the cause."""
    is_of_script: bool = False
    """The script itself raised or exited; any rank may be the first to do so."""
    error: str = ""
    is_late: bool = False
    """The failure was seen after the round had ended, and may be a consequence of that."""
    doubtful_s: float = 0.0
    """For a doubtful hang: seconds for which all ranks of the node did nothing, though they may have been
    at work.  0: no doubt."""


class EndOfRound(msgspec.Struct, frozen=True):
    """The card that an agent publishes when its ranks have left."""

    failures: list[RankFailure]
    is_first: bool = False
    """This agent was the first to end the round."""


def blamed(cards: Mapping[int, EndOfRound], lost: Sequence[int]) -> tuple[int, RankFailure] | None:
    """Return the node and the failure behind the end of a round; None if no rank is to blame."""
    if lost:
        return None
    has_failed = _ended_by_a_failure(cards)
    failures = [
        (not failure.is_sure, failure.is_late, not card.is_first, node, number)
        for node, card in cards.items()
        for number, failure in enumerate(card.failures)
        if has_failed or _is_of_no_end(failure)
    ]
    if not failures:
        return None
    *_, node, number = min(failures)
    return node, cards[node].failures[number]


def _ended_by_a_failure(cards: Mapping[int, EndOfRound]) -> bool:
    """Tell whether a failure ended the round; otherwise a node joins, or a process is ready."""
    first = [card for card in cards.values() if card.is_first] or list(cards.values())
    return any(not failure.is_late for card in first for failure in card.failures)


def _is_of_no_end(failure: RankFailure) -> bool:
    """Tell whether a rank would have failed even without the end of the round.

    A late failure may be a cut connection, or a kill since the rank did not leave; but not if the script
    itself raised or exited.
    """
    return failure.is_sure and (failure.is_of_script or not failure.is_late)


def may_be_of_a_peer(how: str) -> bool:
    """Tell whether an error may only be the lost connection to a peer that failed first."""
    return _OF_A_PEER.search(how) is not None


def first_ranks(nodes: Sequence[Introduction]) -> list[int]:
    """Return the first global rank of every node, followed by the number of all ranks."""
    firsts = [0]
    for node in nodes:
        firsts.append(firsts[-1] + node.num_ranks)
    return firsts


def addresses() -> list[str]:
    """Return every address by which other nodes may see this node."""
    found = {*_ipv4(), *_ipv6()}
    return sorted(a for a in found if not ipaddress.ip_address(a).is_loopback)


def of_others(nodes: Sequence[Introduction], me: int) -> list[str]:
    """Return the addresses of the other nodes, without those that this node has as well."""
    mine = set(nodes[me].addresses)
    return sorted({a for node in nodes for a in node.addresses} - mine)


def _ipv4() -> list[str]:
    """Return this node's IPv4 addresses: the kernel's table of routes lists each as `32 host LOCAL`."""
    found, last = [], ""
    with suppress(OSError):
        for line in Path("/proc/net/fib_trie").read_text().splitlines():
            _, is_leaf, text = line.partition("|-- ")
            if is_leaf:
                last = text.strip()
            elif line.strip() == "/32 host LOCAL":
                found.append(last)
    return found


def _ipv6() -> list[str]:
    found = []
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])))
    return found
