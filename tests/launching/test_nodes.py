"""What the launchers of several nodes make of what they tell each other."""

from __future__ import annotations

import socket

import pytest
from msgspec.structs import replace

from holdfast.launch.command import main
from holdfast.launch.neighbours import Door, Neighbour
from holdfast.launch.nodes import (
    EndOfRound,
    Introduction,
    RankFailure,
    addresses,
    blamed,
    first_ranks,
    may_be_of_a_peer,
    of_others,
)
from holdfast.launch.repeated_failures import SAME, Failures

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.77.0.3]:4711"


def failure(how: str, rank: int = 0, step: int = 7) -> RankFailure:
    return RankFailure(rank, 100 + rank, step, how, not may_be_of_a_peer(how))


def test_a_peer_that_is_lost_is_to_blame_and_not_who_noticed_it() -> None:
    killed, noticed = failure("it was killed by SIGKILL", 2), failure(GLOO, 1)
    first = EndOfRound([noticed], is_first=True)
    assert blamed({0: first, 1: EndOfRound([killed])}, []) == (1, killed)
    assert blamed({0: first, 1: EndOfRound([])}, []) == (0, noticed)
    assert blamed({0: first}, [1]) is None  # a node is lost
    assert blamed({0: EndOfRound([]), 1: EndOfRound([])}, []) is None  # a node joins
    late = replace(failure("ValueError", 2), is_late=True, is_of_script=True)
    assert blamed({0: first, 1: EndOfRound([late])}, []) == (
        1,
        late,
    )  # its rank was still on its way out
    assert blamed({0: EndOfRound([late]), 1: EndOfRound([killed], is_first=True)}, []) == (
        1,
        killed,
    )
    both = {0: EndOfRound([noticed]), 1: EndOfRound([failure(GLOO, 2)], is_first=True)}
    assert blamed(both, []) == (1, failure(GLOO, 2))


def test_a_round_that_a_node_ends_by_joining_has_nobody_to_blame() -> None:
    """What the cut of collectives did to the ranks is not theirs; what the script raises is."""
    cut = replace(failure(GLOO, 1), is_late=True, is_of_script=True)
    slow = replace(failure("it was killed by SIGKILL", 2), is_late=True)
    first = EndOfRound([cut, slow], is_first=True)
    assert blamed({0: first, 1: EndOfRound([cut])}, []) is None
    assert blamed({0: first, 1: EndOfRound([failure(GLOO, 3)])}, []) is None
    assert (
        blamed({0: EndOfRound([cut]), 1: EndOfRound([slow])}, []) is None
    )  # nobody heard who was first
    killed = failure("it was killed by SIGKILL", 3)
    assert blamed({0: first, 1: EndOfRound([killed])}, []) == (1, killed)
    raised = replace(failure("ValueError", 3), is_late=True, is_of_script=True)
    assert blamed({0: first, 1: EndOfRound([cut, raised])}, []) == (1, raised)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (GLOO, True),
        ("torch.distributed.DistBackendError: NCCL error in: ...", True),
        ("torch.distributed.DistNetworkError: failed to recv", True),
        ("holdfast.errors.Deadline: rank 3 did not answer within 60 s", True),
        ("ValueError: a fault at step 8", False),
        ("it was killed by SIGKILL", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
    ],
)
def test_which_errors_may_be_a_peers(how: str, expected: bool) -> None:
    assert may_be_of_a_peer(how) is expected


def test_ranks_and_addresses() -> None:
    nodes = [
        Introduction("a", 2, ["10.0.0.1", "172.17.0.1"]),
        Introduction("b", 3, ["10.0.0.2", "172.17.0.1"]),
        Introduction("c", 1, ["10.0.0.3"]),
    ]
    assert first_ranks(nodes) == [0, 2, 5, 6]
    assert of_others(nodes, 0) == ["10.0.0.2", "10.0.0.3"]  # every node has a docker0
    assert not {"127.0.0.1", "::1"} & set(addresses())


def test_failures_that_come_again() -> None:
    seen = Failures()
    for after_s in (1.0, 70.0, 2.0):
        seen.note(failure("it ended with 3"), "a", 1, after_s)
    assert seen.are_same and not seen.are_of_a_slot and not seen.are_of_a_node
    seen.forget()
    for step in range(SAME):
        seen.note(failure("it ended with 3", step=step), "a", 1, 1.0)
    assert seen.are_of_a_slot and seen.are_of_a_node and not seen.are_same
    seen.note(failure("it ended with 3", step=9), "a", 0, 1.0)
    assert seen.are_of_a_node and not seen.are_of_a_slot
    seen.note(failure("it ended with 3", step=9), "b", -1, 1.0)
    assert not seen.are_of_a_node


def test_an_exception_of_the_script_is_the_same_on_any_rank_and_a_kill_is_not() -> None:
    raised, killed = Failures(), Failures()
    for rank in range(SAME):
        raised.note(RankFailure(rank, 1, 7, "ValueError", True, "traceback"), "a", rank, 1.0)
        killed.note(RankFailure(rank, 1, 7, "it was killed by SIGKILL", True), "a", rank, 1.0)
    assert raised.are_same and not killed.are_same


@pytest.mark.parametrize(("after_s", "ends"), [(1.0, True), (3600.0, False)])
@pytest.mark.parametrize("is_of_script", [True, False], ids=["raised", "killed"])
def test_failures_of_a_rank_that_tells_no_step(
    is_of_script: bool, after_s: float, ends: bool
) -> None:
    """They may be at the same step only if they come at once: others are days apart."""
    seen = Failures()
    how = "ConnectionResetError" if is_of_script else "it was killed by SIGKILL"
    for _ in range(SAME):
        seen.note(RankFailure(2, 1, 0, how, True, is_of_script=is_of_script), "a", 2, after_s)
    assert seen.are_same is ends


def test_a_door_tells_that_its_launcher_has_ended() -> None:
    mine, door = Door(2), Door(2)
    here = Introduction("a", 1, ["10.0.0.1"], mine.port, mine.secret)
    there = Introduction("b", 1, ["127.0.0.1"], door.port, door.secret)
    neighbour = Neighbour.of([here, there], 0)
    assert neighbour is not None and not neighbour.is_gone()
    (visitor,) = door.visitors()
    visitor.shutdown(socket.SHUT_RDWR)  # the connection breaks, and the launcher lives
    assert not neighbour.is_gone() and not neighbour.is_gone()
    door.close()
    assert neighbour.is_gone()
    assert Neighbour.of([here], 0) is None


def test_several_nodes_need_a_rendezvous_at_which_they_can_meet_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--nnodes=2", "--node-rank=0", "--master-addr=10.0.0.1", __file__]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "--rdzv-backend=static: its nodes cannot meet again" in said
    assert main(["--nproc-min", "0", __file__]) == 2
    assert "--nproc-min 0" in capsys.readouterr().err
