"""Durable saves by way of memory: in a queue, beside one that goes directly, after a commit unheard."""

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.core.checkpoint.names import read_manifest
from holdfast.core.checkpoint.notes import read_notes
from holdfast.errors import AgentUnreachable, HoldfastWarning
from holdfast.events import listen
from holdfast.live.saving.durable import Durable
from holdfast.live.state.window import Gate
from holdfast.store import open_store
from holdfast.tiers.memory import tier
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.client import Client
from tiers.memory.agents import agent

pytestmark = pytest.mark.slow

IMAGE_BYTES = 400_000


class Run:
    """A training in this process."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = str(root)
        self.ckpt = holdfast.Checkpointer(
            root,
            {"x": {"t": torch.arange(IMAGE_BYTES // 8)}},
            **{"every": holdfast.Every(memory=1), **options},
            memory=holdfast.Memory("none"),
            deadline_s=120,
        )
        self.events: list[holdfast.events.Event] = []

    def seen(self, name: str) -> list[int]:
        """The steps of such events."""
        return [e.fields["step"] for e in self.events if e.name == name]


@pytest.fixture
def node(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Client]:
    """An agent; the parameter is its budget."""
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    with agent(tmp_path / "node", getattr(request, "param", 1 << 28)) as client:
        yield client


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The first image that goes to storage is written when this is set."""
    gate, ask, first = threading.Event(), Client.ask, threading.Lock()

    def held(client: Client, message: w.Message, *args: Any, **more: Any) -> Any:
        answer = ask(client, message, *args, **more)
        if isinstance(message, w.Persist) and first.acquire(blocking=False):
            assert gate.wait(120)
        return answer

    monkeypatch.setattr(Client, "ask", held)
    yield gate
    gate.set()


def after(seconds: float, work: Callable[[], object]) -> None:
    threading.Timer(seconds, work).start()


@pytest.fixture
def run(tmp_path: Path, node: Client) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(**options: Any) -> Run:
        one = Run(tmp_path / "root", **options)
        runs.append(one)
        listening.__enter__()
        return one

    listening = listen(lambda event: runs[-1].events.append(event))
    yield make
    runs[-1].ckpt.close()
    listening.__exit__(None, None, None)


def test_an_image_that_waits_for_storage_is_not_given_out(
    run: Callable[..., Run], hold: threading.Event
) -> None:
    """The snapshots that follow it wait until its agent was told to write it."""
    one = run(when_busy="queue")
    saves = [one.ckpt.save(1), one.ckpt.save(2)]
    after(0.5, hold.set)
    for step in (3, 4, 5):
        one.ckpt.step(step)
    one.ckpt.wait()
    assert [save.error for save in saves] == [None, None]
    assert holdfast.steps(one.root) == [1, 2]
    names = [(e.name, e.fields["step"]) for e in one.events if e.name.endswith(".committed")]
    assert names.index(("save.committed", 1)) < names.index(("snapshot.committed", 3))
    assert one.seen("snapshot.committed")[-3:] == [3, 4, 5]


def test_a_snapshot_is_left_out_while_an_image_waits_for_storage(
    run: Callable[..., Run], hold: threading.Event
) -> None:
    one = run()
    saves = [one.ckpt.save(1), one.ckpt.save(2)]
    while one.seen("snapshot.committed") != [1, 2]:
        assert not any(save.done() for save in saves)
        time.sleep(0.01)
    one.ckpt.step(3)
    hold.set()
    one.ckpt.wait()
    assert one.seen("snapshot.skipped") == [3]
    assert holdfast.steps(one.root) == [1, 2]


@pytest.mark.parametrize("node", [IMAGE_BYTES * 3 // 2], indirect=True)
def test_a_save_that_goes_directly_spares_one_that_does_not(
    run: Callable[..., Run], hold: threading.Event
) -> None:
    """It began later and ends before; what it tidies away is older than both."""
    one = run()
    first, second = one.ckpt.save(1), one.ckpt.save(2)
    second.wait(120)
    assert one.seen("snapshot.failed") == [2]  # the agent had no room
    one.ckpt._tiers.durable.settle(120)
    hold.set()
    first.wait(120)
    assert holdfast.steps(one.root) == [1, 2]


def test_a_commit_that_the_agent_was_not_told_is_told_before_the_next(
    node: Client, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other nodes may hold that snapshot as their newest: its image must not be given out here."""
    one, ask = run(), Client.ask

    def deaf(client: Client, message: w.Message, *args: Any, **more: Any) -> Any:
        if isinstance(message, w.Commit):
            raise AgentUnreachable("not now")
        return ask(client, message, *args, **more)

    one.ckpt.step(1)
    one.ckpt.step(2)
    one.ckpt.wait()
    with monkeypatch.context() as patch:
        patch.setattr(Client, "ask", deaf)
        one.ckpt.step(3)
        with pytest.warns(HoldfastWarning, match="not now"):
            one.ckpt.wait()
    one.ckpt.step(4)
    one.ckpt.wait()
    (job,) = [j for j in node.ask(w.Status(), w.AgentReport).jobs if j.steps]
    assert job.steps == (3, 4)


def test_files_labels_and_calls_of_saves_by_way_of_memory(run: Callable[..., Run]) -> None:
    """A durable save has its files and metrics; a snapshot is no commit, and has none."""
    one, told = run(files={"config.json": b"{}"}), list[int]()
    one.ckpt.on_commit(told.append)
    one.ckpt.save(1, metrics={"loss": 0.5})
    one.ckpt.pin(1, "best")
    one.ckpt.wait()  # else the snapshot may be left out
    one.ckpt.step(2)
    one.ckpt.wait()
    assert told == [1] and 2 in one.seen("snapshot.committed")
    opened = holdfast.open(one.root)
    assert (opened.step, dict(opened.files)) == (1, {"config.json": b"{}"})
    assert opened.metrics == {"loss": 0.5}
    assert read_notes(open_store(str(one.root))).labels == {"best": 1}


@pytest.mark.parametrize("node", [IMAGE_BYTES * 5 // 2], indirect=True)
def test_an_image_stays_while_files_are_written(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come to storage before the agent is told to write the image."""
    write = Durable.write_attached

    def late(durable: Durable, op: Any) -> None:
        time.sleep(0.5)
        write(durable, op)

    monkeypatch.setattr(Durable, "write_attached", late)
    one = run(files={"config.json": b"{}"})
    save = one.ckpt.save(1)
    for step in range(2, 30):
        one.ckpt.step(step)
        time.sleep(0.05)
    save.wait(300)
    assert holdfast.steps(one.root) == [1]


@pytest.mark.parametrize("has_more", [True, False])
def test_what_memory_alone_has_is_saved_anew_with_its_metrics(
    tmp_path: Path, node: Client, has_more: bool
) -> None:
    """And with the files that are declared; those that were given to `save` are told of."""
    root = tmp_path / "root"

    def begun() -> holdfast.Checkpointer:
        return holdfast.Checkpointer(
            root,
            {"x": {"t": torch.arange(4)}},
            every=holdfast.Every(memory=1, durable=100),
            memory=holdfast.Memory("none"),
            files={"config.json": b"{}"} if has_more else None,
        )

    one = begun()
    if has_more:
        one.save(7, metrics={"loss": 0.5}, files={"note.txt": b"good"}).wait(300)
        one.metrics(7, rank=2)
        one.pin(7, "best")
    else:
        one.save(7).wait(300)
    one.__exit__(RuntimeError, RuntimeError("a collective has failed"), None)
    (root / "steps/0000000007/manifest.json").unlink()  # as if it had not been committed
    with begun() as two:
        told = "saved again without note.txt, which cannot be read"
        with pytest.warns(HoldfastWarning, match=told) if has_more else nullcontext():
            assert two.restore().tier == "memory"
        two.wait()
    opened = holdfast.open(root)
    assert opened.step == 7
    assert opened.metrics == ({"loss": 0.5, "rank": 2} if has_more else {})
    assert dict(opened.files) == ({"config.json": b"{}"} if has_more else {})
    assert read_notes(open_store(str(root))).live_labels == ({"best": 7} if has_more else {})


def test_damaged_notes_let_a_restart_from_memory_be(tmp_path: Path, node: Client) -> None:
    root, state = tmp_path / "root", {"x": {"t": torch.arange(4)}}
    options: dict[str, Any] = {"every": holdfast.Every(memory=1, durable=100)}
    options["memory"] = holdfast.Memory("none")
    one = holdfast.Checkpointer(root, state, **options)
    one.save(7, metrics={"loss": 0.5}).wait(300)
    one.pin(7, "best")
    one.__exit__(RuntimeError, RuntimeError("a collective has failed"), None)
    (root / "steps/0000000007/manifest.json").unlink()
    (root / "steps/notes.json").write_text("damaged")
    with holdfast.Checkpointer(root, state, **options) as two:
        assert two.restore().tier == "memory"
        with pytest.warns(HoldfastWarning, match="notes of steps are damaged"):
            two.wait()
    assert read_manifest(open_store(str(root)), 7).metrics == {"loss": 0.5}


class Interrupted:
    """It is interrupted as it is asked for its state, once."""

    def __init__(self) -> None:
        self.is_due = False

    def state_dict(self) -> dict[str, int]:
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_save_that_is_interrupted_is_over(tmp_path: Path, node: Client, has_memory: bool) -> None:
    """Those after it are made, and a restore within the handler of the interrupt does not wait for it."""
    one = Interrupted()
    ckpt = holdfast.Checkpointer(
        tmp_path / "root",
        {"x": {"t": torch.arange(4)}, "one": one},
        every=holdfast.Every(memory=1, durable=100) if has_memory else 100,
        memory=holdfast.Memory("none") if has_memory else None,
        when_busy="skip",
    )
    with ckpt, listen(lambda event: seen.append(event.name)):
        seen: list[str] = []
        ckpt.save(1).wait(300)
        one.is_due = True
        try:
            ckpt.save(2)
        except KeyboardInterrupt:
            assert ckpt.restore() == 1
        if has_memory:
            one.is_due = True
            with pytest.raises(KeyboardInterrupt):
                ckpt.step(2)
            seen.clear()
            for step in range(3, 90):  # it ends in the background
                ckpt.step(step)
                ckpt.wait()
            assert "snapshot.committed" in seen
        ckpt.step(100)
    assert holdfast.steps(tmp_path / "root") == [1, 100]


def test_a_tuned_run_learns_from_every_snapshot(run: Callable[..., Run]) -> None:
    """Also from those that go on to storage: their events say how long they took, as all do."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", holdfast.HoldfastWarning)
        one = run(every=holdfast.Auto())
        for step in (1, 2):
            one.ckpt.save(step).wait(120)
        one.ckpt.wait()
    found = [e.fields["seconds"] for e in one.events if e.name == "snapshot.committed"]
    assert len(found) == 2 and min(found) > 0


class Breaks:
    """A follower of the training that cannot note its point."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.twins = SimpleNamespace(go_on=lambda number: None)

    def mark(self, number: int) -> None:
        raised(self.error)


def raised(error: BaseException | None) -> None:
    if error is not None:
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("where", ["before the marks", "marks"])
def test_a_call_that_breaks_off_before_it_has_the_state_saves_nothing(
    tmp_path: Path, node: Client, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    """Nor does it count as one under way, for which later ones would be left out."""
    seen: list[tuple[str, dict[str, Any]]] = []
    raises: Any = pytest.raises(type(error))
    ckpt = holdfast.Checkpointer(
        tmp_path / "root",
        {"x": {"t": torch.arange(4)}},
        every=holdfast.Every(memory=1, durable=100),
        memory=holdfast.Memory("none"),
        when_busy="skip",
    )
    with ckpt, warnings.catch_warnings():
        warnings.simplefilter("ignore", HoldfastWarning)  # step 2 is not saved
        ckpt.save(1).wait(300)
        with listen(lambda event: seen.append((event.name, event.fields))):
            is_told = where == "marks" and isinstance(error, Exception)  # as a save that has failed
            with monkeypatch.context() as patch, nullcontext() if is_told else raises:
                if where == "marks":
                    patch.setattr(tier.MemoryTier, "_followers", [Breaks(error)])
                else:
                    calls = iter([None, error])  # the first is that of `step` itself
                    patch.setattr(Gate, "look", lambda *_: raised(next(calls)))
                ckpt.step(2)
            for step in range(3, 90):  # the other ends in the background
                ckpt.step(step)
                ckpt.wait()
        (failed,) = [fields for name, fields in seen if name == "snapshot.failed"]
        assert failed["step"] == 2 and type(error).__name__ in failed["error"]
        committed = [fields["step"] for name, fields in seen if name == "snapshot.committed"]
        assert committed and 2 not in committed
