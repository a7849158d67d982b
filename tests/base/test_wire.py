"""An error that crosses to another process is the same error there: all classes, all boundaries."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
import torch.distributed as dist

from holdfast import errors
from holdfast.base.wire import (
    ERROR_KINDS,
    WireError,
    decode_error,
    decode_json,
    decode_msgpack,
    encode_error,
    rank_errors,
)
from holdfast.core.checkpoint.peers import raise_together
from holdfast.core.group.board import Board
from holdfast.core.group.exchange import Exchange
from holdfast.core.group.message_auth import Seal
from holdfast.core.group.store_requests import StoreLine
from holdfast.errors import (
    AgentError,
    AgentUnreachable,
    Corrupt,
    HoldfastError,
    OutOfSpace,
    RankErrors,
    SegmentLost,
    UsageError,
)
from holdfast.formats.write.converting_ranks import Ranks
from holdfast.live.saving.messages import ReadyToSave, SaveOutcome, Verdict, Written
from holdfast.store import MemoryStore
from holdfast.tiers.memory.decision import Decision
from holdfast.tiers.memory.node import effects, state_machine
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.jobs import Job, PersistTask, State
from holdfast.tiers.memory.node.messages import Slot
from holdfast.tiers.records import messages as delta_messages
from holdfast.tiers.records.queue import Queue
from holdfast.tiers.records.segment import Record

WHERE: dict[str, Any] = {"step": 7, "key": "steps/7/r", "rank": 3, "hint": "free some"}
INNER = OutOfSpace("disk is full", rank=1, hint="free some")
OWN: dict[type[HoldfastError], dict[str, Any]] = {
    errors.StateMismatch: {"problems": ("'a' is missing", "'b' is new")},
    errors.Corrupt: {"start": 4, "stop": 8, "expected": "ab", "found": "cd"},
    errors.NotRecoverable: {"reasons": {3: "damaged", 2: "gone"}},
    errors.RankErrors: {"errors": {1: "OutOfSpace: disk is full"}, "causes": {1: INNER}},
}
KIND = pytest.mark.parametrize("kind", ERROR_KINDS.values(), ids=list(ERROR_KINDS))


def make(kind: type[HoldfastError]) -> HoldfastError:
    return kind("it failed", **OWN.get(kind, {}), **WHERE)


def facts(error: BaseException) -> Any:
    """All that an error says: its class, its text, its attributes."""
    known = dict(vars(error))
    known["causes"] = {rank: facts(one) for rank, one in known.get("causes", {}).items()}
    return type(error), str(error), error.args, known


def raised(work: Callable[[], object]) -> Any:
    with pytest.raises(Exception) as caught:
        work()
    return caught.value


def both(work: Callable[[int], object]) -> list[Any]:
    """What two ranks raise that do the same side by side."""
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(work, rank) for rank in range(2)]
        return [raised(future.result) for future in futures]


# -- the boundaries: each takes an error to another process and gives what is raised there --------


def boards() -> list[Board]:
    store = dist.HashStore()
    made = [Board(rank, 2, 30.0, Seal(b"key")) for rank in range(2)]
    for board in made:
        board._line = StoreLine(lambda: store, "rank 0", 0)
    return made


def by_the_board(error: HoldfastError) -> HoldfastError:
    pair = boards()

    def decide(_: Sequence[bytes]) -> bytes:
        raise error

    return both(lambda rank: pair[rank].ask("x/1", b"", decide))[1]


class Said(Exchange):
    """Rank 0 or 1 of two; what rank 0 broadcasts is a list of one message."""

    size = 2

    def __init__(self, rank: int, said: list[bytes]) -> None:
        self.rank = rank
        self._said = said

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        if data is not None:
            self._said.append(data)
        return self._said[0]


def from_rank_0(error: HoldfastError) -> HoldfastError:
    said: list[bytes] = []

    def fail() -> bytes:
        raise error

    raised(lambda: Said(0, said).from_rank0(fail))
    return raised(lambda: Said(1, said).from_rank0(fail))


class Pair:
    """The peers of a load: two ranks, in threads."""

    size = 2

    def __init__(self, rank: int, shared: dict[int, bytes], barrier: threading.Barrier) -> None:
        self.rank = rank
        self._shared = shared
        self._barrier = barrier

    def any(self, flag: bool) -> bool:
        return True

    def all_gather(self, data: bytes) -> list[bytes]:
        self._shared[self.rank] = data
        self._barrier.wait(120)
        return [self._shared[0], self._shared[1]]


def by_loading_peers(error: HoldfastError) -> HoldfastError:
    shared: dict[int, bytes] = {}
    barrier = threading.Barrier(2)

    def load(rank: int) -> None:
        raise_together(Pair(rank, shared, barrier), error if rank == 1 else None, None)  # type: ignore[arg-type]

    return cause(both(load)[0])


def cause(together: HoldfastError) -> HoldfastError:
    """The error of rank 1 in that of all ranks; itself, if all raise the one of rank 1."""
    if isinstance(together, RankErrors) and isinstance(together.causes[1], HoldfastError):
        return together if together.message == "it failed" else together.causes[1]
    return together


def sent(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


def before_a_save(error: HoldfastError) -> HoldfastError:
    ready = sent(ReadyToSave(7, False, "", "", {}, WireError.of(error)))
    verdict = sent(Verdict(False, [], {}, {}, {1: ready.error}))
    return rank_errors("save of step 7", verdict.errors, 7).causes[1]


def after_a_save(error: HoldfastError) -> HoldfastError:
    written = sent(Written(WireError.of(error), None, {}))
    outcome = sent(SaveOutcome({1: written.error}))
    return rank_errors("save of step 7", outcome.errors, 7).causes[1]


def by_a_decision(error: HoldfastError) -> HoldfastError:
    decision = sent(Decision({1: WireError.of(error)}))
    return rank_errors("snapshot of step 7", decision.errors, 7).causes[1]


def answered(state: State, message: w.Message) -> HoldfastError:
    """What the client of an agent raises."""
    (refused,) = [
        e for e in state_machine.step(state, message, 0.0)[1] if isinstance(e, effects.Refuse)
    ]
    return msgspec.convert(msgspec.msgpack.decode(w.encode(refused.error)), WireError).error()


def by_the_agent(error: HoldfastError) -> HoldfastError:
    order = w.Persist("j", "a1", 1, 10, "s", "k", 9.0)
    state = State(100).with_job(Job("j"), writing={("a1", 1): PersistTask(order, 5)})
    return answered(state, w.Wrote("j", "a1", 1, WireError.of(error)))


def by_the_writer_of_records(error: HoldfastError) -> HoldfastError:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        delta_messages.send(theirs, delta_messages.RecordsWrote((2,), error=WireError.of(error)))
        message, _ = delta_messages.receive(ours, delta_messages.RecordsWrote)
    queue = Queue(MemoryStore("wire"), 1.0)
    queue._unwritten[2] = delta_messages.Put(2, Record(9, 0, 0, 0, 0, 0, ()))
    queue._wrote(message)
    assert queue.error is not None
    return queue.error


def by_a_conversion(error: HoldfastError) -> HoldfastError:
    pair = boards()

    def convert(rank: int) -> None:
        with Ranks(pair[rank]).all("files/1"):
            if rank == 1:
                raise error

    return both(convert)[0]


BOUNDARIES = (
    by_the_board, from_rank_0, by_loading_peers, before_a_save, after_a_save, by_a_decision,
    by_the_agent, by_the_writer_of_records, by_a_conversion,
)  # fmt: skip


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda b: b.__name__)
@KIND
def test_nothing_is_lost_on_the_way(
    kind: type[HoldfastError], boundary: Callable[[HoldfastError], HoldfastError]
) -> None:
    assert facts(boundary(make(kind))) == facts(make(kind))


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda b: b.__name__)
def test_errors_of_others_are_agent_errors_that_name_the_class(
    boundary: Callable[[HoldfastError], HoldfastError],
) -> None:
    found = boundary(KeyError("weight"))  # type: ignore[arg-type]
    assert type(found) is AgentError
    assert found.message == "KeyError: 'weight'"


# -- the form -------------------------------------------------------------------------------------


@KIND
def test_a_class_has_no_attribute_that_the_form_lacks(kind: type[HoldfastError]) -> None:
    assert vars(make(kind)).keys() <= set(WireError.__struct_fields__)


def test_the_place_is_added_where_the_error_does_not_say_it() -> None:
    data = encode_error(OutOfSpace("full"))
    assert str(decode_error(data, rank=2, step=5)) == "full (step 5, rank 2)"
    mine = encode_error(OutOfSpace("full", rank=0, step=4))
    assert (decode_error(mine, rank=2, step=5).rank, decode_error(mine, step=5).step) == (0, 4)


def test_a_subclass_of_nobody_else_arrives_as_its_class_of_the_tree() -> None:
    class Unfit(errors.LayoutError):
        pass

    error = Unfit("no", hint="yes")
    error.secret = 1  # type: ignore[attr-defined]
    assert facts(decode_error(encode_error(error))) == facts(errors.LayoutError("no", hint="yes"))


def test_what_cannot_be_encoded_as_it_is() -> None:
    """A number of numpy's, and a file name that is no UTF-8."""
    found = decode_error(encode_error(Corrupt("bad \udc80", start=np.int64(3), key="a\udcff")))
    assert isinstance(found, Corrupt)
    assert (found.message, found.start, found.key) == ("bad \\udc80", 3, "a\\udcff")


def test_texts_of_several_ranks() -> None:
    failed = {
        1: WireError.of(UsageError("no", hint="yes")),
        0: WireError.of(OSError(28, "No space"), "commit"),
    }
    assert str(rank_errors("save", failed)) == (
        "save failed on 2 rank(s)\n"
        "  rank 0: commit: OSError: [Errno 28] No space\n"
        "  rank 1: UsageError: no\n  hint: yes"
    )


# -- an agent and processes of before -------------------------------------------------------------


def test_the_answer_of_an_agent_of_before_is_understood() -> None:
    old = {"error": "UsageError", "text": "the agent of this node speaks version 0", "hint": ""}
    error = msgspec.convert(old, WireError).error()
    assert facts(error) == facts(UsageError("the agent of this node speaks version 0"))


def test_a_process_of_before_understands_the_answer() -> None:
    """It looks for these three, all of which it needs."""
    hello = w.Hello("j", "file:///x", 1, 0, 10, "1", version=w.VERSION + 1)
    (refused,) = state_machine.step(State(100), hello, 0.0, 1)[1]
    assert isinstance(refused, effects.Refuse)
    answer = msgspec.msgpack.decode(w.encode(refused.error))
    assert answer["error"] == "UsageError"
    assert answer["text"].startswith(f"the agent of this node speaks version {w.VERSION}")
    assert "holdfast agent stop" in answer["hint"]
    assert msgspec.msgpack.decode(w.encode(WireError.of(SegmentLost("x"))))["hint"] is None


@pytest.mark.parametrize(
    ("error", "kind"), [(make(Corrupt), Corrupt), (make(AgentUnreachable), SegmentLost)]
)
def test_a_slot_that_was_not_filled_says_why(error: HoldfastError, kind: type) -> None:
    slot = Slot("guard-00001-0", 100, "guard", 1, "filling", "a1", owner=10, ask=4)
    state = State(100).with_job(Job("j").with_slots(slot))
    found = answered(state, w.Digested("j", slot.name, "a1", "", WireError.of(error)))
    assert type(found) is kind
    assert found.message == "guard-00001-0: it failed"
    assert {name: getattr(found, name) for name in WHERE} == WHERE


FIRST_USE = """
import os, sys, threading
import msgspec
from holdfast.base.wire import decode_json, decode_msgpack

def together(*ways):
    found, barrier = [], threading.Barrier(len(ways))
    def use(way):
        barrier.wait()
        found.append(way())
    threads = [threading.Thread(target=use, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()
    yield found

def first_use(forks):
    class Leaf(msgspec.Struct):
        number: int
        names: dict[str, int]
    class Branch(msgspec.Struct):
        leaf: Leaf
        leaves: list[Leaf]
        named: dict[str, Leaf]
    class Tree(msgspec.Struct):
        branches: list[Branch]
        named: dict[str, list[Branch]]
        size: tuple[int, ...] = ()

    tree = Tree([Branch(Leaf(1, {"one": 1}), [], {})], {"two": []}, (3,))
    packed, text = msgspec.msgpack.encode(tree), msgspec.json.encode(tree)
    running = together(
        lambda: decode_msgpack(packed, Tree),
        lambda: decode_json(text, Tree),
        lambda: decode_msgpack(packed, list[Tree] | Tree),
    )
    next(running)
    if forks:
        if not (child := os.fork()):
            os._exit(decode_json(text, Tree) != tree)
        assert os.waitpid(child, 0)[1] == 0
    assert next(running) == [tree] * 3

sys.setswitchinterval(1e-6)
for number in range(1000):
    first_use(forks=number % 10 == 0)
"""


def test_the_first_use_of_a_class_by_several_threads_at_once() -> None:
    """msgspec itself crashes the process; nor does a process that is forked in this moment hang."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIRST_USE],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", [Any, dict[str, int], Verdict])
@pytest.mark.parametrize(
    ("decode", "data"),
    [
        (decode_json, b'{"x":' + b"[" * 100_000),
        (decode_json, b'{"\xff":1}'),
        (decode_msgpack, b"\x81\xa1x" + b"\x91" * 100_000),
        (decode_msgpack, b"\x81\xa1\xff\x01"),
    ],
)
def test_bytes_of_others_are_decode_errors_whatever_they_are(
    decode: Callable[..., Any], data: bytes, kind: Any
) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(data, kind)
