"""Worker, 1, 2 or 3 ranks: what two ranks saved of engines goes on in a new process.

On the same layout losses are bit for bit those of the run that was not interrupted.  On another stage or
number of ranks every restored value is; from there on the framework adds gradients in another order:
two runs that were never saved differ between stages by as much (`NOISE`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from capabilities import FSDP2_ON_CPUS
from holdfast.errors import StateMismatch

from .cases import Case, run_all
from .engines import (
    BUILT,
    KINDS,
    WAYS,
    Kind,
    Net,
    build,
    check_against,
    data,
    gathered,
    groups,
    state_of,
    train,
)

NOISE = {"fp32": 1e-6, "bf16": 3.3e-3, "fp16": 3.3e-3}
"""Relative, of the losses of steps 4 to 6: uninterrupted runs on 1, 2 and 3 ranks at stages 0 to 3 differ
by up to 1e-7 in float32 and 3.2e-3 in 16 bits."""


def saved_by(root: Path, kind: Kind) -> Path:
    return root.parent.parent / "saved" / str(kind)


def uninterrupted(root: Path, kind: Kind) -> dict[str, Any]:
    return json.loads((saved_by(root, kind) / "after.json").read_text())


def check_losses(found: list[float], expected: list[float], dtype: str) -> None:
    assert found == pytest.approx(expected, rel=NOISE[dtype])


def check_hyper(engine: Any) -> None:
    """Each group's own, whatever the stage: DeepSpeed's conversion of ZeRO-3 keeps the first's."""
    first, second = inner_of(engine).param_groups
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    assert (first["betas"], second["betas"]) == ((0.8, 0.9), (0.9, 0.99))
    assert (first["lr"], second["lr"]) == (5e-3, 1.5e-3)


def inner_of(engine: Any) -> torch.optim.Optimizer:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def spoil(engine: Any) -> None:
    """Hyper-parameters and counters that a restore must set right."""
    for group in inner_of(engine).param_groups:
        group |= {"lr": 9.0, "weight_decay": 9.0, "betas": (0.5, 0.5)}
    engine.global_steps = engine.global_samples = engine.skipped_steps = 77


# -- the same layout ------------------------------------------------------------------------------


def resuming(kind: Kind) -> Case:
    """In a new process, from other weights: the losses of the run that went on, bit for bit."""

    def case(root: Path) -> None:
        engine, _ = build(kind, 1)
        if kind.stage != 2:
            train(engine, 7, 2)  # states and steps of its own, to be overwritten
        spoil(engine)
        expected = uninterrupted(root, kind)
        with holdfast.Checkpointer(saved_by(root, kind), state_of(engine, kind)) as ckpt:
            assert ckpt.restore() == 3
        check_hyper(engine)
        assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (3, 36, 0)
        if kind.way != "robin":  # which DeepSpeed itself gathers wrongly
            with holdfast.open(str(saved_by(root, kind))) as saved:
                check_against(engine, saved)
        assert train(engine, 3, 3) == expected["losses"]
        assert getattr(engine.optimizer, "loss_scale", None) == expected["scale"]

    case.__name__ = f"resuming-{kind}"
    return case


# -- another layout -------------------------------------------------------------------------------

PAIRS = [
    (Kind(0, "fp32"), Kind(3, "fp32")),
    (Kind(3, "fp32"), Kind(1, "fp32")),
    (Kind(1, "fp32"), Kind(2, "fp32")),
    (Kind(2, "fp32"), Kind(0, "fp32")),
    (Kind(3, "bf16"), Kind(0, "bf16")),
    (Kind(2, "bf16", "robin"), Kind(3, "bf16")),
    (Kind(2, "bf16", "aligned"), Kind(1, "bf16", "accumulate")),
    (Kind(1, "bf16", "accumulate"), Kind(2, "bf16", "robin")),
    (Kind(0, "fp16"), Kind(2, "fp16")),
    (Kind(3, "fp32", "subgroups"), Kind(3, "fp32")),
    (Kind(3, "bf16", "offload"), Kind(1, "bf16")),
    (Kind(2, "fp16"), Kind(3, "fp16")),
]
"""(saved, restored)"""


def moving(source: Kind, target: Kind) -> Case:
    """Every value is restored exactly; the losses are those of the uninterrupted run but for noise."""

    def case(root: Path) -> None:
        engine, _ = build(target, 1)
        spoil(engine)
        state = state_of(engine, source)
        assert holdfast.load(saved_by(root, source), state) == 3
        check_hyper(engine)
        if target.way != "robin":
            with holdfast.open(str(saved_by(root, source))) as saved:
                check_against(engine, saved)
        check_losses(train(engine, 3, 3), uninterrupted(root, source)["losses"], source.dtype)

    case.__name__ = f"{source}-to-{target}"
    return case


def another_precision(root: Path) -> None:
    """Masters are float32 everywhere: only what has no master is cast, and only when asked to."""
    source = Kind(3, "fp32")
    for target in (Kind(1, "bf16"), Kind(0, "fp16"), Kind(3, "fp16")):
        engine, _ = build(target, 1)
        state = state_of(engine, source)
        with pytest.raises(StateMismatch, match=r"frozen\.weight: saved as float32") as caught:
            holdfast.load(saved_by(root, source), state)
        assert {p.split(":")[0] for p in caught.value.problems} == {
            "model.frozen.weight",
            "model.frozen.bias",
        }
        holdfast.load(saved_by(root, source), state, cast=True)
        with holdfast.open(str(saved_by(root, source))) as saved:
            check_against(engine, saved)
        if target.dtype == "fp16":  # a scale that was learnt in 16 bits only is not overwritten
            assert engine.optimizer.loss_scale == 256


def weights_alone(root: Path) -> None:
    for source, target in ((Kind(1, "bf16"), Kind(3, "bf16")), (Kind(3, "bf16"), Kind(2, "bf16"))):
        engine, _ = build(target, 1)
        train(engine, 0, 1)
        before = gathered(engine)
        assert holdfast.load(saved_by(root, source), {"model": engine}) == 3
        after = gathered(engine)
        with holdfast.open(str(saved_by(root, source))) as saved:
            check_against(engine, saved, states=False)
        assert all(torch.equal(before[n], after[n]) for n in before if n.startswith("optim."))
        assert engine.global_steps == 1
        holdfast.save(root / str(target), {"model": engine}, step=1)
        with holdfast.open(str(root / str(target))) as saved:
            assert all(n.startswith("model.") for n in saved.names()) and not saved.extras
            check_against(engine, saved, states=False)


def before_the_first_step(root: Path) -> None:
    """What has no state yet is saved so, and takes the place of states that there are."""
    for kind in (Kind(1, "bf16"), Kind(3, "fp32")):
        fresh, _ = build(kind, 0)
        holdfast.save(root / str(kind), state_of(fresh, kind), step=0)
        with holdfast.open(str(root / str(kind))) as saved:
            assert not [n for n in saved.names() if n.startswith("optim.")]
        expected = train(fresh, 0, 3)
        engine, _ = build(kind, 1)
        train(engine, 5, 2)
        holdfast.load(root / str(kind), state_of(engine, kind))
        assert not engine.optimizer.optimizer.state
        assert train(engine, 0, 3) == expected


# -- plain torch ----------------------------------------------------------------------------------


class Plain:
    """The same model under FSDP2 with torch's own AdamW."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = Net()
        FSDP2_ON_CPUS.require()
        fully_shard(self.net.body)
        fully_shard(self.net)
        self.optim = torch.optim.AdamW(groups(self.net), foreach=False)
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, 2, gamma=0.5)
        self.state = {"model": self.net, "optim": self.optim, "sched": self.sched}

    def train(self, first: int, steps: int) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            x, y = data(step)
            loss = (self.net(x) - y).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optim.step()
            self.optim.zero_grad()
            self.sched.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / dist.get_world_size())
        return losses

    def gathered(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, p in self.net.named_parameters():
            found[f"model.{name}"] = whole(p)
            found |= {f"optim.{name}.{s}": whole(v) for s, v in self.optim.state.get(p, {}).items()}
        return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def into_plain_torch(root: Path) -> None:
    """Every value, state, step and hyper-parameter of an engine, under FSDP2."""
    for kind in (*KINDS[3::3], Kind(1, "bf16"), Kind(2, "fp16"), Kind(3, "bf16")):
        plain = Plain(1)
        state = plain.state if kind.stage != 3 else {k: plain.state[k] for k in ("model", "optim")}
        holdfast.load(saved_by(root, kind), state, cast=kind.dtype != "fp32")
        with holdfast.open(str(saved_by(root, kind))) as saved:
            for name, value in plain.gathered().items():
                raw = saved.read(name).astype("float32")
                assert torch.equal(value, torch.from_numpy(raw)), name
        assert [g["lr"] for g in plain.optim.param_groups] == [5e-3, 1.5e-3]
        assert all(v["step"] == 3 for v in plain.optim.state.values())
        if kind == Kind(2, "fp32"):
            check_losses(plain.train(3, 3), uninterrupted(root, kind)["losses"], "fp32")


def from_plain_torch(root: Path) -> None:
    """What FSDP2 saved goes on in engines of every stage."""
    plain = Plain(0)
    plain.train(0, 3)
    holdfast.save(root / "plain", plain.state, step=3)
    expected = plain.train(3, 3)
    for kind in (*KINDS[::3], Kind(0, "bf16"), Kind(2, "fp16"), Kind(3, "bf16", "offload")):
        engine, _ = build(kind, 1)
        state = {"model": engine, "optim": engine.optimizer, "sched": engine.lr_scheduler}
        holdfast.load(root / "plain", state, cast=kind.dtype != "fp32")
        with holdfast.open(str(root / "plain")) as saved:
            check_against(engine, saved)
        check_hyper(engine)
        assert engine.global_steps == 0  # a plain run has no such counter
        if kind.dtype == "fp32":
            check_losses(train(engine, 3, 3), expected, "fp32")
        else:
            assert train(engine, 3, 3) == pytest.approx(expected, rel=2e-2)


def through_a_chain(root: Path) -> None:
    """FSDP2, ZeRO-3, ZeRO-1, FSDP2: bit for bit what it was."""
    plain = Plain(0)
    plain.train(0, 2)
    expected = plain.gathered()
    holdfast.save(root / "0", plain.state, step=2)
    for number, kind in enumerate((Kind(3, "fp32"), Kind(1, "fp32"))):
        engine, _ = build(kind, 1)
        state = {"model": engine, "optim": engine.optimizer, "sched": engine.lr_scheduler}
        holdfast.load(root / str(number), state)
        holdfast.save(root / str(number + 1), state, step=2)
    again = Plain(1)
    holdfast.load(root / "2", again.state)
    found = again.gathered()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in found)


def counts(engine: Any) -> list[Any]:
    """The steps that its optimizer has counted, and of what type they are."""
    return [(type(s["step"]), float(s["step"])) for s in inner_of(engine).state.values()]


def from_its_own_files(kind: Kind) -> Case:
    """What DeepSpeed's own `save_checkpoint` wrote goes on in an engine as in the one that wrote it."""

    def case(root: Path) -> None:
        writer, _ = build(kind, 0)
        train(writer, 0, 3)
        writer.save_checkpoint(str(root / str(kind)))
        counted = counts(writer)
        expected = train(writer, 3, 3)
        engine, _ = build(kind, 1)
        state = {"model": engine, "optim": engine.optimizer}
        holdfast.load(f"deepspeed:{root / str(kind)}", state, cast=kind.dtype != "fp32")
        assert counts(engine) == counted
        assert train(engine, 3, 3) == expected

    case.__name__ = f"from-its-own-files-{kind}"
    return case


OWN_FILES = [from_its_own_files(kind) for kind in BUILT]

CASES = [
    *(resuming(kind) for kind in (*KINDS, *WAYS)),
    *(moving(*pair) for pair in PAIRS),
    another_precision,
    weights_alone,
    before_the_first_step,
    into_plain_torch,
    from_plain_torch,
    through_a_chain,
    from_its_own_files(Kind(1, "fp32")),
    from_its_own_files(Kind(3, "fp32")),
]

ELSEWHERE = [
    *(moving(*pair) for pair in PAIRS[::3]),
    weights_alone,
    into_plain_torch,
    through_a_chain,
]
"""On another number of ranks."""

if __name__ == "__main__":
    run_all([*CASES, *(resuming(kind) for kind in BUILT), *OWN_FILES])
