"""Two runs and one root: one at a time, and who was superseded commits no more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import holdfast
import holdfast.session.checkpointer
from holdfast.core.checkpoint.claiming import Claim, claim, newest_claim, take_root
from holdfast.core.checkpoint.names import CLAIMED_PARTS, RootKeys
from holdfast.core.checkpoint.notes import read_notes
from holdfast.core.checkpoint.pruning import prune
from holdfast.errors import RankErrors, UsageError
from system.crash.single import WAIT_S, contents, life, memory, state_of

HOLDER = """
import sys, time
sys.path.insert(0, {here!r})
from system.crash.single import state_of
import holdfast
ckpt = holdfast.Checkpointer(sys.argv[1], state_of(1.0))
ckpt.save(1).wait(300)
print("holding", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_the_second_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    script = HOLDER.format(here=str(Path(__file__).parents[2]))
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "root")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "holding\n"
        with pytest.raises(UsageError, match=f"in use by run 1 .*pid {holder.pid}"):
            holdfast.Checkpointer(tmp_path / "root", state_of(2.0))
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    state = state_of(2.0)
    with holdfast.Checkpointer(tmp_path / "root", state) as ckpt:
        assert ckpt.restore() == 1
        assert state["data"]["value"] == 1.0
        ckpt.save(2).wait(WAIT_S)
    assert holdfast.steps(tmp_path / "root") == [1, 2]


def test_a_superseded_run_commits_no_more() -> None:
    store = memory()
    first_state = state_of(1.0)
    first = holdfast.Checkpointer(store.url, first_state)
    first.save(1).wait(WAIT_S)
    second_state = state_of(2.0)
    second = holdfast.Checkpointer(store.url, second_state)  # as from another host: it cannot tell
    assert second.restore() == 1
    second_state["data"].update(state_of(2.0)["data"])
    second.save(2).wait(WAIT_S)
    with pytest.raises(RankErrors, match="taken over by run 2"):
        first.save(1).wait(WAIT_S)
    assert contents(store) == {1: 1.0, 2: 2.0}
    first.close()
    second.save(3).wait(WAIT_S)  # the loser's leaving does not disturb
    second.close()
    assert contents(store) == {1: 1.0, 2: 2.0, 3: 2.0}


def test_a_run_that_went_back_is_newer_than_what_it_left_behind(monkeypatch) -> None:
    store = memory()
    life(monkeypatch, store, [(50, 1.0), (100, 1.0)])
    life(monkeypatch, store, [(60, 2.0)], back=50)
    with holdfast.open(store.url) as c:
        assert c.step == 60
    life(monkeypatch, store, [(70, 3.0)], keep=holdfast.Keep(last=2))
    assert contents(store) == {60: 2.0, 70: 3.0, 100: 1.0}  # which is not of its line
    assert prune(store, holdfast.Keep(last=2)) == [100]
    assert contents(store) == {60: 2.0, 70: 3.0}


@pytest.mark.parametrize("is_coming", [False, True])
def test_a_label_goes_with_the_step_that_another_run_replaces(is_coming: bool) -> None:
    """It would name another state; one that was given to the new step stays."""
    store, state = memory(), state_of(50.0)
    with holdfast.Checkpointer(store.url, state) as ckpt:
        ckpt.save(50).wait(WAIT_S)
        state["data"].update(state_of(100.0)["data"])
        save = ckpt.save(100)
        if not is_coming:
            save.wait(WAIT_S)
        ckpt.pin(100, "best")
        ckpt.pin(50, "first")
        assert ckpt.restore(50) == 50
        state["data"].update(state_of(-1.0)["data"])
        save = ckpt.save(100)
        ckpt.pin(100, "new")
        save.wait(WAIT_S)
        with pytest.warns(holdfast.HoldfastWarning, match="'best', and was saved anew by run 2"):
            ckpt.save(101).wait(WAIT_S)
        assert read_notes(store).live_labels == {"first": 50, "new": 100}
        ckpt.save(100).wait(WAIT_S)  # the same run's
        assert read_notes(store).live_labels == {"first": 50, "new": 100}


def test_numbers_are_never_used_twice() -> None:
    store = memory()
    runs = [claim(store).run for _ in range(5)]
    assert runs == [1, 2, 3, 4, 5]
    assert [k for k in store.list("claims/")] == ["claims/0000000005.json"]


@pytest.mark.parametrize("since", [1, 2, 3])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_claim_by_an_old_listing_is_the_newest(before: int, since: int) -> None:
    """Whatever other runs have claimed since the root was listed, and which claims they have deleted."""
    store = memory()
    for _ in range(before):
        claim(store)
    keys = RootKeys(store, below=CLAIMED_PARTS)
    last = [claim(store) for _ in range(since)][-1]
    mine, held = take_root(store, keys)
    assert mine.run == before + since + 1 and held == last
    assert newest_claim(store) == mine


def test_a_run_that_lives_is_seen_though_the_listing_is_older(monkeypatch) -> None:
    store = memory()
    claim(store)
    keys = RootKeys(store, below=CLAIMED_PARTS)
    claim(store)
    monkeypatch.setattr(Claim, "alive_elsewhere", lambda self: self.run == 2)
    with pytest.raises(UsageError, match="in use by run 2"):
        take_root(store, keys)
    assert store.list("claims/") == ["claims/0000000002.json"]


def test_a_step_that_was_committed_after_the_claim_is_restored() -> None:
    store = memory()
    with holdfast.Checkpointer(store.url, state_of(1.0)) as ckpt:
        ckpt.save(1).wait(WAIT_S)
    state = state_of(3.0)
    with holdfast.Checkpointer(store.url, state) as ckpt:
        holdfast.save(store.url, state_of(2.0), step=2)
        assert ckpt.restore() == 2 and state["data"]["value"] == 2.0


@pytest.mark.parametrize(
    "damage", [b"", b"\xff\xfe", b"[" * 100_000, b'{"run":1}', b'{"run":"\xff"}']
)
def test_a_damaged_claim_is_superseded(damage) -> None:
    store = memory()
    claim(store)
    store.put("claims/0000000001.json", damage)
    assert newest_claim(store).run == 1
    assert claim(store).run == 2


def test_a_claim_that_states_another_number_is_damaged() -> None:
    store = memory()
    forged = msgspec.structs.replace(claim(store), run=10**30)
    store.put("claims/0000000001.json", msgspec.json.encode(forged))
    assert claim(store).run == 2


def test_this_process_may_take_its_own_root_again() -> None:
    store = memory()
    assert claim(store).pid == os.getpid()
    assert claim(store).run == 2
