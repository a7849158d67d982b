"""What the replaced methods of an engine take and return, on one rank."""

from __future__ import annotations

from deepspeed_on_cpu import deepspeed

# isort: split

import json
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import logger
from torch import nn

import holdfast
import holdfast.integrations.deepspeed as integration
from holdfast.errors import NotRecoverable, UsageError
from holdfast.integrations.deepspeed import attach


def engine_of(seed: int = 0, frozen: bool = False, stage: int = 2, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))
    model[0].requires_grad_(not frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **options,
    }
    sched = torch.optim.lr_scheduler.StepLR(adam, 2, gamma=0.5)
    return deepspeed.initialize(model=model, optimizer=adam, lr_scheduler=sched, config=config)[0]


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(engine.global_steps))
        engine.backward(engine(x.bfloat16()).float().square().mean())
        engine.step()


def weights(engine: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.module.parameters()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two))


def tags(root: str) -> None:
    """Steps by number, labels, `save_latest=False`, and steps that are not there."""
    engine = engine_of()
    found = {}
    with attach(engine, root, keep=holdfast.Keep(last=2)) as ckpt:
        assert engine.load_checkpoint(root) == (None, None)
        for step in (1, 2, 3, 4, 5):
            train(engine, 1)
            found[step] = weights(engine)
            tag = {1: "best", 5: "trial"}.get(step)
            assert engine.save_checkpoint(
                root, tag, client_state={"at": step}, save_latest=step != 5
            )
        with pytest.raises(UsageError, match="names another step than 5"):
            engine.save_checkpoint(root, "global_step3")
        with pytest.raises(ValueError, match="save_dir"):
            engine.save_checkpoint("")
        ckpt.wait()
        assert holdfast.steps(root)[0] == 1  # a label keeps its step
    engine = engine_of(1)
    with attach(engine, root, keep=holdfast.Keep(last=2)):
        for tag, step in ((None, 4), ("best", 1), ("global_step4", 4), ("trial", 5)):
            path, client = engine.load_checkpoint(root, tag)
            assert (path, client) == (f"{root}/{tag or 'global_step4'}", {"at": step})
            assert engine.global_steps == step and same(weights(engine), found[step])
        with pytest.raises(NotRecoverable, match="no step with the tag 'worst'"):
            engine.load_checkpoint(root, "worst")
        with pytest.raises(UsageError, match="custom_load_fn"):
            engine.load_checkpoint(root, custom_load_fn=print)


def parts(root: str) -> None:
    """Weights alone, without the optimizer, without the scheduler."""
    engine = engine_of()
    with attach(engine, root):
        train(engine, 3)
        engine.save_checkpoint(root, client_state={"epoch": 1})
        saved = weights(engine)
        rate = engine.optimizer.param_groups[0]["lr"]
    for given, optimizer, scheduler, steps in (
        ({"load_module_only": True}, False, False, 0),
        ({"load_optimizer_states": False}, False, True, 3),
        ({"load_lr_scheduler_states": False}, True, False, 3),
        ({}, True, True, 3),
    ):
        engine = engine_of(1)
        with attach(engine, root):
            path, client = engine.load_checkpoint(root, **given)
        assert (path, client) == (f"{root}/global_step3", {"epoch": 1})
        assert same(weights(engine), saved) and engine.global_steps == steps
        inner = engine.optimizer.optimizer.state
        assert any("exp_avg" in of for of in inner.values()) == optimizer
        assert (engine.lr_scheduler.last_epoch == 3) == scheduler
        assert not optimizer or engine.optimizer.param_groups[0]["lr"] == rate


def branched(root: str) -> None:
    """The newest step is of the run that came last, also for weights alone; what is damaged is told."""
    engine = engine_of()
    with attach(engine, root):
        for _ in range(4):
            train(engine, 1)
            engine.save_checkpoint(root)
    engine = engine_of(1)
    with attach(engine, root):
        engine.load_checkpoint(root, "global_step2")
        before = weights(engine)
        engine.lr_scheduler.base_lrs = [1.0]  # so that step 3 is another one
        train(engine, 1)
        engine.save_checkpoint(root)
        saved = weights(engine)
    assert holdfast.steps(root) == [1, 2, 3, 4]

    def load(**options: Any) -> tuple[Any, list[str]]:
        engine = engine_of(2)
        with attach(engine, root), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            path, _ = engine.load_checkpoint(root, **options)
        return (path, weights(engine)), [str(w.message) for w in told]

    for options in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
        (path, loaded), _ = load(**options)
        assert path == f"{root}/global_step3" and same(loaded, saved), options
    manifest = Path(root, "steps/0000000003/manifest.json")
    sound = manifest.read_bytes()
    manifest.write_bytes(sound[: len(sound) // 2])
    for number in (4, 1):
        Path(root, f"steps/000000000{number}/manifest.json").unlink()
    (path, loaded), told = load(load_module_only=True)
    assert path == f"{root}/global_step2" and same(loaded, before)
    assert any("step 3 is passed over" in one for one in told), told
    Path(root, "steps/0000000002/manifest.json").unlink()
    with pytest.raises(NotRecoverable, match="none of 1 step"):
        load(load_module_only=True)


def elsewhere(root: str) -> None:
    """A folder that is not the root points to the step, once that is committed."""
    folder = Path(root).parent / "checkpoint-2"
    engine = engine_of()
    with attach(engine, root, every=1):
        train(engine, 2)
        engine.save_checkpoint(str(folder), client_state={"epoch": 1})
        saved = weights(engine)
        train(engine, 2)
    assert (folder / "latest").read_text() == "global_step2"
    assert json.loads((folder / "global_step2/holdfast.json").read_text())["step"] == 2
    engine = engine_of(1)
    with attach(engine, root):
        assert engine.load_checkpoint(str(folder))[0] == f"{folder}/global_step2"
        assert same(weights(engine), saved) and engine.global_steps == 2
        engine.load_checkpoint(root)
        assert engine.global_steps == 4
        with pytest.raises(NotRecoverable, match="points to no step"):
            engine.load_checkpoint(str(folder), "pytorch_model")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert engine.load_checkpoint(str(folder.parent)) == (None, None)
        assert any("has step 4: load from there" in str(w.message) for w in told)
    other = engine_of(2)
    with attach(other, f"{root}-2"):  # a run that begins with another one's step
        other.load_checkpoint(str(folder))
        assert same(weights(other), saved)


def twice(root: str) -> None:
    """Another save of a step takes neither the values of the first nor its place as the newest."""
    last, best = (str(Path(root).parent / name) for name in ("last", "best"))
    engine = engine_of()
    with attach(engine, root, client_state=lambda: {"own": engine.global_steps}) as ckpt:
        train(engine, 1)
        engine.save_checkpoint(root, client_state={"epoch": 1})
        engine.save_checkpoint(root, "best", client_state={"acc": 0.9}, save_latest=False)
        for folder in (last, best):
            engine.save_checkpoint(folder, client_state={"in": folder}, save_latest=folder == last)
        ckpt.wait()
    told = {(root, None): {"epoch": 1}, (root, "best"): {"acc": 0.9}, (last, None): {"in": last}}
    told[best, "global_step1"] = {"in": best}
    for (folder, tag), client in told.items():
        engine = engine_of(1)
        with attach(engine, root):
            path, found = engine.load_checkpoint(folder, tag)
        assert (path, found) == (f"{folder}/{tag or 'global_step1'}", client)
    with attach(engine_of(1), root) as ckpt:  # also if the second is made by a run that went on
        engine = ckpt.state["model"]
        engine.load_checkpoint(root)
        engine.save_checkpoint(root, "worst", save_latest=False)
    with attach(engine_of(1), root) as ckpt:
        assert ckpt.state["model"].load_checkpoint(root)[1] == {"epoch": 1}
    engine = engine_of()
    with attach(engine, f"{root}-2", every=1, client_state=lambda: {"epoch": 2}):
        train(engine, 2)
        engine.save_checkpoint(f"{root}-2", "best", client_state={"acc": 1}, save_latest=False)
    engine = engine_of(1)
    with attach(engine, f"{root}-2"):
        assert engine.load_checkpoint(f"{root}-2") == (f"{root}-2/global_step2", {"epoch": 2})


def kept_as_given(root: str) -> None:
    """What a caller changes after a save is not in it, though another save of the step follows."""
    last, best = (str(Path(root).parent / name) for name in ("last", "best"))
    engine, history = engine_of(), {"loss": [1.0], "ema": torch.ones(2)}
    with attach(engine, root):
        train(engine, 1)
        engine.save_checkpoint(last, client_state={"history": history})
        history["loss"].append(2.0)
        history["ema"].zero_()
        engine.save_checkpoint(best, client_state={"history": history})
        history["loss"].append(3.0)
        engine.load_checkpoint(last)[1]["history"]["loss"].append(4.0)
        engine.save_checkpoint(root)
    for folder, losses, ema in ((last, [1.0], 1.0), (best, [1.0, 2.0], 0.0)):
        with attach(engine_of(1), root) as ckpt:
            _, client = ckpt.state["model"].load_checkpoint(folder)
        assert client["history"]["loss"] == losses, (folder, client)
        assert client["history"]["ema"].tolist() == [ema] * 2, (folder, client)


def after_every(root: str) -> None:
    """What is given at a step counts more than what `every=` had saved there; a pointer to a step that is
    gone is mended though its tag is the same."""
    folder = str(Path(root).parent / "out")
    engine = engine_of()
    with attach(engine, root, every=2):
        train(engine, 2)
        engine.save_checkpoint(root, client_state={"epoch": 1})
    engine = engine_of(1)
    with attach(engine, root, keep=holdfast.Keep(last=1)) as ckpt:
        assert engine.load_checkpoint(root)[1] == {"epoch": 1}
        train(engine, 1)
        engine.save_checkpoint(folder, "last", client_state={"at": 3})
        ckpt.wait()
        engine.save_checkpoint(folder, "last", client_state={"at": 3})
        before = Path(folder, "last/holdfast.json").read_text()
        train(engine, 1)
        engine.save_checkpoint(folder, "last", client_state={"at": 4})
    shutil.rmtree(Path(root, "steps/0000000003"), ignore_errors=True)
    Path(folder, "last/holdfast.json").write_text(before)  # as if it had been killed before
    engine = engine_of(1)
    with attach(engine, root, keep=holdfast.Keep(last=1)):
        assert engine.load_checkpoint(folder) == (f"{folder}/last", {"at": 4})
        assert engine.load_checkpoint(folder, "last") == (f"{folder}/last", {"at": 4})


def labelled(root: str) -> None:
    """A tag in another folder keeps its step as long as it names it, and the folder is there."""
    best, rotated = (str(Path(root).parent / name) for name in ("best", "checkpoint-1"))
    engine = engine_of()

    def save(*places: tuple[str, str | None]) -> None:
        train(engine, 1)
        for folder, tag in places or ((root, None),):
            engine.save_checkpoint(folder, tag, client_state={"at": engine.global_steps})
            ckpt.wait()

    with attach(engine, root, keep=holdfast.Keep(last=2)) as ckpt:
        save((best, "best"), (rotated, "pytorch_model"), (best, None))
        for _ in range(4):
            save()
        assert 1 in holdfast.steps(root)
        assert engine.load_checkpoint(best, "best") == (f"{best}/best", {"at": 1})
        engine.load_checkpoint(root)
        save((best, "best"))
        before = Path(best, "best/holdfast.json").read_text()
        shutil.rmtree(rotated)
        for _ in range(4):
            save()
    assert holdfast.steps(root) == [6, 9, 10]
    engine = engine_of()
    with attach(engine, root, keep=holdfast.Keep(last=1)) as ckpt:
        engine.load_checkpoint(root)
        save((best, "best"))
        save()
        save()
    assert holdfast.steps(root) == [11, 13]
    Path(best, "best/holdfast.json").write_text(before)  # as if it had been killed before
    with attach(engine_of(1), root) as ckpt:
        engine = ckpt.state["model"]
        assert engine.load_checkpoint(best, "best") == (f"{best}/best", {"at": 11})
    assert json.loads(Path(best, "best/holdfast.json").read_text())["step"] == 11


def labelled_by_a_run_before(root: str) -> None:
    """A label goes with its folder after a restart, too; if that was gone before, it may lie elsewhere."""
    kept, rotated, elsewhere = (str(Path(root).parent / name) for name in ("a", "b", "c"))
    engine = engine_of()

    def save(folder: str = root, tag: str | None = None) -> None:
        train(engine, 1)
        engine.save_checkpoint(folder, tag)
        ckpt.wait()

    with attach(engine, root, keep=holdfast.Keep(last=1)) as ckpt:
        for folder in (kept, rotated, elsewhere):
            save(folder, "pytorch_model")
    shutil.rmtree(elsewhere)
    engine = engine_of()
    with attach(engine, root, keep=holdfast.Keep(last=1)) as ckpt:
        engine.load_checkpoint(root)
        save()
        assert holdfast.steps(root) == [1, 2, 3, 4]
        shutil.rmtree(rotated)
        save()
        save()
    assert holdfast.steps(root) == [1, 3, 6]


def relative(root: str) -> None:
    """A folder is that of the working directory when it was named."""
    place = Path(root).parent
    for name in ("one", "two"):
        (place / name).mkdir()
    engine = engine_of()
    with attach(engine, root) as ckpt:
        for folder, tag in (("out", "best"), (".", "best")):
            os.chdir(place / "one")
            train(engine, 1)
            engine.save_checkpoint(folder, tag)
            os.chdir(place / "two")
            ckpt.wait()
        engine.load_checkpoint(str(place / "one/out"))
    assert engine.global_steps == 1 and os.listdir(place / "two") == []
    os.chdir(place)
    with attach(engine_of(1), root, keep=holdfast.Keep(last=1)) as ckpt:
        engine = ckpt.state["model"]
        for folder, step in (("one/out", 1), ("one", 2)):
            engine.load_checkpoint(folder, "best")
            assert engine.global_steps == step


def not_labelled(root: str) -> None:
    """A label that cannot be written is told; the pointer is written."""
    folder = str(Path(root).parent / "out")
    engine = engine_of()
    with attach(engine, root) as ckpt:
        train(engine, 1)
        engine.save_checkpoint(root)
        ckpt.wait()
        Path(root, "steps/notes.json").mkdir()
        train(engine, 1)
        engine.save_checkpoint(folder, "best")
        with pytest.warns(holdfast.HoldfastWarning, match="step 2 is .*not labelled '.*out/best"):
            ckpt.wait()
        assert engine.load_checkpoint(folder) == (f"{folder}/best", {})


def replaced(root: str) -> None:
    """What points to a step that another run has saved anew gives nothing else; an older file does."""
    best = str(Path(root).parent / "best")
    engine = engine_of()
    with attach(engine, root):
        train(engine, 1)
        engine.save_checkpoint(root)
        train(engine, 1)
        engine.save_checkpoint(best, "best")
    engine = engine_of(1)
    with attach(engine, root):
        engine.load_checkpoint(root, "global_step1")
        engine.lr_scheduler.base_lrs = [1.0]  # so that step 2 is another one
        train(engine, 1)
        engine.save_checkpoint(root)
        saved = weights(engine)
    pointer = Path(best, "best/holdfast.json")
    engine = engine_of(2)
    with attach(engine, root):
        for tag in ("best", None):
            with pytest.raises(NotRecoverable, match=r"step 2 of run 1 .* run \d+ has saved anew"):
                engine.load_checkpoint(best, tag)
        named = json.loads(pointer.read_text())
        pointer.write_text(json.dumps({"root": named["root"], "step": 2}))
        assert engine.load_checkpoint(best, "best")[0] == f"{best}/best"
        assert same(weights(engine), saved)
        engine.save_checkpoint(best, "best")
    pointer.write_text(json.dumps(named))  # as if the run was killed before it could write it
    with attach(engine_of(2), root) as ckpt:
        assert ckpt.state["model"].load_checkpoint(best, "best")[0] == f"{best}/best"


def went_back(root: str) -> None:
    """In place of a deleted step that `latest` names, the newest is of the run that came last."""
    folder = str(Path(root).parent / "folder")
    engine = engine_of()
    with attach(engine, root) as ckpt:
        for _ in range(3):
            train(engine, 1)
            engine.save_checkpoint(folder)
            ckpt.wait()
    engine = engine_of(1)
    with attach(engine, root):
        engine.load_checkpoint(folder, "global_step1")
        train(engine, 1)
        engine.save_checkpoint(folder)
    Path(folder, "latest").write_text("global_step3")  # as a run leaves it that is killed before
    shutil.rmtree(Path(root, "steps/0000000003"))
    with attach(engine_of(2), root) as ckpt:
        with pytest.warns(
            holdfast.HoldfastWarning, match="step 2, which was saved there later, is loaded"
        ):
            path, _ = ckpt.state["model"].load_checkpoint(folder)
        assert path == f"{folder}/global_step2"


def went_back_in_part(root: str) -> None:
    """What is saved after a load of weights and counters is newer than the steps that it left behind."""
    other, deepspeeds = (str(Path(root).parent / name) for name in ("other", "deepspeeds"))
    engine = engine_of()
    with attach(engine, other):
        train(engine, 2)
        engine.save_checkpoint(f"{other}-points")
    engine = engine_of()
    train(engine, 2)
    engine.save_checkpoint(deepspeeds)
    for number, (folder, tag, options) in enumerate(
        [
            (None, "global_step2", {"load_optimizer_states": False}),
            (f"{other}-points", None, {}),
            (deepspeeds, None, {}),
        ]
    ):
        own = f"{root}-{number}"
        engine = engine_of()
        with attach(engine, own, keep=holdfast.Keep(last=1, every=2)) as ckpt:
            for _ in range(4):
                train(engine, 1)
                engine.save_checkpoint(own)
            assert engine.load_checkpoint(folder or own, tag, **options)[0] is not None
            assert engine.global_steps == 2
            train(engine, 1)
            engine.save_checkpoint(own)
            ckpt.wait()
        assert 3 in holdfast.steps(own), (folder, holdfast.steps(own))
        with attach(engine_of(1), own) as ckpt:
            assert ckpt.state["model"].load_checkpoint(own)[0] == f"{own}/global_step3", folder


def accumulated(root: str) -> None:
    """An engine that accumulates more begins a batch with each part of a step that it loads."""

    def accumulating(number: int) -> Any:
        sizes = {"train_batch_size": number, "gradient_accumulation_steps": number}
        return engine_of(**sizes)

    engine = accumulating(4)
    with attach(engine, root):
        train(engine, 12)
        engine.save_checkpoint(root)
    for options in ({}, {"load_optimizer_states": False}):
        engine = accumulating(8)
        with attach(engine, root):
            engine.load_checkpoint(root, **options)
            assert engine.global_steps == 3 and engine.micro_steps == 8, options
            train(engine, 7)
            assert engine.global_steps == 3, options
            train(engine, 1)
            assert engine.global_steps == 4, options


def unwritable(root: str) -> None:
    """A pointer that cannot be written is told and tried again; others are written."""
    blocked, free = (Path(root).parent / name for name in ("blocked", "free"))
    blocked.write_text("a file")
    engine = engine_of()

    def save(*tags: tuple[Path, str]) -> None:
        train(engine, 1)
        for folder, tag in tags:
            engine.save_checkpoint(str(folder), tag)
        ckpt.wait()

    with attach(engine, root) as ckpt:
        with pytest.warns(holdfast.HoldfastWarning, match="a does not point to step 1"):
            save((blocked, "a"), (free, "b"))
        assert json.loads((free / "b/holdfast.json").read_text())["step"] == 1
        with pytest.warns(holdfast.HoldfastWarning, match="c does not point to step 2"):
            save((blocked, "c"))
        with pytest.warns(holdfast.HoldfastWarning, match="a does not point to step 1"):
            engine.load_checkpoint(root)
        blocked.unlink()
        save((free, "d"))
        for tag, step in (("a", 1), ("c", 2)):
            assert json.loads((blocked / tag / "holdfast.json").read_text())["step"] == step
        assert (blocked / "latest").read_text() == "c"


def late_pointer(root: str) -> None:
    """Two ranks, of which the first writes pointers, and takes a second: both go on from the same one."""
    write = integration._write_pointer

    def late(*args: Any) -> None:
        time.sleep(1)
        write(*args)

    integration._write_pointer = late
    folder = str(Path(root).parent / "out")
    engine = engine_of()
    with attach(engine, root):
        for step in (1, 2):
            train(engine, 1)
            engine.save_checkpoint(folder, client_state={"at": step})
            path, client = engine.load_checkpoint(folder)
            assert (path, client) == (f"{folder}/global_step{step}", {"at": step})
        with pytest.raises(NotRecoverable, match="points to no step"):
            engine.load_checkpoint(folder, "nothing")


def deepspeeds_own(root: str) -> None:
    """What DeepSpeed has written, also where the root is now, is read by DeepSpeed."""
    engine = engine_of()
    train(engine, 2)
    saved = weights(engine)
    engine.save_checkpoint(root, client_state={"epoch": 5})
    engine = engine_of(1)
    with attach(engine, root):
        path, client = engine.load_checkpoint(root)
        assert "mp_rank_00" in path and client["epoch"] == 5
        assert same(weights(engine), saved) and engine.global_steps == 2
        train(engine, 1)
        engine.save_checkpoint(root)
        after = weights(engine)
    engine = engine_of(2)
    with attach(engine, root):
        with warnings.catch_warnings():
            warnings.simplefilter("error", holdfast.HoldfastWarning)
            assert engine.load_checkpoint(root)[0] == f"{root}/global_step3"
        assert same(weights(engine), after)
    engine = engine_of(1)
    train(engine, 4)
    engine.save_checkpoint(root)
    engine = engine_of(2)
    with (
        attach(engine, root),
        pytest.warns(holdfast.HoldfastWarning, match=r"global_step4.*\[newer-native\]"),
    ):
        assert engine.load_checkpoint(root)[0] == f"{root}/global_step3"


def universal(root: str) -> None:
    """An engine that is to begin with DeepSpeed's universal checkpoint goes on from its own steps."""
    beside, asked = str(Path(root).parent / "beside"), []
    options = {"checkpoint": {"load_universal": True}}
    engine = engine_of(**options)
    assert engine.load_universal_checkpoint()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine), "load_checkpoint", lambda _, *given, **__: asked.append(given))
        with attach(engine, root):
            engine.load_checkpoint(root)
            assert asked.pop() == (root, None)
            train(engine, 1)
            engine.save_checkpoint(beside)
            saved = weights(engine)
            engine.load_checkpoint(beside, "global_step9")
            assert asked.pop() == (beside, "global_step9")
        for folder in (root, beside):
            engine = engine_of(1, **options)
            with attach(engine, root):
                assert engine.load_checkpoint(folder)[0] == f"{folder}/global_step1"
            assert same(weights(engine), saved) and not asked


def behind(root: str) -> None:
    """What is only in the home behind the root is loaded whole; a part of it is refused, or told."""
    home = str(Path(root).parent / "home")
    engine = engine_of()
    with attach(engine, root, upload=home):
        train(engine, 1)
        engine.save_checkpoint(root, client_state={"epoch": 1})
        saved = weights(engine)
        train(engine, 1)
        engine.save_checkpoint(root, exclude_frozen_parameters=True)
    assert holdfast.steps(home) == [1, 2]
    shutil.rmtree(Path(root, "steps/0000000002"))
    engine = engine_of(1)
    told = "newest step, 2, is in the home behind the root and .*; step 1 is loaded"
    with attach(engine, root, upload=home):
        with pytest.warns(holdfast.HoldfastWarning, match=told):
            path, _ = engine.load_checkpoint(root, load_module_only=True)
        assert path == f"{root}/global_step1" and same(weights(engine), saved)
    shutil.rmtree(root)
    engine = engine_of(1)
    with attach(engine, root, upload=home):
        with pytest.raises(NotRecoverable, match="step 2 is in the home behind the root"):
            engine.load_checkpoint(root, load_module_only=True)
        assert engine.load_checkpoint(root, "global_step1")[1] == {"epoch": 1}
        assert same(weights(engine), saved)
        assert engine.load_checkpoint(root)[0] == f"{root}/global_step2"


def frozen(root: str) -> None:
    """Frozen weights are not written, and not expected by a run that has not saved yet."""
    engine = engine_of(frozen=True)
    with attach(engine, root):
        train(engine, 2)
        engine.save_checkpoint(root, exclude_frozen_parameters=True)
        saved = weights(engine)
    names = holdfast.open(root).names()
    assert "model.2.weight" in names and "model.0.weight" not in names
    engine = engine_of(1, frozen=True)
    kept = weights(engine)
    with attach(engine, root):
        engine.load_checkpoint(root)
    assert same(weights(engine)[2:], saved[2:]) and same(weights(engine)[:2], kept[:2])
    engine = engine_of(frozen=True, stage=3)
    with attach(engine, f"{root}-3"):
        train(engine, 1)
        with pytest.warns(holdfast.HoldfastWarning, match="at ZeRO stage 3"):
            engine.save_checkpoint(f"{root}-3", exclude_frozen_parameters=True)
    assert "model.0.weight" in holdfast.open(f"{root}-3").names()


def told_to_stop(root: str, dies: bool = False) -> None:
    """SIGTERM stops an engine that saves when it is asked to, after the step under way."""
    engine = engine_of()
    options: dict[str, Any] = {"sigterm_s": 60, "client_state": lambda: {"at": engine.global_steps}}
    with warnings.catch_warnings(), attach(engine, root, **options):
        warnings.simplefilter("error", holdfast.HoldfastWarning)
        path, client = engine.load_checkpoint(root)
        train(engine, 2)
        if dies:
            os.kill(os.getpid(), signal.SIGTERM)
            train(engine, 2)
            raise AssertionError(f"at step {engine.global_steps}, and not told")
    assert (path, client) == (f"{root}/global_step3", {"at": 3}) and holdfast.steps(root) == [3]


def refused(root: str) -> None:
    with pytest.raises(UsageError, match=r"an engine of deepspeed\.initialize"):
        attach(nn.Linear(2, 2), root)
    engine = engine_of()
    with pytest.raises(UsageError, match="client_state"):
        attach(engine, root, client_state={"epoch": 1})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="does not know the gradients"):
        attach(engine, root, delta=holdfast.Delta())
    engine.random_ltd_enabled = lambda: True
    with pytest.raises(UsageError, match="uses random-LTD, whose state"):
        attach(engine, root)
    del engine.random_ltd_enabled
    with attach(engine, root), pytest.raises(UsageError, match="attached already"):
        attach(engine, root)


def saves(root: str, dies: int = 0) -> None:
    """Go on to step 4, each saved into a folder beside the root, which has the newest alone.

    The process ends before the `dies`-th call that writes into the folder, once the root has let go of what
    `latest` names.  `journal` has the step at which the run begins, those that are saved, and the weights.
    """
    folder, left = Path(root).parent / "folder", [dies]

    def before(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any, *args: Any, **kwargs: Any) -> Any:
            reads = call.__name__ == "open" and not args[0] & os.O_CREAT
            left[0] -= not reads and str(path).startswith(str(folder))
            if left[0] == 0 and dies:
                left[0] = -1
                while len(holdfast.steps(root)) > 1:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(path, *args, **kwargs)

        return counted

    with (
        pytest.MonkeyPatch.context() as patch,
        (Path(root).parent / "journal").open("a") as journal,
    ):
        for name in ("mkdir", "open", "replace"):
            patch.setattr(os, name, before(getattr(os, name)))
        engine = engine_of()
        with attach(engine, root, keep=holdfast.Keep(last=1)) as ckpt:
            path, _ = engine.load_checkpoint(str(folder))
            found = path is not None and json.loads(Path(path, "holdfast.json").read_text())["step"]
            print(found is not False and found == engine.global_steps, file=journal)
            print(engine.global_steps, file=journal, flush=True)
            while engine.global_steps < 4:
                train(engine, 1)
                print(engine.global_steps, file=journal, flush=True)
                engine.save_checkpoint(str(folder))
                ckpt.wait()
        print([w.tolist() for w in weights(engine)], file=journal)


CASES = {
    one.__name__: one
    for one in (
        tags,
        parts,
        branched,
        elsewhere,
        twice,
        kept_as_given,
        after_every,
        labelled_by_a_run_before,
        relative,
        not_labelled,
        went_back,
        went_back_in_part,
        accumulated,
        unwritable,
        labelled,
        replaced,
        deepspeeds_own,
        universal,
        behind,
        frozen,
        refused,
        told_to_stop,
        late_pointer,
        saves,
    )
}


def main(options: dict[str, Any]) -> None:
    logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    case: Callable[..., None] = CASES[options.pop("case")]
    case(**options)
    torch.distributed.destroy_process_group()
