"""Worker, 2 ranks: engines of every kind train three steps and are saved; what is wrong is refused."""

from __future__ import annotations

from deepspeed_on_cpu import deepspeed

# isort: split

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.errors import HoldfastError, StateMismatch, UsageError
from holdfast.live.state import copy_timing, snapshot
from holdfast.live.state.window import Window

from .cases import Case, run_all
from .engines import (
    BUILT,
    KINDS,
    ROWS,
    WAYS,
    Kind,
    Net,
    build,
    check_against,
    gathered,
    groups,
    own_weights,
    state_of,
    train,
)

WAIT_S = 120.0


def saving(kind: Kind) -> Case:
    """Saved from background threads while training goes on; every tensor as DeepSpeed gathers it."""

    def case(root: Path) -> None:
        engine, _ = build(kind, 0)
        train(engine, 0, 3)
        expected, weights = gathered(engine), own_weights(engine)
        with holdfast.Checkpointer(root, state_of(engine, kind)) as ckpt:
            ckpt.save(3)
            losses = train(engine, 3, 3)
        with holdfast.open(str(root)) as saved:
            check_saved(saved, expected, weights, kind)
            check_plain(saved, kind)
        if dist.get_rank() == 0:
            scale = getattr(engine.optimizer, "loss_scale", None)
            (root / "after.json").write_text(json.dumps({"losses": losses, "scale": scale}))

    case.__name__ = str(kind)
    return case


def check_saved(
    saved: holdfast.Checkpoint,
    expected: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
    kind: Kind,
) -> None:
    for name, value in expected.items():
        # DeepSpeed 0.19.8 gathers wrongly what round_robin_gradients has reordered
        if kind.way != "robin":
            assert torch.equal(torch.from_numpy(saved.read(name)), value), name
            assert saved.info(name).dtype == "float32", name
    for name, value in weights.items():
        master = torch.from_numpy(saved.read(name).astype("float32"))
        assert torch.equal(master.to(value.dtype), value), name
    trained = {n for n in saved.names() if n.startswith("model.")} - {"model.offset"}
    assert trained == {*weights, "model.again.weight"}
    steps = [n for n in saved.names() if n.endswith(".step")]
    counted = (
        4 if kind.stage == 0 and kind.dtype != "fp32" else 3
    )  # DeepSpeed steps once at the start
    assert len(steps) == 13 and all(saved.read(n) == counted for n in steps), kind


def check_plain(saved: holdfast.Checkpoint, kind: Kind) -> None:
    first, second = saved.extras["optim"]["param_groups"]
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    assert (first["betas"], second["betas"]) == ((0.8, 0.9), (0.9, 0.99))
    assert (first["lr"], second["lr"]) == (5e-3, 1.5e-3)
    engine = saved.extras["optim.engine"]
    assert [engine[k] for k in ("global_steps", "global_samples", "skipped_steps")] == [3, 36, 0]
    assert ("lr_scheduler" in engine) == ("sched" not in saved.extras)
    assert ("loss_scaler" in engine) == (kind.dtype == "fp16")


# -- the window -----------------------------------------------------------------------------------


@contextmanager
def copied_late() -> Iterator[None]:
    """While open, a copy begins only when the next optimizer's step waits for it."""
    waiting = threading.Event()
    run, wait = snapshot.Copies.run, Window.wait

    def late(copies: Any, *args: Any) -> None:
        assert waiting.wait(WAIT_S)
        run(copies, *args)

    def noted(window: Any) -> None:
        waiting.set()
        wait(window)

    snapshot.Copies.run, Window.wait = late, noted
    try:
        yield
    finally:
        snapshot.Copies.run, Window.wait = run, wait


def nothing_changes_before_the_hook_waits(root: Path) -> None:
    """The copy begins only when the inner optimizer's step has begun, yet finds the call's state."""
    for kind in (Kind(1, "bf16"), Kind(1, "bf16", "accumulate"), Kind(3, "fp32")):
        engine, _ = build(kind, 0)
        train(engine, 0, 2)
        expected = gathered(engine)
        small = patch.object(copy_timing, "COPIED_AT_CALL_BYTES", 0)
        with small, holdfast.Checkpointer(root / str(kind), state_of(engine, kind)) as ckpt:
            ckpt.save(1).wait(WAIT_S)  # the first one is copied at the call
            with copied_late():
                save = ckpt.save(2)
                train(engine, 2, 1)
            save.wait(WAIT_S)
        with holdfast.open(str(root / str(kind))) as saved:
            for name, value in expected.items():
                assert torch.equal(torch.from_numpy(saved.read(name)), value), name


def a_plan_is_used_again(root: Path) -> None:
    """Nothing is planned anew, and nothing allocated, while an engine trains on."""
    for kind in (Kind(2, "bf16"), Kind(3, "bf16")):
        engine, _ = build(kind, 0)
        with holdfast.Checkpointer(root / str(kind), state_of(engine, kind)) as ckpt:
            train(engine, 0, 1)
            ckpt.save(1).wait(WAIT_S)
            plan = ckpt._tiers.saver.planner.plan
            copies = list(plan.copies.values())
            train(engine, 1, 1)
            ckpt.save(2).wait(WAIT_S)
            assert ckpt._tiers.saver.planner.plan is plan and list(plan.copies.values()) == copies
        with holdfast.open(str(root / str(kind))) as saved:
            assert saved.step == 2
            check_against(engine, saved)


def muon(stage: int, seed: int) -> Any:
    """DeepSpeed's Muon, which writes its momentum before the optimizer's step begins."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(13, 31), nn.Tanh(), nn.Linear(31, 13))
    for p in model.parameters():
        p.use_muon = p.ndim > 1
    config = {
        "train_batch_size": ROWS,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": stage, "reduce_scatter": False},
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9}},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def momentum_of_muon_is_of_the_moment_of_the_call(root: Path) -> None:
    for stage in (1, 3):
        engine = muon(stage, 0)
        train(engine, 0, 3)
        where = root / str(stage)
        with copied_late(), holdfast.Checkpointer(where, parts(engine)) as ckpt:
            save = ckpt.save(3)
            losses = train(engine, 3, 3)
            save.wait(WAIT_S)
        other = muon(stage, 1)
        holdfast.load(where, parts(other))
        assert train(other, 3, 3) == losses
    with pytest.raises(UsageError, match="with Muon at this stage cannot be live state"):
        holdfast.load(where, parts(muon(2, 0)))


def parts(engine: Any) -> dict[str, Any]:
    return {"model": engine, "optim": engine.optimizer}


# -- what is refused ------------------------------------------------------------------------------


def an_engine_is_handed_over_in_the_right_form(root: Path) -> None:
    engine, model = build(Kind(1, "bf16"), 0)
    third, _ = build(Kind(3, "bf16"), 0)
    wrong = [
        ({"engine": engine}, r"in its parts: \{'model': engine, 'optim': engine\.optimizer\}"),
        ({"optim": engine.optimizer}, "hand over both"),
        ({"model": model, "optim": engine.optimizer}, "belongs to a DeepSpeed engine"),
        ({"model": engine, "optim": engine.basic_optimizer}, "keeps flat pieces"),
        ({"model": third.module}, "belongs to a DeepSpeed engine"),
    ]
    for state, message in wrong:
        with pytest.raises(UsageError, match=message):
            holdfast.load(root.parent / "zero1-bf16", state)
        with pytest.raises(HoldfastError, match=message):
            holdfast.save(root / "none", state, step=1)
    assert not [*root.glob("none/steps/*/manifest.json")]


def what_modules_say_besides_is_refused(root: Path) -> None:
    """Their own entries of state_dict() have no place in an engine; nothing is left out unsaid."""
    for kind in (Kind(1, "bf16"), Kind(3, "fp32")):
        engine, model = build(kind, 0)
        where = str(root / str(kind))
        holdfast.save(where, state_of(engine, kind), step=1)
        model.embed.register_state_dict_post_hook(lambda _, s, p, __: s.update({f"{p}kind": "nf4"}))
        message = r"model\.embed\.kind: .* inside an engine(?s:.*)ignore\(model, 'embed\.kind'\)"
        with pytest.raises(HoldfastError, match=message):
            holdfast.save(where, state_of(engine, kind), step=2)
        with pytest.raises(UsageError, match=message):
            holdfast.load(where, state_of(engine, kind))
        holdfast.ignore(engine, "embed.kind")
        holdfast.save(where, state_of(engine, kind), step=2)
        holdfast.load(where, state_of(engine, kind))


def states_that_one_master_cannot_hold_are_refused(root: Path) -> None:
    """Parameters of one flat group have one step; nothing is touched where they do not."""
    for change in ("step", "missing"):
        torch.manual_seed(3)
        net = Net()
        optimizer = torch.optim.AdamW(groups(net), foreach=False)
        net(torch.randn(2, 13)).sum().backward()
        optimizer.step()
        if change == "step":
            optimizer.state[net.mix]["step"] += 1
        else:
            del optimizer.state[net.mix]
        holdfast.save(root / change, {"model": net, "optim": optimizer}, step=1)
        for kind in (Kind(1, "fp32"), Kind(3, "fp32")):
            engine, _ = build(kind, 0)
            train(engine, 0, 1)
            before = gathered(engine)
            what = "step is" if change == "step" else "keeps one flat state for both"
            with pytest.raises(StateMismatch, match=what) as caught:
                holdfast.load(root / change, {"model": engine, "optim": engine.optimizer})
            assert "mix" in str(caught.value)
            after = gathered(engine)
            assert all(torch.equal(before[n], after[n]) for n in before)


def state_of_no_parameter_inside_an_engine_is_refused(root: Path) -> None:
    """It would not be saved; the counter of an optimizer by itself is."""
    for kind in (Kind(0, "fp32"), Kind(1, "bf16"), Kind(3, "fp32")):
        engine, _ = build(kind, 0)
        train(engine, 0, 1)
        inner = engine.optimizer if kind.stage == 0 else engine.basic_optimizer
        inner.state["rounds"] = 3
        with pytest.raises(HoldfastError, match=r"inside has state .* no parameter \('rounds'\)"):
            holdfast.save(root / f"{kind.stage}", state_of(engine, kind), step=1)


def a_group_of_its_own_may_have_its_own_step(root: Path) -> None:
    """As stage 0 keeps states by parameter, it takes what the flat stages refuse."""
    engine, model = build(Kind(0, "fp32"), 0)
    holdfast.load(
        root.parent / states_that_one_master_cannot_hold_are_refused.__name__ / "step",
        {"model": engine, "optim": engine.optimizer},
    )
    states = engine.optimizer.state
    assert states[model.mix]["step"] == 2 and states[model.scale]["step"] == 1


def a_damaged_step_leaves_nothing_that_trains(root: Path) -> None:
    for kind in (Kind(1, "bf16"), Kind(3, "bf16")):
        engine, _ = build(kind, 0)
        where = str(root / str(kind))
        holdfast.save(where, state_of(engine, kind), step=1)
        if dist.get_rank() == 0:
            with holdfast.open(where) as saved:
                file = saved.manifest.files[0]
            path = next(Path(where).glob(f"steps/*/{file.path}"))
            data = bytearray(path.read_bytes())
            data[file.data + 5] ^= 1
            path.write_bytes(data)
        dist.barrier()
        with pytest.raises(HoldfastError):
            holdfast.load(where, state_of(engine, kind))
        assert all(p.isnan().all() for p in own_trained(engine))


def own_trained(engine: Any) -> list[torch.Tensor]:
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    return [getattr(p, "ds_tensor", p) for p in trained]


CASES = [
    *(saving(kind) for kind in (*KINDS, *WAYS)),
    nothing_changes_before_the_hook_waits,
    a_plan_is_used_again,
    an_engine_is_handed_over_in_the_right_form,
    what_modules_say_besides_is_refused,
    states_that_one_master_cannot_hold_are_refused,
    state_of_no_parameter_inside_an_engine_is_refused,
    a_group_of_its_own_may_have_its_own_step,
    a_damaged_step_leaves_nothing_that_trains,
]

COMPILING = [*(saving(kind) for kind in BUILT), momentum_of_muon_is_of_the_moment_of_the_call]
"""Their optimizers are compiled by the first process that wants them."""

if __name__ == "__main__":
    run_all([*CASES, *COMPILING])
