"""A process ends, or a fork of it does, while its agent writes a durable save: the save is completed."""

import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.core.checkpoint.verifying import verify
from holdfast.errors import Deadline, HoldfastError, HoldfastWarning, NotFound, UsageError
from holdfast.store import open_store
from holdfast.tiers.memory import starting, tier
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.client import Client
from tiers.memory.agents import agent, kill
from tiers.memory.zygote import Lives

pytestmark = pytest.mark.slow

VALUES = torch.arange(2_300_000.0)
"""Written in two parts, of which the second has to wait."""
SLOW = {"redundancy": "none", "bandwidth": "2MB"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a run on a node with an agent."""
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    monkeypatch.setattr(tier, "LEAVE_S", 0.1)
    with agent(tmp_path / "node"):
        yield tmp_path / "root"


def saving(
    root: Path, values: torch.Tensor = VALUES
) -> tuple[holdfast.Checkpointer, holdfast.Save]:
    """A run whose save of step 1 the agents have begun to write."""
    ckpt = holdfast.Checkpointer(
        root, {"x": {"t": values}}, memory=holdfast.Memory(**SLOW), deadline_s=120
    )
    save = ckpt.save(1)
    await_(lambda: len(list(root.glob("steps/*/*/.tmp-*"))) == ckpt._tiers.group.size)
    return ckpt, save


def await_(condition: Callable[[], object], limit_s: float = 120.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.soak_except("closes")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("how", ["ends", "closes", "raises"])
def test_a_forked_child_leaves_its_parents_save_alone(root: Path, how: str) -> None:
    """As a worker of a DataLoader does: it inherits the exits of its parent, and the parent's calls."""
    ckpt, save = saving(root)
    work: dict[str, Callable[[], object]] = {
        "ends": lambda: None,
        "closes": ckpt.close,
        "raises": lambda: ckpt.__exit__(KeyError, KeyError(), None),
    }
    child = multiprocessing.get_context("fork").Process(target=work[how])
    child.start()
    child.join(120)
    child.kill()
    assert child.exitcode == 0 and not save.done()
    save.wait(120)
    assert holdfast.steps(str(root)) == [1]
    ckpt.close()


@pytest.mark.soak_except("save")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("verb", ["step", "save", "restore", "wait"])
def test_a_forked_child_is_refused(root: Path, verb: str) -> None:
    """It has its parent's sockets and none of its threads: it would wait for ever, or speak in between."""
    ckpt, save = saving(root)
    arguments = {"step": (2,), "save": (2,)}.get(verb, ())

    def work() -> None:
        with pytest.raises(UsageError, match=f"is of process {parent}, not of its forked child"):
            getattr(ckpt, verb)(*arguments)

    parent = os.getpid()
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(120)
    child.kill()
    assert child.exitcode == 0
    save.wait(120)
    assert holdfast.steps(str(root)) == [1]
    ckpt.close()


@pytest.mark.soak_except("KeyError")
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit])
def test_the_agent_completes_the_save_of_a_run_that_raises(
    root: Path, error: type[BaseException]
) -> None:
    ckpt, save = saving(root)
    with pytest.warns(HoldfastWarning, match="came to its end"), pytest.raises(error), ckpt:
        raise error
    assert save.error is not None and holdfast.steps(str(root)) == []
    await_(lambda: holdfast.steps(str(root)))
    with holdfast.open(str(root)) as step:
        assert step.read("x.t").tolist() == VALUES.tolist()


def test_a_close_that_gave_up_leaves_the_rest_to_the_agents(root: Path) -> None:
    """As that of a SIGTERM whose grace runs out: its Deadline ends the block, and all calls end with it."""
    ckpt, save = saving(root)
    with pytest.raises(Deadline, match="under way"), ckpt:
        ckpt.close(0.1)
    with pytest.raises(HoldfastError, match="came to its end"):
        save.wait(120)
    await_(lambda: holdfast.steps(str(root)))


def test_calls_at_the_end_of_python_do_not_pile_up(root: Path) -> None:
    """A process that recovers in place makes a Checkpointer in each attempt."""
    before = len(threading._threading_atexits)  # type: ignore[attr-defined]
    for _ in range(2):
        with holdfast.Checkpointer(root, {"n": 1}, memory=holdfast.Memory()):
            pass
    assert len(threading._threading_atexits) == before  # type: ignore[attr-defined]


def test_a_script_that_ends_when_all_is_saved_hurries_nobody(root: Path) -> None:
    """Before ranks have told each other what became of the last save: that comes after this."""
    ckpt, save = saving(root)
    save.wait(120)
    tier._at_exit()
    assert not ckpt._tiers.get("memory").agent.client.leaving
    ckpt.close()


def test_a_script_that_ends_in_the_middle_of_a_save_leaves_it_to_the_agents(root: Path) -> None:
    ckpt, save = saving(root)
    tier._at_exit()
    with pytest.raises(HoldfastError, match="came to its end"):
        save.wait(120)
    with pytest.warns(HoldfastWarning, match="the last save failed"):
        ckpt.close()
    await_(lambda: holdfast.steps(str(root)))


class Crash(Exception):
    pass


def step_and_raise(ckpt: holdfast.Checkpointer) -> None:
    ckpt.step(1)
    raise Crash


def test_a_snapshot_in_flight_is_completed_by_a_run_that_raises(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is a matter of moments: nobody is hurried before."""
    monkeypatch.setattr(tier, "LEAVE_S", 120.0)
    ask, settle, gate = Client.ask, tier.MemoryTier.settle, threading.Event()

    def held(client: Client, message: w.Message, *args: Any, **more: Any) -> Any:
        assert not isinstance(message, w.Ready) or gate.wait(120)
        return ask(client, message, *args, **more)

    def settled(one: tier.MemoryTier, limit_s: float) -> None:
        gate.set()
        settle(one, limit_s)

    monkeypatch.setattr(Client, "ask", held)
    monkeypatch.setattr(tier.MemoryTier, "settle", settled)
    ckpt = holdfast.Checkpointer(
        root, {"x": {"t": VALUES}}, every=holdfast.Every(memory=1), memory=holdfast.Memory("none")
    )
    client, hurried = ckpt._tiers.get("memory").agent.client, []
    note = lambda e: hurried.append(client.leaving) if e.name == "snapshot.committed" else None  # noqa: E731
    with holdfast.events.listen(note), pytest.raises(Crash), ckpt:
        step_and_raise(ckpt)
    assert hurried == [False]


def live(
    root: Path,
    until: int,
    rate: float = 1.0,
    back_to: int | None = None,
    *,
    crash: bool = False,
    **options: Any,
) -> tuple[int, float]:
    """A life of a run, from what it restores; the step that this was, and a weight as it was restored.  It
    crashes with its last step in memory and half of it in storage."""
    model = torch.nn.Embedding(*VALUES.reshape(2300, 1000).shape)
    torch.nn.init.zeros_(model.weight)
    optim = torch.optim.SGD(model.parameters(), lr=rate)
    kept: list[object] = []
    memory = holdfast.Memory(**(SLOW if crash else {"redundancy": "none"}))
    state = {"model": model, "optim": optim}
    with (
        holdfast.events.listen(
            lambda e: kept.append(e.fields["step"]) if e.name == "snapshot.committed" else None
        ),
        holdfast.Checkpointer(
            root, state, memory=memory, when_busy="queue", deadline_s=120, **options
        ) as ckpt,
    ):
        start = ckpt.restore(back_to)
        restored = model.weight[7, 7].item()
        optim.param_groups[0]["lr"] = rate
        for step in range(start + 1, until + 1):
            model.weight.grad = torch.ones_like(model.weight)
            optim.step()
            ckpt.step(step)
        if crash:
            await_(lambda: until in kept and list(root.glob("steps/*/*/.tmp-*")))
            raise Crash
    return start, restored


def crash(root: Path, *arguments: Any, **options: Any) -> None:
    with pytest.warns(HoldfastWarning, match="came to its end"), pytest.raises(Crash):
        live(root, *arguments, crash=True, **options)


def test_a_step_that_is_nowhere(root: Path) -> None:
    """What memory has is named as well."""
    options = {"every": holdfast.Every(durable=1)}
    crash(root, 1, **options)
    with pytest.raises(NotFound, match=r"no step 7 in .*; steps there: none; in memory: 1"):
        live(root, 3, 1.0, 7, **options)


def test_what_records_lead_on_from_is_saved(root: Path) -> None:
    """It came from memory, where it is freed with the run; no durable saves are due."""
    options = {"every": holdfast.Every(memory=2, delta=1), "delta": holdfast.Delta()}
    crash(root, 1, **options)
    assert holdfast.steps(str(root)) == []
    assert live(root, 5, **options) == (1, -1.0)
    assert holdfast.steps(str(root)) == [1]
    assert live(root, 5, **options) == (5, -5.0)


def test_a_step_of_an_abandoned_run_is_no_save_of_another(root: Path) -> None:
    """What a restart takes from memory has the number of a step in storage, and is another state."""
    options = {"every": holdfast.Every(durable=1, memory=1)}
    live(root, 2, **options)
    crash(root, 2, 10.0, 1, **options)
    assert live(root, 2, **options) == (2, -11.0)
    assert live(root, 2, **options) == (2, -11.0)


def test_a_step_that_was_edited_and_saved_again(root: Path) -> None:
    """What memory has of it is what it was before."""
    options = {"every": holdfast.Every(durable=1)}
    crash(root, 1, **options)
    await_(lambda: holdfast.steps(str(root)) == [1])
    model = torch.nn.Embedding(*VALUES.reshape(2300, 1000).shape)
    state = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=1.0)}
    assert holdfast.load(root, state) == 1
    torch.nn.init.constant_(model.weight, 5.0)
    holdfast.save(root, state, step=1)
    assert live(root, 2, **options) == (1, 5.0)


def test_a_launcher_that_counts_ranks_otherwise(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as by devices: no rank of the node is its first by number, and memory has what it has."""
    monkeypatch.setenv("LOCAL_RANK", "4")
    options = {"every": holdfast.Every(durable=1)}
    crash(root, 1, **options)
    assert live(root, 2, **options) == (1, -1.0)


def test_what_the_last_save_could_not_store_stays_in_memory(root: Path) -> None:
    options = {"every": holdfast.Every(durable=1, memory=1)}
    live(root, 1, **options)
    blocked = root / "steps" / "0000000002"
    blocked.touch()
    with (
        pytest.warns(HoldfastWarning, match="save of step 2 failed"),
        pytest.warns(HoldfastWarning, match="in memory stays there"),
    ):
        live(root, 2, **options)
    blocked.unlink()
    assert live(root, 2, **options) == (2, -2.0)
    assert holdfast.steps(str(root)) == [1, 2]


def test_what_a_dead_agent_holds_is_freed_by_a_run_that_ends_well(root: Path) -> None:
    node = root.with_name("node")
    with holdfast.Checkpointer(
        root, {"x": {"t": VALUES}}, every=holdfast.Every(memory=1), memory=holdfast.Memory("none")
    ) as ckpt:
        ckpt.step(1)
        ckpt.wait()
        kill(node)
        assert list(node.glob("jobs/*/share-*"))
    assert not list(node.glob("jobs/*"))


def test_a_root_that_was_put_back_is_another_job(root: Path) -> None:
    """Its runs have numbers that the agent has met: what these have in memory is theirs."""
    options = {"every": holdfast.Every(durable=2, memory=1)}
    live(root, 2, **options)
    backup = shutil.copytree(root, root.with_name("backup"))
    for until in (4, 6):
        crash(root, until, **options)
        await_(lambda: until in holdfast.steps(str(root)))
    for path in root.iterdir():
        path.unlink() if path.is_file() else shutil.rmtree(path)
    shutil.copytree(backup, root, dirs_exist_ok=True)
    with pytest.warns(
        HoldfastWarning, match="this is run 2, .* of runs up to 3; they are not used"
    ):
        assert live(root, 4, **options) == (2, -2.0)
    assert holdfast.steps(str(root)) == [2, 4]
    assert live(root, 4, **options) == (4, -4.0)


@pytest.mark.soak
def test_a_copy_on_a_volume_with_the_same_numbers_is_another_job(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As volumes that are mounted where each root is: the first one's snapshots stay its own."""
    monkeypatch.setattr(starting, "_identity", lambda _: "2")
    options = {"every": holdfast.Every(durable=1)}
    crash(root, 1, **options)
    await_(lambda: holdfast.steps(str(root)) == [1])
    copy = shutil.copytree(root, root.with_name("copy"))
    crash(copy, 2, **options)
    jobs = [json.loads((one / "job.json").read_text())["job"] for one in (root, copy)]
    assert jobs[0] != jobs[1]
    link = root.with_name("link")
    link.symlink_to(root)
    assert live(link, 2, **options) == (1, -1.0)
    assert json.loads((root / "job.json").read_text())["job"] == jobs[0]


# -- several ranks ---------------------------------------------------------------------------------


def all_leave(root: Path) -> None:
    tier.LEAVE_S = 0.1
    with saving(root, VALUES.repeat(2))[0]:
        torch.distributed.barrier()
        raise RuntimeError


def one_leaves(root: Path) -> None:
    """The others find out by their next collective."""
    tier.LEAVE_S = 0.1
    with saving(root, VALUES.repeat(2))[0]:
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 1:
            raise RuntimeError
        torch.distributed.barrier()


def one_leaves_late(root: Path) -> None:
    """Rank 0 has nothing more to do, and closes."""
    tier.LEAVE_S = 0.1
    with saving(root, VALUES.repeat(2))[0]:
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 1:
            raise RuntimeError


def all_give_up(root: Path) -> None:
    """As after SIGTERM, when the grace runs out."""
    tier.LEAVE_S = 0.1
    with saving(root, VALUES.repeat(2))[0] as ckpt:
        torch.distributed.barrier()
        ckpt.close(0.1)


@pytest.mark.distributed
@pytest.mark.soak_except("one_leaves", "all_give_up")
@pytest.mark.parametrize("case", [all_leave, one_leaves, one_leaves_late, all_give_up])
def test_the_agents_complete_it_together(lives: Lives, case: Callable[[Path], None]) -> None:
    """Rank 0's commits the step when the files of all are there."""
    root = str(lives.place / "root")
    script = {"case": f"tiers.memory.test_ends:{case.__name__}", "grace_s": 30.0}
    told = lives.live(nodes=[0, 1], **script)
    assert told[1].status == 1, lives.errors()
    await_(lambda: holdfast.steps(root))
    assert verify(open_store(root), 1).good


def close_in_turn(root: Path, first: int, error: type[BaseException] | None = None) -> None:
    """One rank closes before the other, which may fail then."""
    every, memory = holdfast.Every(memory=1), holdfast.Memory("none")
    with holdfast.Checkpointer(root, {"x": {"t": VALUES}}, every=every, memory=memory) as ckpt:
        ckpt.step(1)
        ckpt.wait()
        if torch.distributed.get_rank() == first:
            ckpt.close()
        torch.distributed.barrier()
        if torch.distributed.get_rank() != first and error is not None:
            raise error


def rank_0_fails_last(root: Path) -> None:
    close_in_turn(root, 1, RuntimeError)


def rank_0_is_last(root: Path) -> None:
    close_in_turn(root, 1)


def rank_0_is_first(root: Path) -> None:
    close_in_turn(root, 0)


@pytest.mark.distributed
@pytest.mark.soak_except("rank_0_fails_last-1", "rank_0_is_first-0")
@pytest.mark.parametrize(
    ("case", "left"), [(rank_0_fails_last, 1), (rank_0_is_last, 0), (rank_0_is_first, 0)]
)
def test_memory_of_all_nodes_is_freed_when_rank_0_is_done(
    lives: Lives, case: Callable[[Path], None], left: int
) -> None:
    """Until then it serves a restart, also that of a rank that has closed."""
    told = lives.live(nodes=[0, 1], case=f"tiers.memory.test_ends:{case.__name__}")
    assert [t.status for t in told] == [left, 0], lives.errors()
    for node in (0, 1):
        assert len(list(lives.node(node).glob("jobs/*/share-*.json"))) == left
