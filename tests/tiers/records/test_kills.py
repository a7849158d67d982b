"""Training processes and writers that are killed at every phase of a record, on two ranks.

After each death: all ranks restore the same step, in the very state that the uninterrupted training had
after it, and no more is lost than is promised.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.base import background
from holdfast.core.checkpoint.recorded import parse_segment
from holdfast.store import LocalStore
from tiers.memory.zygote import Lives, Told

from . import dying_writer
from .test_damage import at_step
from .test_delta_lives import KILLED
from .test_exact import OPTIMIZERS, Run, check_equal, checkpointer, forget, root  # noqa: F401

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FAR = 1000
CALLS_OF_A_RECORD = {"open", "pwrite", "fsync", "link", "unlink"}
FSDP: dict[str, Any] = {"layout": "fsdp", "memory": None, "grace_s": 0.3, "settle": False}


class Chain:
    """Lives of one training; each begins with what the one before left, and so tells what was lost.
    Its end compares all that was restored with the uninterrupted training."""

    def __init__(self, lives: Lives, **script: Any) -> None:
        self.lives = lives
        self.began: dict[int, tuple[int, str]] = {}
        """By number of a life, the step that it restored, and the digest of that state."""
        self.script = {**FSDP, **script}
        self.step = 0
        """That the last life has restored."""
        self.allowed: Iterable[int] = (0,)
        """What the next one may restore."""

    def live(
        self, *deaths: tuple[int, str, int | str], restores: bool = True, **script: Any
    ) -> list[Told]:
        """Until those (rank, moment, number) die; what each rank told.  Unless it `restores`, that is
        before `restore` returns: what is allowed after it is what was before."""
        options = {"until": FAR, **self.script, **script, "deaths": deaths}
        told = self.lives.live(nodes=[0, 0], **options)
        for rank, at, _ in deaths:
            assert told[rank].status == KILLED, (at, told[rank].lines[-3:], self.lives.errors())
        assert all(one.lines for one in told), self.lives.errors()
        if not restores:
            assert not [line for one in told for line in one.lines if "restored" in line]
            return told
        self.step = told[0].restored
        assert {one.restored for one in told} == {self.step}
        assert self.step in self.allowed, (self.step, self.allowed, deaths)
        (digest,) = {one.start for one in told}
        self.began[self.lives.number] = self.step, digest
        return told

    def die(self, at: str, ranks: Iterable[int], number: int) -> None:
        """At the `number`-th record of a life.  A new training begins with a full save of step 1, which
        is complete before anybody dies."""
        more = (
            {"grace_s": 3.0} if at == "put-done" else {}
        )  # for the other rank to hand over its own
        self.live(*((rank, at, number) for rank in ranks), settle_at=1, **more)
        begun = self.step or 1
        self.allowed = (begun + number - (at != "put-done"),)

    def end(self) -> None:
        """A last life that only restores; then the uninterrupted training, as far as any life has begun:
        how far one gets before it dies, the machine decides."""
        self.live(until=0)
        until = max(step for step, _ in self.began.values())
        reference = self.lives.live(nodes=[0, 0], until=until, layout="fsdp", reference=True)
        digests = reference[0].digests
        assert until and digests.keys() == set(range(1, until + 1)), self.lives.errors()
        restored = {n: (step, digest) for n, (step, digest) in self.began.items() if step}
        assert restored == {n: (step, digests[step]) for n, (step, _) in restored.items()}


def died_at(calls: Path) -> set[str]:
    """The calls before which writers died, as they have written them down."""
    return {x.removeprefix("died ") for x in calls.read_text().splitlines() if x.startswith("died")}


def last_step(told: Told) -> int:
    """That a rank has done, with its record."""
    return max(told.digests, default=told.restored)


DEATHS: tuple[tuple[str, list[int], int], ...] = (
    ("copy", [1], 2),
    ("put", [0], 1),
    ("put-done", [1], 1),
    ("put-done", [0, 1], 3),
)
MORE_DEATHS = (("copy", [0, 1], 3), ("put", [1], 3), ("put", [0, 1], 2))


@pytest.mark.parametrize(
    "deaths",
    [DEATHS, pytest.param((*DEATHS, *MORE_DEATHS), marks=pytest.mark.soak)],
    ids=["moments", "all"],
)
def test_a_trainer_dies(lives: Lives, deaths: tuple[tuple[str, list[int], int], ...]) -> None:
    """At each moment of a record, on one rank or on both.  What was handed over is not lost, and what one
    rank alone has handed over is not taken."""
    chain = Chain(lives, delta={})
    for at, ranks, number in deaths:
        chain.die(at, ranks, number)
    chain.end()


@pytest.mark.soak
def test_a_trainer_dies_in_mid_batch(lives: Lives) -> None:
    """The writer still writes what is no whole batch."""
    chain = Chain(lives, delta={"batch": 3})
    chain.die("put-done", [0, 1], 2)
    chain.die("put-done", [1], 4)
    chain.die("put-done", [0, 1], 5)
    chain.die("put-done", [0], 1)
    chain.end()


@pytest.mark.soak
def test_trainers_die_before_their_writers_have_begun(lives: Lives) -> None:
    """What they have handed over is in shared memory: who restarts waits for it to be written."""
    chain = Chain(lives, delta={})
    chain.live((0, "put-done", 4), (1, "put-done", 4), delay_writer=1.0)
    chain.allowed = (5,)  # the full save of the first step, and four records
    chain.end()


@pytest.mark.soak
@pytest.mark.parametrize("at", ["announce", "announced"])
def test_trainers_die_while_writers_are_announced(lives: Lives, at: str) -> None:
    """Nothing is recorded yet, and a writer that has no order writes nothing and ends."""
    chain = Chain(lives, delta={})
    chain.live((0, at, 1), (1, at, 1))
    chain.allowed = (0, 1)  # the full save of the first step may be complete or not
    chain.die("put-done", [0, 1], 3)
    chain.live((0, at, 1), (1, at, 1), restores=False)
    chain.end()


@pytest.mark.soak
def test_a_trainer_dies_while_ranks_plan(lives: Lives) -> None:
    """Nothing is recorded yet."""
    chain = Chain(lives, delta={})
    chain.live((0, "plan", 1))
    chain.allowed = (0, 1)  # the full save of the first step may be complete or not
    chain.die("put", [0], 3)
    chain.live((0, "plan", 1), restores=False)
    chain.end()


@pytest.mark.parametrize(
    "numbers",
    [range(2, 3), pytest.param(range(1, 50), marks=pytest.mark.soak)],
    ids=["kinds", "all"],
)
def test_a_node_dies_while_it_writes(lives: Lives, numbers: range) -> None:
    """Rank 1 and its writer, before each kind of call of the writer that changes a file, or before each
    call: what it had said to be written is there."""
    chain = Chain(lives, delta={"queue": 1})
    died: set[str] = set()
    wrote: list[int] = []

    def die(at: int | str) -> None:
        told = chain.live((1, "writer", at))
        died.update(died_at(lives.place / f"life{lives.number}" / "calls"))
        wrote[:] = [int(e["step"]) for e in told[1].events("delta.wrote")]
        done = last_step(told[1])  # before it, one record that is written, and one that waits
        chain.allowed = range(max([chain.step, done - 2, *wrote]), done + 2)

    for number in numbers:
        die(number)
        if wrote and died >= CALLS_OF_A_RECORD:
            break
    for call in sorted(CALLS_OF_A_RECORD - died):  # which call is the n-th, the machine decides
        die(call)
    chain.end()
    assert died >= CALLS_OF_A_RECORD


@pytest.mark.soak
def test_a_trainer_dies_while_records_are_deleted(lives: Lives) -> None:
    """Those that no step needs which is kept."""
    chain = Chain(lives, delta={}, durable=3, keep={"last": 1}, settle=True)
    for number in (1, 2, 4):
        done = last_step(chain.live((0, "delete", number))[0])
        chain.allowed = (done, done + 1)
    chain.end()
    oldest = min(holdfast.steps(str(lives.place / "root")))
    logs = map(parse_segment, LocalStore(lives.place / "root").list("log/"))
    assert all(last > oldest for _, _, last, _ in filter(None, logs))


@pytest.mark.parametrize(
    "is_every", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["kinds", "all"]
)
def test_a_writer_dies(
    root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    is_every: bool,
) -> None:
    """Before each kind of call that changes a file, or before each call, and its successors, too; the
    training goes on, and nothing is lost."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    expected = at_step(5)

    def die(*which: int | str) -> set[str]:
        """How the writers of a training died, the i-th of them before `which[i]`."""
        here, calls = (root / "-".join(map(str, (name, *which))) for name in ("root", "calls"))
        fake = dying_writer.instead(which, calls, trainer=False)
        with monkeypatch.context() as patched:
            patched.setattr(background, "subprocess", fake)
            run = Run(OPTIMIZERS["adamw"])
            with checkpointer(here, run, batch=2) as ckpt:
                for step in range(1, 6):
                    run.step(step)
                    ckpt.step(step)
        forget(here, 4)
        again = Run(OPTIMIZERS["adamw"])
        with checkpointer(here, again) as ckpt:
            assert ckpt.restore() == 5
        check_equal(again.everything(), expected)
        return died_at(calls)

    died = die(2, 2, 2)  # the second finds a directory, and dies before it opens a file
    if not is_every:
        died |= die("open", "pwrite", "fsync")
    for number in itertools.count(1, 3) if is_every else ():
        more = die(number, number + 1, number + 2)
        died |= more
        if not more:
            break
    for call in CALLS_OF_A_RECORD - died:  # which call is the n-th, the machine decides
        died |= die(call)
    assert died >= CALLS_OF_A_RECORD
