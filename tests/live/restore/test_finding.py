"""`find` before there is a state, and `restore` of exactly what it found."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import Checkpointer, Delta, Every, Found, HoldfastWarning, Memory
from holdfast.errors import NotFound, NotRecoverable, UsageError
from tiers.memory.zygote import Lives

RECORDS = {"every": Every(durable=4, delta=1), "delta": Delta(batch=1)}


def state(seed: int = 3, wide: int = 3) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(wide, wide)
    optim = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optim, 2)
    return {"model": model, "optim": optim, "schedule": schedule, "trainer": {"at": (0, "a")}}


def train(live: dict[str, Any], step: int) -> None:
    live["model"](torch.ones(1, live["model"].in_features)).sum().backward()
    live["optim"].step()
    live["optim"].zero_grad()
    live["schedule"].step()
    live["trainer"]["at"] = (step, "b")


def run(root: Path, to: int, wide: int = 3, **options: Any) -> list[torch.Tensor]:
    """Train to a step, and return the weights after each."""
    live, weights = state(wide=wide), []
    with Checkpointer(root, live, **{"every": 1, **options}) as ckpt:
        for step in range(1, to + 1):
            train(live, step)
            ckpt.step(step)
            ckpt.wait()
            weights.append(live["model"].weight.detach().clone())
    return weights


def damage(root: Path, step: int) -> None:
    """Change a byte of the tensors of a step."""
    (file,) = root.glob(f"steps/{step:010d}/*/*.safetensors")
    data = bytearray(file.read_bytes())
    at = int.from_bytes(data[:8], "little") + 8
    data[at + 1] ^= 1
    file.write_bytes(data)


def test_a_state_that_comes_later(tmp_path: Path) -> None:
    weights = run(tmp_path, 2)
    with Checkpointer(tmp_path, on_resize={"loader": "fresh", "optim.common": "rank0"}) as ckpt:
        for call in (ckpt.restore, lambda: ckpt.save(3), lambda: ckpt.step(3)):
            with pytest.raises(UsageError, match="state is still empty"):
                call()
        found = ckpt.find()
        assert found is not None and (found.step, found.tier, found.replays) == (2, "durable", 0)
        assert found.extras["trainer"] == {"at": (2, "b")} and not found.undecided
        assert found.extras["schedule"]["last_epoch"] == 2
        assert {*found.extras} == {"trainer", "schedule", "rng"}
        ckpt.state.update(state(4))
        with pytest.raises(UsageError, match=r"on_resize.*'loader'"):
            ckpt.restore(found)
        ckpt.state["loader"] = []
        with pytest.raises(holdfast.errors.StateMismatch, match="loader"):
            ckpt.restore(found)
        assert ckpt.restore(found, strict=False) == 2
        assert torch.equal(ckpt.state["model"].weight, weights[1])


def test_nothing_there(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {}) as ckpt:
        assert ckpt.find() is None
        with pytest.raises(NotFound):
            ckpt.find(7)
        ckpt.state.update(state())
        assert not ckpt.restore(ckpt.find()).found


def test_a_key_of_the_generators_that_comes_later_is_the_users(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {}) as ckpt:
        ckpt.state["rng"] = {"mine": 1}
        ckpt.save(1).wait()
        found = ckpt.find()
    assert found is not None and found.extras == {"rng": {"mine": 1}}


def test_exactly_what_was_found(tmp_path: Path) -> None:
    weights = run(tmp_path, 3)
    with Checkpointer(tmp_path, state(4), anew=True) as ckpt:
        found = ckpt.find(2)
        train(ckpt.state, 9)
        ckpt.save(9).wait()
        assert isinstance(found, Found)
        restored = ckpt.restore(found)
        assert restored == 2 and restored.tier == "durable"
        assert torch.equal(ckpt.state["model"].weight, weights[1])
        assert ckpt.state["trainer"] == found.extras["trainer"] == {"at": (2, "b")}
        ckpt.save(4).wait()  # which is newer than step 9 now: the run went back
        assert ckpt.find().step == 4


def test_what_was_replaced_is_not_taken_for_what_was_found(tmp_path: Path) -> None:
    run(tmp_path, 1)
    with Checkpointer(tmp_path, state(4), anew=True) as ckpt:
        found = ckpt.find()
        ckpt.save(1).wait()
        with pytest.raises(NotRecoverable, match="no longer exists"):  # it is of another run now
            ckpt.restore(found)
        found = ckpt.find()
        ckpt.save(1).wait()
        with (
            pytest.warns(HoldfastWarning, match="saved again since find"),
            pytest.raises(NotRecoverable, match="saved again since find"),
        ):
            ckpt.restore(found)
        assert ckpt.restore(ckpt.find()) == 1


def test_a_truncated_file_is_passed_over_like_by_restore(tmp_path: Path) -> None:
    run(tmp_path, 3)
    (file,) = tmp_path.glob("steps/0000000003/*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    next(tmp_path.glob("steps/0000000002/*/*.safetensors")).unlink()
    with (
        Checkpointer(tmp_path) as ckpt,
        pytest.warns(HoldfastWarning, match="cannot be used") as told,
    ):
        found = ckpt.find()
    assert found is not None and found.step == 1
    assert [f"step {n}" in str(w.message) for n, w in zip((3, 2), told)] == [True, True]


def test_what_turns_out_damaged_is_passed_over_by_the_next(tmp_path: Path) -> None:
    weights = run(tmp_path, 2, wide=400)  # what is read to find is in other chunks
    damage(tmp_path, 2)
    with Checkpointer(tmp_path, state(4, wide=400)) as ckpt:
        found = ckpt.find()
        assert found is not None and found.step == 2
        with (
            pytest.warns(HoldfastWarning, match="step 2 cannot be used"),
            pytest.raises(NotRecoverable, match="call it again"),
        ):
            ckpt.restore(found)
        with pytest.warns(HoldfastWarning, match="step 2 cannot be used"):
            found = ckpt.find()
        assert found is not None and ckpt.restore(found) == 1
        assert torch.equal(ckpt.state["model"].weight, weights[0])


def test_records_lead_on_and_say_the_newest_values(tmp_path: Path) -> None:
    weights = run(tmp_path, 7, **RECORDS)
    with Checkpointer(tmp_path, **RECORDS) as ckpt:
        found = ckpt.find()
        assert found is not None and (found.step, found.replays) == (7, 3)
        assert found.extras["trainer"] == {"at": (7, "b")}
        assert found.extras["schedule"]["last_epoch"] == 7
        older = ckpt.find(6)
        assert older is not None and older.extras["trainer"] == {"at": (6, "b")}
        ckpt.state.update(state(4))
        assert ckpt.restore(found) == 7 and ckpt.state["trainer"] == {"at": (7, "b")}
        assert torch.equal(ckpt.state["model"].weight, weights[6])
        restored = ckpt.restore(older)
        assert (int(restored), restored.replayed) == (6, 2)
        assert torch.equal(ckpt.state["model"].weight, weights[5])


def test_records_of_a_newer_run_do_not_lead_astray(tmp_path: Path) -> None:
    weights = run(tmp_path, 7, **RECORDS)
    with Checkpointer(tmp_path, state(4), **RECORDS) as ckpt:
        found = ckpt.find()
        ckpt.restore(5)
        train(ckpt.state, 60)
        ckpt.step(6)
        ckpt.wait()
        newest = ckpt.find()
        assert newest is not None and newest.extras["trainer"] == {"at": (60, "b")}
        assert ckpt.restore(found) == 7
        assert torch.equal(ckpt.state["model"].weight, weights[6])


def test_a_damaged_record(tmp_path: Path) -> None:
    weights = run(tmp_path, 7, **RECORDS)
    (file,) = tmp_path.glob("log/*/*-0000000006/r00000.log")
    whole = file.read_bytes()
    with Checkpointer(tmp_path, state(4), **RECORDS) as ckpt:
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.warns(HoldfastWarning, match="the step after 5 is missing or damaged"):
            found = ckpt.find()
        assert found is not None and found.step == 5
        at = whole.rindex(b'"trainer"')  # in what find() reads of the last record alone
        file.write_bytes(whole[:at] + b"'" + whole[at + 1 :])
        found = ckpt.find()
        assert found is not None and found.step == 7
        with pytest.raises(NotRecoverable, match="step 7 cannot be reached"):
            ckpt.restore(found)
        with pytest.warns(HoldfastWarning, match="cannot be used"):
            found = ckpt.find()
        assert found is not None and (found.step, found.replays) == (5, 1)
        assert ckpt.restore(found) == 5
        assert torch.equal(ckpt.state["model"].weight, weights[4])


def test_of_another_root(tmp_path: Path) -> None:
    run(tmp_path / "a", 1)
    with Checkpointer(tmp_path / "a") as ckpt:
        found = ckpt.find()
    with (
        Checkpointer(tmp_path / "b", state()) as ckpt,
        pytest.raises(UsageError, match="was found in"),
    ):
        ckpt.restore(found)


def test_in_the_home_behind(tmp_path: Path) -> None:
    run(tmp_path / "root", 2, upload=tmp_path / "behind")
    for kept in (tmp_path / "root" / "steps").glob("*"):
        shutil.rmtree(kept)
    with Checkpointer(tmp_path / "root", state(4), upload=tmp_path / "behind") as ckpt:
        found = ckpt.find()
        assert found is not None and (found.step, found.tier) == (2, "upload")
        assert found.extras["trainer"] == {"at": (2, "b")}
        restored = ckpt.restore(found)
        assert restored == 2 and restored.tier == "upload"


@pytest.mark.slow
def test_in_memory(tmp_path: Path, lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer snapshot than what is in storage; its files are looked at where they lie."""
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(lives.node(0)))
    options = {
        "every": Every(memory=1, durable=2),
        "memory": Memory(redundancy="none", budget="64MiB"),
    }
    live = state()
    with suppress(ZeroDivisionError), Checkpointer(tmp_path / "root", live, **options) as ckpt:
        for step in (1, 2, 3):
            train(live, step)
            ckpt.step(step)
            ckpt.wait()
        raise ZeroDivisionError
    with Checkpointer(tmp_path / "root", **options) as ckpt:
        found, older = ckpt.find(), ckpt.find(2)
        assert found is not None and (found.step, found.tier) == (3, "memory")
        assert found.extras["trainer"] == {"at": (3, "b")}
        assert older is not None and (older.step, older.tier) == (2, "memory")
        ckpt.state.update(state(4))
        restored = ckpt.restore(found)
        assert restored == 3 and restored.tier == "memory"
        assert torch.equal(ckpt.state["model"].weight, live["model"].weight)
        with pytest.raises(UsageError, match='feed="gradient"'):
            Checkpointer(tmp_path / "b", memory=Memory(feed="gradient"))


def listed() -> dict[str, Any]:
    """Two optimizers of one model as one value."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    adam = torch.optim.AdamW(model[0].parameters())
    return {"model": model, "optim": [adam, torch.optim.SGD(model[1].parameters(), 0.1, 0.9)]}


def step_all(live: dict[str, Any]) -> None:
    live["model"](torch.ones(1, 3)).sum().backward()
    for optimizer in live["optim"]:
        optimizer.step()
        optimizer.zero_grad()


def test_a_list_of_optimizers(tmp_path: Path) -> None:
    live = listed()
    with Checkpointer(tmp_path, live, every=1) as ckpt:
        for step in range(1, 7):
            step_all(live)
            ckpt.step(step)
    new = listed()
    with Checkpointer(tmp_path) as ckpt:
        found = ckpt.find()
        assert found is not None and found.step == 6 and {*found.extras} == {"rng"}
        ckpt.state.update(new)
        assert ckpt.restore(found) == 6
    for one in (live, new):
        step_all(one)
    for a, b in zip(live["model"].parameters(), new["model"].parameters()):
        assert torch.equal(a, b)


def test_records_refuse_a_list_of_optimizers_that_comes_later_too(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, **RECORDS) as ckpt:
        ckpt.state.update(listed())
        for call in (ckpt.restore, lambda: ckpt.step(1)):
            with pytest.raises(UsageError, match="'optim' is 2 of them in a list"):
                call()
