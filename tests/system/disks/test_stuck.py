"""Storage that does not answer: every call ends within its deadline, and says what was not answered."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.base import storage_deadlines
from holdfast.base.threads import Worker, idle, in_threads
from holdfast.errors import Deadline, HoldfastError, HoldfastWarning
from holdfast.session import tiers
from holdfast.store import LocalStore, be_patient
from system.disks.frozen import Frozen

DEADLINE_S = 0.4
"""Of calls on storage that does not answer; what is to succeed has more."""
ENOUGH_S = 60.0
"""Far more than anything here may take; what hangs does so until the end of the test."""
LITTLE_BYTES = 1 << 16
"""More than the table of an image here takes, and less than a read of its tensors."""


def state(size: int = 8) -> dict[str, Any]:
    return {"data": {"w": torch.arange(float(size))}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With step 1."""
    holdfast.save(tmp_path / "root", state(), step=1)
    return tmp_path / "root"


def ended(call: Callable[[], object], within_s: float = ENOUGH_S) -> BaseException | None:
    """How a call ends.  It is made in a thread, so that one that hangs fails its own test only."""
    how: list[BaseException | None] = []

    def make() -> None:
        try:
            call()
            how.append(None)
        except BaseException as error:
            how.append(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(within_s)
    assert not thread.is_alive(), "it hangs"
    return how[0]


CALLS: dict[str, Callable[[Path], object]] = {
    "open": lambda root: holdfast.open(root),
    "steps": lambda root: holdfast.steps(root),
    "load": lambda root: holdfast.load(root, state(), deadline_s=DEADLINE_S),
    "save": lambda root: holdfast.save(root, state(), step=2, deadline_s=DEADLINE_S),
    "Checkpointer": lambda root: holdfast.Checkpointer(root, state(), deadline_s=DEADLINE_S),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_storage_that_does_not_answer_ends(name: str, root: Path) -> None:
    with Frozen(root, reads=True) as disk:

        def call() -> None:
            with storage_deadlines.opening(DEADLINE_S):
                CALLS[name](root)

        error = ended(call)
        assert disk.num_waiting
    assert isinstance(error, Deadline), error
    assert "storage has not answered for" in str(error)
    assert str(root) in str(error)


@pytest.mark.parametrize("name", ["save", "Checkpointer"])
def test_so_does_one_that_writes_where_reads_are_answered(name: str, root: Path) -> None:
    with Frozen(root) as disk:
        error = ended(lambda: CALLS[name](root))
        assert disk.num_waiting
    assert isinstance(error, HoldfastError), error
    assert "put '" in str(error) or "create '" in str(error)
    assert "storage has not answered" in str(error)
    assert str(root) in str(error)


def test_a_root_that_cannot_be_read_does_not_hold_up_another(root: Path, tmp_path: Path) -> None:
    """A server of files that has its names in memory, and whose disks hang."""
    holdfast.save(tmp_path / "other", state(), step=3)
    disk = Frozen(root)
    disk.names = ("preadv",)

    def steps_of(name: Path, limit_s: float) -> list[int]:
        with storage_deadlines.opening(limit_s):
            return holdfast.steps(name)

    with disk:
        assert isinstance(ended(lambda: steps_of(root, DEADLINE_S)), Deadline)
        assert disk.num_waiting == 1
        assert steps_of(tmp_path / "other", ENOUGH_S) == [3]


@pytest.fixture
def frozen_under_a_run(root: Path) -> Iterator[tuple[holdfast.Checkpointer, Frozen]]:
    """A run with step 2, the storage of which has stopped to answer."""
    ckpt = holdfast.Checkpointer(
        root, state(3_000_000), deadline_s=ENOUGH_S, on_error="raise", anew=True
    )
    ckpt.save(2).wait()
    ckpt._tiers.durable.settle(ENOUGH_S)  # what is under way keeps the limit it began with
    be_patient(ckpt._tiers.store, 5 * DEADLINE_S)
    with Frozen(root, reads=True) as disk:
        yield ckpt, disk


def test_a_save_fails_by_itself(
    frozen_under_a_run: tuple[holdfast.Checkpointer, Frozen], root: Path
) -> None:
    ckpt, disk = frozen_under_a_run
    save = ckpt.save(3)
    assert "is not done after 0.1 s" in str(ended(lambda: save.wait(0.1)))
    error = ended(save.wait)
    assert isinstance(error, HoldfastError)
    assert "storage has not answered" in str(error)
    assert str(root) in str(error)
    began = time.monotonic()
    again = ended(lambda: ckpt.save(4).wait())  # what does not answer is not asked again
    assert "storage has not answered" in str(again)
    assert time.monotonic() - began < ENOUGH_S / 2
    assert isinstance(ended(ckpt.restore), HoldfastError)
    ended(ckpt.close)
    disk.thaw()
    assert holdfast.steps(root) == [1, 2]
    assert eventually(lambda: not leftovers(root)), leftovers(root)


class Large(Frozen):
    """Answers reads of little, such as those of an image's table, which come before the tensors'."""

    def _waiting(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        waiting = super()._waiting(call, name)

        def read(what: Any, buffers: Any, *args: Any) -> Any:
            size = sum(memoryview(one).nbytes for one in buffers)
            return (waiting if size > LITTLE_BYTES else call)(what, buffers, *args)

        return read


@pytest.mark.parametrize("call", ["load", "restore"])
@pytest.mark.parametrize("kind", [Large, Frozen])
def test_who_left_reads_behind_is_told_what_they_may_still_write(
    root: Path, call: str, kind: type[Frozen]
) -> None:
    """And is not told so where nothing was touched: all tables are read before the first tensor."""
    holdfast.save(root, state(3_000_000), step=1)
    live = state(3_000_000)
    ckpt = holdfast.Checkpointer(root, live, deadline_s=ENOUGH_S)
    be_patient(ckpt._tiers.store, DEADLINE_S)
    disk = kind(next(root.glob("steps/*/*/*.safetensors")))
    disk.names = ("preadv",)
    with disk:
        if call == "load":
            error = ended(lambda: holdfast.load(root, live, deadline_s=DEADLINE_S))
        else:
            error = ended(ckpt.restore)
        assert disk.num_waiting
        is_lost = bool(live["data"]["w"].isnan().any())
    assert isinstance(error, HoldfastError)
    assert "storage has not answered" in str(error)
    assert is_lost == (kind is Large)
    assert ("throw the live state away" in str(error)) == is_lost, error
    if not is_lost:
        assert torch.equal(live["data"]["w"], state(3_000_000)["data"]["w"])
    ckpt.close()


def test_it_is_asked_again_when_it_answers(root: Path) -> None:
    ckpt = holdfast.Checkpointer(root, state(), deadline_s=ENOUGH_S, on_error="raise", anew=True)
    store = ckpt._tiers.store
    assert isinstance(store, LocalStore)
    be_patient(store, DEADLINE_S)
    with Frozen(root) as disk:
        save = ckpt.save(2)
        assert isinstance(ended(save.wait), HoldfastError)
        be_patient(store, ENOUGH_S)
        disk.thaw()
        until = time.monotonic() + ENOUGH_S
        while any(not one.is_over for one in store.patience._stuck):
            assert time.monotonic() < until
            time.sleep(0.01)
    ckpt.save(3).wait()
    ckpt.close()
    assert holdfast.steps(root) == [1, 3]


def test_close_ends_in_time_and_says_what_was_not_saved(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "RELEASE_S", 0.2)
    ckpt = holdfast.Checkpointer(root, state(), deadline_s=ENOUGH_S * 10, anew=True)
    with Frozen(root, reads=True) as disk:
        ckpt.save(2)
        assert eventually(lambda: disk.num_waiting)
        error = ended(lambda: ckpt.close(timeout=1.5))
    assert isinstance(error, Deadline)
    assert "when close() had waited 1.5 s" in str(error)
    assert "storage has not answered" in str(error)
    assert str(root) in str(error)


def test_close_that_fails_tells_of_saves_that_have_failed_before(root: Path) -> None:
    ckpt = holdfast.Checkpointer(root, state(), deadline_s=ENOUGH_S, anew=True)
    (root / "steps").rename(root / "elsewhere")
    (root / "steps").write_text("in the way")
    save = ckpt.save(5)
    assert eventually(save.done)
    stuck = threading.Event()
    ckpt._tiers.durable.worker.submit(stuck.wait)
    with (
        pytest.warns(HoldfastWarning, match="ENOTDIR") as told,
        pytest.raises(Deadline, match="when close"),
    ):
        ckpt.close(0.2)
    assert len(told) == 1
    stuck.set()


def test_wait_ends_in_time_with_records(root: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = holdfast.Checkpointer(
        root,
        {"m": model, "o": optimizer},
        delta=holdfast.Delta(),
        every=holdfast.Every(delta=1),
        anew=True,
    )
    for step in (2, 3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ckpt.step(step)
    ckpt.wait()
    ckpt.wait(0.0)  # nothing is under way
    delta, stuck = ckpt._tiers.get("delta"), threading.Event()
    assert delta is not None
    delta._capture._copier.then(stuck.wait)
    error = ended(lambda: ckpt.wait(0.1))
    assert isinstance(error, Deadline), error
    assert "records were not all with their writer" in str(error)
    stuck.set()
    ckpt.close()


def test_threads_that_are_not_answered_are_left_behind(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.patience.limit_s = 0.2
    with Frozen(tmp_path):
        keys = [f"a{n}" for n in range(4)]
        error = ended(lambda: in_threads(lambda key: store.put(key, b"x"), keys, 2))
    assert isinstance(error, Deadline)
    assert f"put '{tmp_path}/a" in str(error)


def leftovers(root: Path) -> list[str]:
    """Temporary files below `root`, and descriptors of this process on what lies there.

    Folders may be removed meanwhile: `os.walk` passes over one that is gone.
    """
    files = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    found = [path for path in files if os.path.basename(path).startswith(".tmp-")]
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            found += [target] if target.startswith(str(root)) else []
    return found


def eventually(holds: Callable[[], object]) -> bool:
    until = time.monotonic() + ENOUGH_S
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def abandon_a_write(store: LocalStore, freeze: Callable[[], object]) -> None:
    """Several threads write parts, as a save does."""
    writer = store.create("d/a", 3 << 12)
    freeze()
    try:
        in_threads(lambda n: writer.write(n << 12, bytes(1 << 12)), [0, 1, 2], 2)
    finally:
        writer.abort()


def abandon_a_finish(store: LocalStore, freeze: Callable[[], object]) -> None:
    writer = store.create("d/a", 3)
    writer.write(0, b"abc")
    freeze()
    try:
        writer.finish()
    finally:
        writer.abort()


def abandon_another(store: LocalStore, freeze: Callable[[], object]) -> None:
    """A writer with nothing under way, while the store waits for a call about another object."""
    writer = store.create("d/a", 3)
    freeze()
    try:
        store.put("b", b"x", if_absent=True)
    finally:
        writer.abort()


def abandon_a_create(store: LocalStore, freeze: Callable[[], object]) -> None:
    freeze()
    store.create("d/a", 3)


def abandon_an_open(store: LocalStore, freeze: Callable[[], object]) -> None:
    freeze()
    store.open("there")


def abandon_an_open_once(store: LocalStore, freeze: Callable[[], object]) -> None:
    freeze()
    store.open_once("there")


def abandon_a_read(store: LocalStore, freeze: Callable[[], object]) -> None:
    freeze()
    store.read("there", 0, memoryview(bytearray(5)))


@pytest.mark.parametrize(
    "abandon",
    [
        abandon_a_write,
        abandon_a_finish,
        abandon_another,
        abandon_a_create,
        abandon_an_open,
        abandon_an_open_once,
        abandon_a_read,
    ],
)
def test_what_is_abandoned_is_closed_and_removed_when_storage_answers(
    tmp_path: Path, abandon: Callable[[LocalStore, Callable[[], object]], None]
) -> None:
    store = LocalStore(tmp_path / "root")
    store.put("there", b"there")
    with ExitStack() as frozen:
        disks: list[Frozen] = []

        def freeze() -> None:
            store.patience.limit_s = 0.2
            disks.append(frozen.enter_context(Frozen(tmp_path / "root", reads=True)))

        error = ended(lambda: abandon(store, freeze))
        assert isinstance(error, Deadline), error
        disks[0].thaw()
        assert eventually(lambda: not store.patience._stuck)
        assert eventually(lambda: not leftovers(tmp_path)), leftovers(tmp_path)
    assert eventually(lambda: not (tmp_path / "root" / "d").exists())
    assert set(LocalStore(store.root).list()) <= {"there", "b"}
    store.patience.limit_s = ENOUGH_S
    assert store.get("there") == b"there", "it is asked again"


def test_all_that_threads_had_under_way_is_waited_for(tmp_path: Path) -> None:
    """A store is asked again when everything has come back that was left behind, and not before: a read
    that is under way may write into memory that by then holds something else."""
    store = LocalStore(tmp_path)
    store.put("a", b"x")
    store.patience.limit_s = 0.2
    gates = [threading.Event(), threading.Event()]
    threads: dict[int, threading.Thread] = {}
    both_ask = threading.Barrier(2)

    def ask(number: int) -> None:
        threads[number] = threading.current_thread()
        both_ask.wait(ENOUGH_S)
        store.patience.run(gates[number].wait, f"ask {number} of", str(tmp_path))

    def refused() -> bool:
        try:
            store.get("a")
        except Deadline:
            return True
        return False

    error = ended(lambda: in_threads(ask, [0, 1], 2))
    assert isinstance(error, Deadline)
    for number in (0, 1):
        assert refused(), number
        gates[number].set()
        threads[number].join(ENOUGH_S)
    store.patience.limit_s = ENOUGH_S
    assert not refused()


def test_a_thread_that_was_left_behind_does_no_more_when_it_comes_back(tmp_path: Path) -> None:
    """It does not use what it has got in the end, and asks for nothing more."""
    store = LocalStore(tmp_path)
    store.patience.limit_s = 0.2
    gate, done = threading.Event(), []
    threads: list[threading.Thread] = []

    def work(_: int) -> None:
        threads.append(threading.current_thread())
        store.patience.run(gate.wait, "wait for", str(tmp_path))
        done.append("used")

    assert isinstance(ended(lambda: in_threads(work, [0, 1], 2)), Deadline)
    gate.set()
    for thread in threads:
        thread.join(ENOUGH_S)
    assert not done


def test_a_worker_that_ends_meanwhile_holds_up_no_end_of_python() -> None:
    """As that of a Checkpointer which is let go of just before: its order to end is done when it ends."""
    gate = threading.Event()
    worker = Worker("test")
    worker.submit(gate.wait)
    del worker
    assert not idle(0.05)
    threading.Timer(0.2, gate.set).start()
    assert idle(ENOUGH_S)


def test_errors_and_results_come_through(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"x")
    assert store.get("a") == b"x"
    with pytest.raises(holdfast.errors.NotFound):
        store.get("b")
    with storage_deadlines.within(5.0):
        assert store.list() == ["a"]


@pytest.mark.parametrize("how", ["given up", "interrupted"])
def test_no_thread_stays_of_a_call_that_nobody_waits_for(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what it returned: a rank that is told of a lost one leaves wherever it is."""

    def helpers() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name == "holdfast-storage"}

    def interrupt(*_: object) -> None:
        heard.set()
        raise KeyboardInterrupt

    def answer() -> str:
        while how == "interrupted" and not heard.wait(0.1):  # one before it waits is not heard
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        gate.wait()
        return "an answer"

    monkeypatch.setattr(storage_deadlines, "_idle", [])
    before, gate, heard = helpers(), threading.Event(), threading.Event()
    undone: list[str] = []
    asked = storage_deadlines.Patience()
    asked.limit_s = DEADLINE_S if how == "given up" else ENOUGH_S
    former = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Deadline if how == "given up" else KeyboardInterrupt):
            asked.run(answer, "ask", str(tmp_path), undone.append)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert len(helpers() - before) == 1
    gate.set()
    assert eventually(lambda: helpers() <= before)
    assert undone == ["an answer"]
