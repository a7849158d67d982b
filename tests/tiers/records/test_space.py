"""Logs that keep within a bound, and disks that have no room for one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
import holdfast.live.roots
from holdfast.errors import OutOfSpace, Unavailable, UsageError
from holdfast.store import LocalStore
from holdfast.testing import Faulty
from holdfast.tiers.records.space import by_age, needed_bytes
from tiers.memory.zygote import Lives

from .test_damage import small_disk  # noqa: F401
from .test_delta_lives import KILLED
from .test_exact import OPTIMIZERS, Run, check_equal, root  # noqa: F401

pytestmark = pytest.mark.slow

RECORD = 50_000
"""More than one takes of this model."""
BOUND = 20 * RECORD
STEPS = 40


def new() -> Run:
    run = Run(OPTIMIZERS["adamw"])
    del run.model.large
    return run


def log_bytes(root: Path) -> int:  # noqa: F811
    return sum(size for size, _, _ in by_age(LocalStore(root).entries("log/"), (0, 0)))


def checkpointer(root: Path, run: Run, **options: Any) -> holdfast.Checkpointer:  # noqa: F811
    options = {"every": holdfast.Every(delta=1), "on_error": "raise", **options}
    delta = holdfast.Delta(max_bytes=options.pop("max_bytes", BOUND), queue=1)
    return holdfast.Checkpointer(root, run.state, delta=delta, **options)


def train(
    ckpt: holdfast.Checkpointer, run: Run, step: int, until: int, see: Callable[[], None]
) -> None:
    """From one step to another, with storage that deletes as fast as the training records."""
    while step < until:
        step += 1
        run.step(step)
        ckpt.step(step)
        ckpt._tiers.durable.steps.worker.settle(60)
        see()
        ckpt.wait()


@pytest.mark.soak_except("all", "last=3")
@pytest.mark.parametrize(
    "keep",
    [None, holdfast.Keep(last=1), holdfast.Keep(last=3)],
    ids=["all", "last=1", "last=3"],
)
def test_a_log_keeps_within_its_bound(root: Path, keep: holdfast.Keep | None) -> None:  # noqa: F811
    """By full saves that are made for it; over two lives, and whatever steps are kept."""
    seen = []

    def see() -> None:
        seen.append(log_bytes(root))

    run = new()
    with checkpointer(root, run, keep=keep) as ckpt:
        train(ckpt, run, 0, STEPS, see)
    run = new()
    with checkpointer(root, run, keep=keep) as ckpt:
        assert ckpt.restore() == STEPS
        run.in_place = False
        train(ckpt, run, STEPS, 2 * STEPS, see)
        expected = run.everything()
    assert BOUND / 8 < max(seen) <= BOUND
    saved = holdfast.steps(str(root))
    assert len(saved) == keep.last if keep else 8 < len(saved) < STEPS
    again = new()
    with checkpointer(root, again, keep=keep) as ckpt:
        assert ckpt.restore() == 2 * STEPS
    check_equal(again.everything(), expected)


def test_records_pause_while_no_full_save_succeeds(
    root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Aloud, and training goes on; when one does, they begin again."""
    broken = [False]

    def fail(op: str, key: str) -> Exception | None:
        if broken[0] and key.startswith("steps/") and op == "create":
            return Unavailable("storage is away", key=key)
        return None

    monkeypatch.setattr(
        holdfast.live.roots, "open_store", lambda url: Faulty(LocalStore(root), fail)
    )
    run, seen = new(), []

    def see() -> None:
        seen.append(log_bytes(root))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with checkpointer(root, run, on_error="warn") as ckpt:
            train(ckpt, run, 0, 2, see)
            broken[0] = True
            train(ckpt, run, 2, STEPS, see)
            assert max(seen) <= BOUND / 2
            broken[0] = False
            train(ckpt, run, STEPS, STEPS + 9, see)
            expected = run.everything()
    assert any("records pause" in str(w.message) for w in caught)
    again = new()
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == STEPS + 9
    check_equal(again.everything(), expected)


def test_a_disk_without_room_for_the_records(small_disk: Path) -> None:  # noqa: F811
    """Said before anything is recorded, with numbers; as an error, if errors are to be raised."""

    def begin(on_error: str, **every: int) -> None:
        run = new()
        options = {"every": holdfast.Every(delta=1, **every), "max_bytes": None}
        with checkpointer(small_disk, run, on_error=on_error, anew=True, **options) as ckpt:
            train(ckpt, run, 0, 3, lambda: None)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin("warn", durable=10)
    with pytest.warns(holdfast.HoldfastWarning, match=r"kB a step and .* MB until .* are free in"):
        begin("warn", durable=1000)
    with pytest.raises(OutOfSpace, match="are free in"):
        begin("raise", durable=1000)


def test_bounds_that_cannot_be(root: Path) -> None:  # noqa: F811
    with pytest.raises(UsageError, match="not a size"):
        holdfast.Delta(max_bytes="a lot")
    run = new()
    ckpt = checkpointer(root, run, max_bytes="100kB")
    with pytest.raises(UsageError, match="four steps must fit"):
        train(ckpt, run, 0, 3, lambda: None)
    ckpt.close()


@pytest.mark.soak
@pytest.mark.distributed
def test_two_ranks_keep_within_a_bound(lives: Lives) -> None:
    """They make full saves at the same steps, and one that is full does not stop the other: what a restart
    needs keeps within half, and what it does not need goes, at the latest when the next life has saved."""
    record = 2 * 400 * 800 * 4 + 100_000
    script = {"layout": "fsdp", "memory": None, "delta": {"max_bytes": 16 * record}}
    told = lives.live(nodes=[0] * 2, until=24, die=True, **script)
    assert [t.status for t in told] == [KILLED] * 2, lives.errors()
    where = lives.place / "root"
    assert 2 < len(holdfast.steps(str(where))) < 12
    assert needed_bytes(LocalStore(where)) <= 8 * record
    again = lives.live(nodes=[0] * 2, until=36, **script)
    assert {(t.restored, t.start) for t in again} == {(24, told[0].digests[24])}, lives.errors()
    assert 0 < log_bytes(where) <= 16 * record


def test_a_disk_keeps_room_for_the_next_full_save(small_disk: Path) -> None:  # noqa: F811
    """Records end before they take it, and those that the newest state does not need go for it: so every
    full save that is due is made, and the last one is where a restart begins."""
    run = new()
    options = {"every": holdfast.Every(delta=1, durable=12), "max_bytes": None, "on_error": "warn"}
    place = small_disk / "root"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with checkpointer(place, run, **options) as ckpt:
            train(ckpt, run, 0, 3, lambda: None)
            full = sum(path.stat().st_size for path in place.glob("steps/*/*/*"))
            free = LocalStore(place).free_bytes() or 0
            (small_disk / "filler").write_bytes(bytes(free - 4 * full - 5 * RECORD))
            train(ckpt, run, 3, 36, lambda: None)
        expected = run.everything()
    told = [str(w.message) for w in caught if isinstance(w.message, holdfast.HoldfastWarning)]
    assert any("records leave room for the next full save" in text for text in told), told
    assert not any("save of step" in text for text in told), told
    assert holdfast.steps(str(place)) == [1, 12, 24, 36]
    again = new()
    with checkpointer(place, again, **options) as ckpt:
        assert ckpt.restore() == 36
    check_equal(again.everything(), expected)
