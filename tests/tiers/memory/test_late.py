"""The training dies while agents write its durable snapshot: they finish it, and commit in its place."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast.core.checkpoint.claiming import claim, newest_claim
from holdfast.core.checkpoint.names import manifest_key, step_prefix
from holdfast.core.format.manifest import Manifest, decode_manifest, encode_manifest
from holdfast.errors import StoreError, UsageError
from holdfast.store import LocalStore, open_store
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node import persist
from holdfast.tiers.memory.node.persist import commit_late
from tiers.memory.agents import kill_together, pid_of, trainers
from tiers.memory.test_agent_verb import agent
from tiers.memory.zygote import KILLED, Lives, lose

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = {"width": 1200, "durable": 3}
SLOW = {"redundancy": "none", "bandwidth": "8MB"}


def is_half_written(lives: Lives, node: int) -> bool:
    """Whether the node's agent has written some of a file, but not all."""
    with suppress(FileNotFoundError, ValueError):  # the agent has only begun, and writes its card
        for path in (lives.place / "root").glob(f"steps/*/*/.tmp-*-{pid_of(lives.node(node))}-*"):
            with path.open("rb") as file:
                return file.read(8) != bytes(8)
    return False


def is_in_memory(lives: Lives) -> bool:
    """Whether node 0 knows step 3 as one that all ranks have in memory; agents write it a moment before."""
    return any(lives.node(0).glob("jobs/*/manifest-0000000003-*"))


def die_while_agents_write(lives: Lives) -> None:
    """Two ranks get SIGKILL when both their agents have begun to write the snapshot of step 3."""
    with ThreadPoolExecutor(1) as pool:
        living = pool.submit(lives.live, nodes=[0, 1], until=99, options=SLOW, **SCRIPT)
        while not (is_in_memory(lives) and all(is_half_written(lives, n) for n in (0, 1))):
            assert not living.done(), lives.errors()
            time.sleep(0.002)
        kill_together(pid for n in (0, 1) for pid in trainers(lives.node(n)))
        assert [one.status for one in living.result()] == [KILLED] * 2, lives.errors()


def await_(condition: Callable[[], object], lives: Lives) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until, (lives.node(0) / "agent.log").read_text()
        time.sleep(0.02)


@pytest.mark.soak
def test_the_agents_finish_and_commit(lives: Lives) -> None:
    """Nobody starts the training again; the step is in storage all the same, and is the one it was."""
    root = str(lives.place / "root")
    die_while_agents_write(lives)
    assert holdfast.steps(root) == []  # by nobody yet
    await_(lambda: holdfast.steps(root) == [3], lives)
    lose(lives, 0, 1)
    (told,) = lives.live(nodes=[2], until=3, options={"redundancy": "none"}, **SCRIPT)
    reference = lives.live(nodes=[0, 1], until=3, width=1200, reference=True)[0].digests[3]
    assert (told.restored, told.start) == (3, reference)


@pytest.mark.soak
def test_the_agents_commit_nothing_when_another_run_has_the_root(lives: Lives) -> None:
    root = lives.place / "root"
    die_while_agents_write(lives)
    claim(LocalStore(root))
    log = lives.node(0) / "agent.log"
    await_(lambda: "is not committed" in log.read_text(), lives)
    assert "was taken over by run 2" in log.read_text()

    def images() -> list[str]:
        return sorted(p.name for p in root.glob("steps/*/*/*.safetensors"))

    await_(lambda: images() == ["r00000.safetensors", "r00001.safetensors"], lives)  # they finish
    assert holdfast.steps(str(root)) == []


def is_freed(node: Path, job: str) -> bool:
    """Free a job; False if its agent has yet to note that the image, which is there, is written, or is slow
    to answer on a busy machine."""
    status, said = agent(node, "clean", "--job", job)
    if status == 2 and f"job {job}: this agent is writing its step 3 to storage" in said:
        return False
    if status == 1 and f"process {pid_of(node)}, does not answer" in said:
        return False
    assert (status, said) == (0, f"1 job freed: {job}\n")
    return True


def test_memory_is_freed_while_the_commit_waits_for_another_node(lives: Lives) -> None:
    """Node 0 has written its image, the agent of node 1 is stopped, and the training is dead.  What node 0
    holds is needed no more; when node 1 goes on, the step is committed."""
    root, (node, other) = lives.place / "root", map(lives.node, (0, 1))
    with ThreadPoolExecutor(1) as pool:
        living = pool.submit(
            lives.live, nodes=[0, 1], until=99, options=SLOW, deadline_s=200, **SCRIPT
        )
        await_(lambda: living.done() or all(is_half_written(lives, n) for n in (0, 1)), lives)
        await_(lambda: is_in_memory(lives), lives)
        os.kill(stopped := pid_of(other), signal.SIGSTOP)
        try:
            await_(lambda: list(root.glob("steps/*/*/r00000.safetensors")), lives)
            kill_together(pid for n in (0, 1) for pid in trainers(lives.node(n)))
            assert [one.status for one in living.result()] == [KILLED] * 2, lives.errors()
            (job,) = (path.name for path in (node / "jobs").iterdir())
            await_(lambda: is_freed(node, job), lives)
            assert not list((node / "jobs").iterdir())
            assert holdfast.steps(str(root)) == []
        finally:
            os.kill(stopped, signal.SIGCONT)
    await_(lambda: holdfast.steps(str(root)) == [3], lives)


# -- the commit alone ------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> tuple[w.Persist, Manifest]:
    """A step whose files are all there, and which nobody has committed."""
    import torch

    with holdfast.Checkpointer(tmp_path / "root", {"x": {"t": torch.arange(9.0)}}) as ckpt:
        ckpt.save(1).wait()
        store = open_store(str(tmp_path / "root"))
        mine = newest_claim(store)
    manifest = decode_manifest(store.get(manifest_key(1)), "manifest")
    store.delete(manifest_key(1))
    order = w.Persist("j", manifest.attempt, 0, 0, store.url, "", 1.0, msgspec.json.encode(mine))
    return order, manifest


def in_the_gap(order: w.Persist, work: Callable[[LocalStore], None]) -> threading.Thread:
    """Does something between the commit and the second look at it."""
    store = open_store(order.store)
    assert isinstance(store, LocalStore)

    def wait_and_work() -> None:
        until = time.monotonic() + 120
        while not holdfast.steps(order.store) and time.monotonic() < until:
            time.sleep(0.002)
        work(store)

    thread = threading.Thread(target=wait_and_work)
    thread.start()
    return thread


def test_a_late_commit(written: tuple[w.Persist, Manifest]) -> None:
    order, manifest = written
    commit_late(order, manifest)
    with holdfast.open(order.store) as step:
        assert step.step == 1 and step.read("x.t").tolist() == list(range(9))


def test_it_waits_for_files_and_gives_up_in_time(written: tuple[w.Persist, Manifest]) -> None:
    order, manifest = written
    open_store(order.store).delete(step_prefix(1) + manifest.files[0].path)
    began = time.monotonic()
    with pytest.raises(StoreError, match="file of rank 0 cannot be seen"):
        commit_late(order, manifest)
    assert time.monotonic() - began >= order.deadline_s
    assert holdfast.steps(order.store) == []


@pytest.mark.soak_except("replaced")
@pytest.mark.parametrize("by_then", ["swept", "whole", "replaced"])
def test_another_run_comes_at_the_moment_of_the_commit(
    written: tuple[w.Persist, Manifest], by_then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it swept is withdrawn; what is whole stays, and so does the step that it put in the place."""
    order, manifest = written
    monkeypatch.setattr(persist, "SECOND_LOOK_S", 4.0)  # time for the other run on a busy machine
    others = msgspec.structs.replace(manifest, attempt="0002-000001")

    def another(store: LocalStore) -> None:
        claim(store)
        if by_then != "whole":
            store.delete(step_prefix(1) + manifest.files[0].path)
        if by_then == "replaced":
            store.put(manifest_key(1), encode_manifest(others))

    thread = in_the_gap(order, another)
    with pytest.raises(UsageError, match="was taken over by run 2"):
        commit_late(order, manifest)
    thread.join()
    store, steps = open_store(order.store), holdfast.steps(order.store)
    assert steps == ([] if by_then == "swept" else [1])
    if steps:
        left = decode_manifest(store.get(manifest_key(1)), "manifest").attempt
        assert left == (others if by_then == "replaced" else manifest).attempt
