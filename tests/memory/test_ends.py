"""A process ends, or a fork of it does, while its agent writes a durable save: the save is completed."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.checkpoint.verifying import verify
from holdfast.errors import HoldfastWarning
from holdfast.memory import tier
from holdfast.store import open_store
from memory.agents import agent
from memory.zygote import Lives

pytestmark = pytest.mark.slow

VALUES = torch.arange(2_300_000.0)
"""Written in two parts, of which the second has to wait."""
SLOW = {"redundancy": "none", "bandwidth": "4MB"}


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
        root, {"x": {"t": values}}, memory=holdfast.Memory(**SLOW), deadline_s=10
    )
    save = ckpt.save(1)
    await_(lambda: len(list(root.glob("steps/*/*/.tmp-*"))) == ckpt._group.size)
    return ckpt, save


def await_(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


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
    child.join(20)
    child.kill()
    assert child.exitcode == 0 and not save.done()
    save.wait(20)
    assert holdfast.steps(str(root)) == [1]
    ckpt.close()


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


@pytest.mark.distributed
@pytest.mark.parametrize("case", [all_leave, one_leaves, one_leaves_late])
def test_the_agents_complete_it_together(lives: Lives, case: Callable[[Path], None]) -> None:
    """Rank 0's commits the step when the files of all are there."""
    root = str(lives.place / "root")
    script = {"case": f"memory.test_ends:{case.__name__}", "grace_s": 30.0}
    told = lives.live(nodes=[0, 1], **script)
    assert told[1].status == 1, lives.errors()
    await_(lambda: holdfast.steps(root))
    assert verify(open_store(root), 1).good
