"""Agents of several nodes tell each other what failed, and find what was to blame.

    node A                              node B
    rank 1 is killed
    ends ─────────────────────────────► its ranks leave, too
    card: rank 1 was killed ──────────► card: rank 2 lost a connection
    both know: A's rank 1 is to blame.  It costs A a restart, and B none

A round is the time from one rendezvous to the next.  Whoever sees a reason for its end says so, and then
every agent has its ranks leave and lays down a card with what failed at its node.  From the same cards all
of them find the same failure to blame.  The errors of ranks whose peers are gone are of no account, nor is
any failure where a node is lost.  A round may also end for no failure, since a node joins: then ranks fail
by nothing but the end of it, and that must cost nobody a restart.
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
    """An agent to the others, at the beginning of a round."""

    host: str
    num_ranks: int
    addresses: list[str]
    door: int = 0
    """Port at which nobody is refused while the agent lives."""
    secret: str = ""
    """With this a visitor of the door begins."""
    role: str = ""


class RankFailure(msgspec.Struct, frozen=True):
    """A rank that failed; `how` in a line, `error` its traceback if there is one."""

    rank: int
    pid: int
    step: int
    how: str
    is_sure: bool
    """True if no loss of a peer can be behind it."""
    is_of_script: bool = False
    """The script has raised or ended: any rank may be the first to do so."""
    error: str = ""
    is_late: bool = False
    """It was seen when the round was over, and may be nothing but a consequence of that."""
    doubtful_s: float = 0.0
    """For how long it was still, like all ranks of its node, when it was taken to hang: it may have been at
    work.  0: there is no such doubt."""


class EndOfRound(msgspec.Struct, frozen=True):
    """An agent lays this card down when its ranks have left: the round is over for them."""

    failures: list[RankFailure]
    is_first: bool = False
    """It was the one to say that the round ends."""


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
    """Tell whether who ended the round had seen a failure; else a node joins, or a process is ready."""
    first = [card for card in cards.values() if card.is_first] or list(cards.values())
    return any(not failure.is_late for card in first for failure in card.failures)


def _is_of_no_end(failure: RankFailure) -> bool:
    """Tell whether a rank would have failed without the end of its round: what was still there then may
    have been cut off, or killed since it did not leave, unless the script itself raised or ended."""
    return failure.is_sure and (failure.is_of_script or not failure.is_late)


def may_be_of_a_peer(how: str) -> bool:
    """Tell whether an error may be nothing but a connection to a peer that failed first."""
    return _OF_A_PEER.search(how) is not None


def first_ranks(nodes: Sequence[Introduction]) -> list[int]:
    """Return the first global rank of every node, and at the end the number of all ranks."""
    firsts = [0]
    for node in nodes:
        firsts.append(firsts[-1] + node.num_ranks)
    return firsts


def addresses() -> list[str]:
    """Return every address of this node by which another one may see it."""
    found = {*_ipv4(), *_ipv6()}
    return sorted(a for a in found if not ipaddress.ip_address(a).is_loopback)


def of_others(nodes: Sequence[Introduction], me: int) -> list[str]:
    """Return the addresses of all nodes but this one: those that this one has, too, are no node's."""
    mine = set(nodes[me].addresses)
    return sorted({a for node in nodes for a in node.addresses} - mine)


def _ipv4() -> list[str]:
    """The kernel's table of routes names each address of this network once as `32 host LOCAL`."""
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
