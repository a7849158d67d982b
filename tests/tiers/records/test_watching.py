"""What no record can tell is seen, whenever it happens: weights and states that are written outside of
`optimizer.step()`, or are others, or lie elsewhere."""

from __future__ import annotations

import copy
import ctypes
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import UsageError
from holdfast.tiers.records.capture import RecordCapture
from holdfast.tiers.records.watching import Watch
from tiers.memory.zygote import Lives

from .test_corners import Plain
from .test_exact import OPTIMIZERS, Run, check_equal, root  # noqa: F401

pytestmark = pytest.mark.slow

UNTIL = 7
Change = Callable[[Run], None]


def unsteered(root: Path, run: Run, **options: Any) -> holdfast.Checkpointer:  # noqa: F811
    """Full saves are made only where records need one."""
    given = {"on_error": "raise", "deadline_s": 120.0, "delta": holdfast.Delta(), **options}
    return holdfast.Checkpointer(root, run.state, every=holdfast.Every(delta=1), **given)


def train(ckpt: holdfast.Checkpointer, run: Run, at: int, change: Change, begin: int = 0) -> None:
    """Up to UNTIL; something happens before step `at`."""
    for number in range(begin + 1, UNTIL + 1):
        if number == at:
            change(run)
        run.step(number)
        ckpt.step(number)
        ckpt.wait()


def check_takes_a_full_save(
    root: Path,  # noqa: F811
    change: Change,
    again: Change = lambda _: None,
    at: int = 5,
    new: Callable[[], Run] = Plain,
) -> None:
    """It is seen, records begin anew, and a restart has the whole training.  `again`: what a script that is
    started again does before it restores."""
    run = new()
    with unsteered(root, run) as ckpt:
        train(ckpt, run, at, change)
        expected = run.everything()
    assert holdfast.steps(root) == [1, at]
    run = new()
    again(run)
    with unsteered(root, run) as ckpt:
        assert ckpt.restore() == UNTIL
        check_equal(run.everything(), expected)


def halve(run: Run) -> None:
    with torch.no_grad():
        run.model.last.weight.mul_(0.5)


# -- weights --------------------------------------------------------------------------------------


def test_weights_written_before_the_first_record(root: Path) -> None:  # noqa: F811
    """The ranks plan what records hold when the first begins: what was written since the full save is no
    part of that."""
    check_takes_a_full_save(root, halve, at=2)


@pytest.mark.parametrize("way", ["data", "numpy", "pointer"])
def test_weights_written_by_ways_that_are_not_counted(root: Path, way: str) -> None:  # noqa: F811
    def halve_unseen(run: Run) -> None:
        weight = run.model.last.weight
        if way == "data":
            weight.data.mul_(0.5)
        elif way == "numpy":
            weight.detach().numpy()[:] *= 0.5
        else:
            size = weight.numel()
            values = (ctypes.c_float * size).from_address(weight.data_ptr())
            values[:] = [0.5 * value for value in values]

    check_takes_a_full_save(root, halve_unseen)


def test_weights_written_after_a_restart(root: Path) -> None:  # noqa: F811
    """Such as a new head."""
    run = Plain()
    with unsteered(root, run) as ckpt:
        for number in (1, 2, 3):
            run.step(number)
            ckpt.step(number)
    run = Plain()
    with unsteered(root, run) as ckpt:
        assert ckpt.restore() == 3
        train(ckpt, run, 4, halve, begin=3)
        expected = run.everything()
    run = Plain()
    with unsteered(root, run) as ckpt:
        assert ckpt.restore() == UNTIL
        check_equal(run.everything(), expected)


def test_weights_that_are_always_written_before_a_step(root: Path) -> None:  # noqa: F811
    def train_all() -> None:
        for number in range(1, 9):
            halve(run)
            run.step(number)
            ckpt.step(number)

    run = Plain()
    ckpt = unsteered(root, run)
    with pytest.raises(UsageError, match=r"outside optimizer.step"):
        train_all()
    ckpt.close()


def head(seed: int) -> Run:
    """A training with a head that the script fills in otherwise whenever it is started."""
    run = Plain()
    grow(run)
    nn.init.constant_(run.model.more.weight, seed)
    return run


def test_weights_that_a_restart_leaves_as_they_are(root: Path) -> None:  # noqa: F811
    """The full save that was restored lacks the head: no records lead on from it."""
    run = Plain()
    with unsteered(root, run) as ckpt:
        for number in (1, 2, 3):
            run.step(number)
            ckpt.step(number)
    run = head(1)
    with unsteered(root, run) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("ignore", holdfast.HoldfastWarning)  # of the head
        for _ in range(2):  # and back again
            assert ckpt.restore(3, strict=False) == 3
            train(ckpt, run, 0, halve, begin=3)
        expected = run.everything()
    run = head(2)
    with unsteered(root, run) as ckpt:
        assert ckpt.restore(strict=False) == UNTIL  # which has all
        check_equal(run.everything(), expected)
        run.step(UNTIL + 1)
        ckpt.step(UNTIL + 1)
    assert holdfast.steps(root) == [1, 4]


@pytest.mark.parametrize("width", [16, 300], ids=["small", "large"])
def test_weights_that_lie_elsewhere(root: Path, width: int) -> None:  # noqa: F811
    """`p.data = ...` is no write that torch counts."""

    class Wide(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(width, width)
            self.state["wide"] = self.wide
            self.optim.add_param_group({"params": list(self.wide.parameters())})
            self.sched.base_lrs.append(0.01)

        def step(self, number: int) -> None:
            self.wide(torch.randn(2, width)).square().mean().backward()
            super().step(number)
            self.wide.zero_grad()

        def everything(self) -> dict[str, Any]:
            return super().everything() | {"wide": self.wide.weight.clone()}

    def replace(run: Run) -> None:
        run.wide.weight.data = run.wide.weight.data * 0.5  # type: ignore[attr-defined]

    check_takes_a_full_save(root, replace, new=Wide)


def test_a_model_of_another_dtype(root: Path) -> None:  # noqa: F811
    """Places in records are of the old one."""

    def convert(run: Run) -> None:
        run.dtype = torch.bfloat16
        run.model.to(torch.bfloat16)

    check_takes_a_full_save(root, convert, convert, new=lambda: Plain(OPTIMIZERS["sgd"]))


def test_an_error_that_nobody_foresaw(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """It ends the records, aloud, and not the training."""
    gradients = RecordCapture.copy_gradients

    def failing(*args: Any) -> None:
        if run.told["seen"] == 8 * 3:
            raise RuntimeError("no such kernel")
        gradients(*args)

    monkeypatch.setattr(RecordCapture, "copy_gradients", failing)
    run = Plain()
    with (
        pytest.warns(holdfast.HoldfastWarning, match="records end: .*no such kernel"),
        unsteered(root, run, on_error="warn") as ckpt,
    ):
        train(ckpt, run, 0, halve)
    again = Plain()
    with unsteered(root, again) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("error", holdfast.HoldfastWarning)
        assert ckpt.restore() == 3


@pytest.mark.parametrize("at", [2, 5])
def test_what_nobody_trains_and_lies_elsewhere(root: Path, at: int) -> None:  # noqa: F811
    """It is large, and what changes in it is little."""

    class Beside(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.beside = nn.Linear(600, 600).requires_grad_(False)
            self.state["beside"] = self.beside

        def everything(self) -> dict[str, Any]:
            return super().everything() | {"beside": self.beside.weight.clone()}

    def change(run: Run) -> None:
        weight = run.beside.weight  # type: ignore[attr-defined]
        new = weight.data.clone()
        new.view(-1)[1] = 9.0
        weight.data = new

    check_takes_a_full_save(root, change, at=at, new=Beside)


class Adversarial(Run):
    """Two models, of which the first is clamped between the steps of the two optimizers."""

    def __init__(self, at: int, watched: bool) -> None:
        super().__init__(OPTIMIZERS["sgd"])
        del self.model.large
        self.at = at
        self.other = nn.Linear(6, 6)
        self.optim_other = torch.optim.SGD(self.other.parameters(), lr=0.1)
        if watched:
            self.optim_other.register_step_post_hook(lambda *_: None)
        self.state |= {"other": self.other, "optim_other": self.optim_other}

    def step(self, number: int) -> None:
        super().step(number)
        if number == self.at:
            halve(self)
        self.optim_other.zero_grad()
        self.other(torch.randn(8, 6)).square().mean().backward()
        self.optim_other.step()

    def everything(self) -> dict[str, Any]:
        return super().everything() | {"other": self.other.weight.clone()}


@pytest.mark.parametrize("watched", [False, True])
def test_weights_written_between_the_steps_of_two_optimizers(root: Path, watched: bool) -> None:  # noqa: F811
    """Also where the second optimizer may read other weights than its own, as a hook after its step may."""
    check_takes_a_full_save(root, lambda _: None, new=lambda: Adversarial(5, watched))


# -- states ---------------------------------------------------------------------------------------


def empty(run: Run) -> None:
    for states in run.optim.state.values():
        states["exp_avg"].zero_()


def clear(run: Run) -> None:
    run.optim.state.clear()


def load(run: Run) -> None:
    old = copy.deepcopy(run.optim.state_dict())
    for states in old["state"].values():
        states["exp_avg_sq"].mul_(2)
    run.optim.load_state_dict(old)


def replace_one(run: Run) -> None:
    """By one that may get the place of the one before, and its number."""
    states = run.optim.state[run.model.last.weight]
    shape = states.pop("exp_avg").shape
    states["exp_avg"] = torch.zeros(shape)


def move_one(run: Run) -> None:
    states = run.optim.state[run.model.last.weight]
    states["exp_avg"].data = states["exp_avg"].data * 0.5


@pytest.mark.soak_except("2-empty", "2-load", "5-clear", "5-replace_one", "5-move_one")
@pytest.mark.parametrize("change", [empty, clear, load, replace_one, move_one])
@pytest.mark.parametrize("at", [2, 5])
def test_states_that_somebody_else_writes(root: Path, change: Change, at: int) -> None:  # noqa: F811
    check_takes_a_full_save(root, change, at=at)


class Counting(torch.optim.SGD):
    """With a state that is a number, and one in a list."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    states = self.state[p]
                    states["count"] = states.get("count", 0) + 1
                    states.setdefault("sums", [0.0])[0] += 0.5
                    p.grad.div_(states["count"]).mul_(1 + states["sums"][0])
        return super().step(closure)


@pytest.mark.parametrize("key", ["count", "sums"])
def test_states_that_are_no_tensors(root: Path, key: str) -> None:  # noqa: F811
    def change(run: Run) -> None:
        states = run.optim.state[run.model.last.weight]
        if key == "count":
            states["count"] = 1
        else:
            states["sums"][0] = 7.0

    check_takes_a_full_save(root, change, new=lambda: Plain(lambda p: Counting(p, lr=0.1)))


# -- other parameters, other optimizers -----------------------------------------------------------


def grow(run: Run) -> None:
    """A module more, and a group of its parameters."""
    torch.manual_seed(9)
    run.model.more = nn.Linear(2, 2)
    run.model.register_forward_hook(lambda model, _, y: y + model.more(y))
    run.optim.add_param_group({"params": list(run.model.more.parameters())})
    run.sched.base_lrs.append(0.01)


def put_anew(run: Run) -> None:
    """A module, and in the optimizer its parameters."""
    torch.manual_seed(9)
    run.model.last = nn.Linear(16, 2, bias=False)
    run.optim.param_groups[0]["params"] = list(run.model.parameters())


def write_and_grow(run: Run) -> None:
    with torch.no_grad():
        run.model.first.weight.mul_(0.5)
    grow(run)


@pytest.mark.parametrize("at", [2, 5])
@pytest.mark.parametrize(
    ("change", "new", "again"),
    [(grow, Plain, grow), (write_and_grow, Plain, grow), (put_anew, Plain, lambda _: None)],
)
def test_an_optimizer_with_other_parameters(
    root: Path,  # noqa: F811
    change: Change,
    new: Callable[[], Run],
    again: Change,
    at: int,
) -> None:
    """The full save before does not have them."""
    check_takes_a_full_save(root, change, again, at, new)


@pytest.mark.parametrize("at", [2, 5])
@pytest.mark.parametrize("model", [False, True], ids=["optimizer", "model and optimizer"])
def test_another_optimizer_in_the_state(root: Path, model: bool, at: int) -> None:  # noqa: F811
    """Records follow it: a full save, and its steps are recorded."""

    def change(run: Run) -> None:
        if model:
            run.model = copy.deepcopy(run.model)
            halve(run)
        run.optim = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
        run.sched = torch.optim.lr_scheduler.ExponentialLR(run.optim, 0.8)
        run.state |= {"model": run.model, "optim": run.optim, "sched": run.sched}

    check_takes_a_full_save(root, change, change, at)


def test_optimizers_that_are_replaced_at_every_step(root: Path) -> None:  # noqa: F811
    """Records end with an error after more than three of these steps in a row; none is missing."""
    run = Plain()
    ckpt = unsteered(root, run, on_error="warn")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", holdfast.HoldfastWarning)
        for number in range(1, 9):
            run.optim = torch.optim.SGD(run.model.parameters(), lr=0.1)
            run.state["optim"] = run.optim
            run.step(number)
            ckpt.step(number)
            ckpt.wait()
    texts = [str(one.message) for one in told]
    (text,) = [t for t in texts if "at every step, which no record can hold" in t]
    assert "records end: optimizers of the state are replaced" in text
    ckpt.close()
    assert holdfast.steps(root) == [1, 2, 3, 4]


def test_gradients_that_no_optimizer_takes(root: Path) -> None:  # noqa: F811
    """A full step of plain SGD does not tell which parameters were trained; its records do."""
    run = Plain(OPTIMIZERS["sgd"])
    with unsteered(root, run) as ckpt:
        train(ckpt, run, 0, halve)
    fewer = Plain(lambda p: torch.optim.SGD(p[:4], lr=0.1))
    with (
        unsteered(root, fewer) as ckpt,
        pytest.raises(
            holdfast.errors.StateMismatch, match=r"gradients or values of optim\.last\.weight"
        ),
    ):
        ckpt.restore()
    whole = {k: v.clone() for k, v in run.model.state_dict().items()}
    with unsteered(root, fewer) as ckpt:
        assert ckpt.restore(strict=False) == UNTIL
    assert torch.equal(fewer.model.first.weight, whole["first.weight"])
    assert not torch.equal(fewer.model.last.weight, whole["last.weight"])


# -- steps that are not seen ----------------------------------------------------------------------


def test_steps_that_no_hook_tells_of(root: Path) -> None:  # noqa: F811
    """A graph that makes the whole step of a training calls none.  The user is told, once."""
    run = Plain()
    with (
        warnings.catch_warnings(record=True) as told,
        unsteered(root, run) as ckpt,
    ):
        warnings.simplefilter("always", holdfast.HoldfastWarning)
        for number in range(1, 62):
            if number in (1, 2, 3, 30):
                run.step(number)
            ckpt.step(number)
            if number == 22:
                assert not told
    texts = [str(w.message) for w in told if issubclass(w.category, holdfast.HoldfastWarning)]
    assert len(texts) == 1 and "20 steps without a step of an optimizer" in texts[0]


# -- several ranks --------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.soak_except("growing")
@pytest.mark.parametrize("case", ["table", "growing"])
def test_what_one_rank_alone_has(lives: Lives, case: str) -> None:
    for life in ("dies", "again"):
        told = lives.live(
            nodes=[0, 0], case=f"tiers.records.watched_cases:{case}_{life}", grace_s=20
        )
        assert [one.status for one in told] == [-9 if life == "dies" else 0] * 2, lives.errors()


@pytest.mark.distributed
def test_a_last_step_in_no_record_is_told_at_close(lives: Lives) -> None:
    told = lives.live(nodes=[0, 0], case="tiers.records.watched_cases:averaged_closes", grace_s=20)
    assert [one.status for one in told] == [0, 0], lives.errors()


@pytest.mark.distributed
@pytest.mark.soak_except("saved_early")
@pytest.mark.parametrize("case", ["saved_early", "left_as_it_is"])
def test_what_is_no_base(lives: Lives, case: str) -> None:
    told = lives.live(nodes=[0, 0], case=f"tiers.records.watched_cases:{case}", grace_s=20)
    assert [one.status for one in told] == [0, 0], lives.errors()


class Averaged(Plain):
    """With an average of the weights, which is recorded whole as soon as it is known that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Linear(600, 600).requires_grad_(False)
        self.state["average"] = self.average  # type: ignore[assignment]

    def step(self, number: int) -> None:
        super().step(number)
        with torch.no_grad():
            self.average.weight += number


def test_what_changed_before_a_restart_is_recorded_at_once(root: Path) -> None:  # noqa: F811
    """No full save is needed to learn that it changes."""
    run = Averaged()
    with unsteered(root, run) as ckpt:
        train(ckpt, run, 0, lambda _: None)
    before = holdfast.steps(root)
    run = Averaged()
    with unsteered(root, run) as ckpt:
        assert ckpt.restore() == UNTIL
        run.step(UNTIL + 1)
        ckpt.step(UNTIL + 1)
        expected = run.everything() | {"average": run.average.weight.clone()}
    assert holdfast.steps(root) == before
    run = Averaged()
    with unsteered(root, run) as ckpt:
        assert ckpt.restore() == UNTIL + 1
        check_equal(run.everything() | {"average": run.average.weight.clone()}, expected)


class EachByItself(Plain):
    """An optimizer for each parameter, which steps while the backward pass runs."""

    def __init__(self) -> None:
        super().__init__()
        self.state.pop("sched")
        self.many = {p: torch.optim.AdamW([p], lr=0.01) for p in self.model.parameters()}
        self.state |= {f"optim{i}": one for i, one in enumerate(self.many.values())}
        self.state.pop("optim")
        for p in self.model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.one)

    def one(self, p: torch.Tensor) -> None:
        self.many[p].step()  # type: ignore[index]
        p.grad = None

    def step(self, number: int) -> None:
        self.model(torch.randn(8, 6), number).square().mean().backward()

    def everything(self) -> dict[str, Any]:
        states = [copy.deepcopy(dict(one.state)) for one in self.many.values()]
        found = super().everything()
        return found | {f"{i}": [s for s in state.values()] for i, state in enumerate(states)}


def test_an_optimizer_for_each_parameter(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """What a step looks at grows as the parameters do, not as their square."""
    looks, look = [], Watch._look

    def counted(watch: Watch, name: str) -> Any:
        looks.append(name)
        return look(watch, name)

    monkeypatch.setattr(Watch, "_look", counted)
    run = EachByItself()
    with unsteered(root, run) as ckpt:
        for number in range(1, UNTIL):
            run.step(number)
            ckpt.step(number)
            ckpt.wait()
        looks.clear()
        run.step(UNTIL)
        ckpt.step(UNTIL)
        assert len(run.many) < len(looks) <= 4 * len(run.many)
        expected = run.everything()
    assert holdfast.steps(root) == [1]
    run = EachByItself()
    with unsteered(root, run) as ckpt:
        assert ckpt.restore() == UNTIL
        check_equal(run.everything(), expected)


def test_a_restart_without_records_tells_of_them(root: Path) -> None:  # noqa: F811
    run = Plain()
    with unsteered(root, run) as ckpt:
        train(ckpt, run, 0, lambda _: None)
    with (
        holdfast.Checkpointer(root, Plain().state) as ckpt,
        pytest.warns(holdfast.HoldfastWarning, match="newer records than step 1, up to step 7"),
    ):
        assert ckpt.restore() == 1
