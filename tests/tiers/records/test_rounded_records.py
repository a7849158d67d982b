"""Gradients that have values of a smaller dtype alone: records hold them in that, exactly, or whole."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.errors import UsageError
from holdfast.live.gradient_compression.marks import HALVES
from holdfast.store import open_store
from holdfast.tiers.records.log import open_log
from holdfast.tiers.records.offline import replay_to
from holdfast.tiers.records.places import MANY, round_into
from tiers.memory.zygote import Lives

from .test_exact import OPTIMIZERS, STEPS, Run, check_equal, checkpointer, forget, recorded, root  # noqa: F401

pytestmark = pytest.mark.slow


class Rounded(Run):
    """All its gradients have values of a smaller dtype, but at the steps `noisy`."""

    noisy: tuple[int, ...] = ()

    def __init__(self, name: str = "adamw", to: torch.dtype = torch.bfloat16) -> None:
        super().__init__(OPTIMIZERS[name])
        self.clip = 0
        self.number = 0
        self.to = to
        for p in self.model.parameters():
            if p.requires_grad:
                p.register_hook(self._rounded)
        holdfast.compression.rounded(self.model.parameters(), to)

    def _rounded(self, grad: torch.Tensor) -> torch.Tensor:
        return grad if self.number in self.noisy else grad.to(self.to).float()

    def step(self, number: int) -> None:
        self.number = number
        super().step(number)


def dtypes(root: Path) -> dict[int, set[str]]:  # noqa: F811
    """By step, those of the recorded gradients."""
    log = open_log(open_store(str(root)))[0]
    return {
        step.step: {
            t.dtype for t in log.open(step, {}, {}).manifest.tensors if t.name.endswith(".grad")
        }
        for step in log.steps.values()
    }


@pytest.mark.parametrize("to", HALVES, ids=str)
@pytest.mark.parametrize("name", ["momentum", "adamw", "adamw-fused", "adamw-two-groups"])
def test_every_step_is_exact(root: Path, name: str, to: torch.dtype) -> None:  # noqa: F811
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gradients of")
        at_the_end = recorded(root, lambda: Rounded(name, to), batch=2)
    smaller = {str(to).removeprefix("torch.")}
    assert dtypes(root) == {step: smaller for step in range(2, STEPS + 1)}
    forget(root, 8)
    run = Rounded(name, to)
    with checkpointer(root, run) as ckpt:
        assert ckpt.restore() == STEPS
        check_equal(run.everything(), at_the_end)


def test_gradients_that_are_not_as_was_said(root: Path) -> None:  # noqa: F811
    """That step is saved in full, and later records have them whole; the user is told."""

    class Noisy(Rounded):
        noisy = (6,)

    with pytest.warns(
        holdfast.HoldfastWarning, match="and 3 more have values that bfloat16 cannot hold"
    ):
        at_the_end = recorded(root, Noisy)
    found = dtypes(root)
    assert all(found[step] == {"bfloat16"} for step in (2, 3, 4, 5))
    assert 6 not in found and 6 in holdfast.steps(str(root))
    assert all("float32" in found[step] for step in (7, 8, 9))
    forget(root, 8)
    run = Noisy()
    with checkpointer(root, run) as ckpt:
        assert ckpt.restore() == STEPS
        check_equal(run.everything(), at_the_end)


def test_one_that_is_not_tells_of_all(root: Path) -> None:  # noqa: F811
    """What clips one gradient clips all, also those that are still zero."""

    class Clipped(Rounded):
        def step(self, number: int) -> None:
            if number == 6:
                self.model.first.bias.register_hook(lambda grad: grad * 0.9)
            super().step(number)

    with pytest.warns(holdfast.HoldfastWarning, match=r"gradients of optim.first.bias have values"):
        recorded(root, Clipped)
    found = dtypes(root)
    assert found[5] == {"bfloat16"} and found[7] == {"float32"}
    assert holdfast.steps(root) == [1, 4, 6, 8]


def test_whole_records_may_be_too_large(root: Path) -> None:  # noqa: F811
    """The bound left room for four of half the size: records end, and the training does not."""

    class Large(Rounded):
        def __init__(self) -> None:
            super().__init__()
            self.model.wide = nn.Parameter(torch.zeros(50_000))
            self.optim.add_param_group({"params": [self.model.wide]})
            holdfast.compression.rounded([self.model.wide], self.to)
            self.optim.register_step_pre_hook(self._make)

        def _make(self, *_: object) -> None:
            self.model.wide.grad = self._rounded(torch.randn(50_000))

    class Noisy(Large):
        noisy = (6,)

    probe = root / "probe"
    recorded(probe, Large, 3)
    (file,) = (probe / "log").glob("*/*2-*/*.log")
    bound = 5 * file.stat().st_size
    run = Noisy()
    with (
        warnings.catch_warnings(record=True) as caught,
        holdfast.Checkpointer(
            root / "run",
            run.state,
            every=holdfast.Every(durable=3, delta=1),
            delta=holdfast.Delta(max_bytes=bound),
        ) as ckpt,
    ):
        warnings.simplefilter("always")
        for number in range(1, STEPS + 1):
            run.step(number)
            ckpt.step(number)
            ckpt.wait()
        at_the_end = run.everything()
    assert any("at least four steps must fit" in str(one.message) for one in caught)
    again = Noisy()
    with holdfast.Checkpointer(root / "run", again.state) as ckpt:
        assert ckpt.restore() == STEPS
        check_equal(again.everything(), at_the_end)


def test_replayed_without_the_script(root: Path) -> None:  # noqa: F811
    class Untold(Rounded):
        def __init__(self) -> None:
            super().__init__()
            del self.state["told"]  # its tensors are the script's own

    at_the_end = recorded(root, Untold, 7)
    state, base, _ = replay_to(open_store(str(root)), 7)
    assert base == 4
    for name, value in state["model"].state_dict().items():
        assert torch.equal(value, at_the_end[f"model.{name}"]), name


def test_what_is_sparse_too_counts_as_sparse(root: Path) -> None:  # noqa: F811
    class Both(Rounded):
        def __init__(self) -> None:
            super().__init__()
            holdfast.compression.sparse([self.model.first.weight], at_most=0.1)

        def _rounded(self, grad: torch.Tensor) -> torch.Tensor:
            if grad.shape == self.model.first.weight.shape:
                grad = grad.masked_fill(torch.arange(grad.numel()).view_as(grad) >= 5, 0)
            return super()._rounded(grad)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gradients of")
        at_the_end = recorded(root, Both)
    forget(root, 8)
    run = Both()
    with checkpointer(root, run) as ckpt:
        assert ckpt.restore() == STEPS
        check_equal(run.everything(), at_the_end)


@pytest.mark.distributed
@pytest.mark.soak_except("fsdp-bfloat16")
@pytest.mark.parametrize(("kind", "dtype"), [("fsdp", "bfloat16"), ("ddp", "float16")])
def test_gradients_that_ranks_exchange_in_it(lives: Lives, kind: str, dtype: str) -> None:
    """As torch itself rounds them: four ranks die, and two and four go on bit for bit from the last record.
    Later one rank finds something else in its shard: all of them record the whole."""
    told = lives.live(nodes=[0, 0, 0, 0], case=f"tiers.records.rounded_cases:{kind}")
    assert [one.status for one in told] == [-9] * 4, lives.errors()
    told = lives.live(nodes=[0, 0], case=f"tiers.records.rounded_cases:{kind}_elsewhere")
    assert [one.status for one in told] == [0] * 2, lives.errors()
    told = lives.live(nodes=[0, 0, 0, 0], case=f"tiers.records.rounded_cases:{kind}_again")
    assert [one.status for one in told] == [0] * 4, lives.errors()
    steps = holdfast.steps(lives.place / "root")
    found = dtypes(lives.place / "root")
    assert steps == [1, 7]  # one rank says at step 6 that it needs it
    assert found == {step: {dtype} for step in (2, 3, 4, 5)} | {8: {"float32"}}


@given(
    st.sampled_from(HALVES),
    st.lists(st.integers(0, (1 << 32) - 1), max_size=40),
    st.booleans(),
    st.booleans(),
)
def test_no_bit_is_lost_unseen(
    to: torch.dtype, drawn: list[int], is_rounded: bool, is_strided: bool
) -> None:
    """Every float32 there is: infinite, no number, subnormal, a negative zero."""
    source = torch.tensor(drawn, dtype=torch.int64).to(torch.int32).view(torch.float32)
    if is_rounded:
        source = source.to(to).float()
    if is_strided:
        source = torch.stack([source, source], 1)[:, 0]
    into = torch.empty(len(drawn), dtype=to)
    is_changed = bool(round_into(into, source))
    assert is_changed == (not torch.equal(into.float().view(torch.int32), source.view(torch.int32)))
    assert not (is_changed and is_rounded)


def test_every_part_is_looked_at() -> None:
    for at in (0, MANY - 2, MANY - 1, 2 * MANY + 5):
        source = torch.ones(2 * MANY + 6)
        into = torch.empty_like(source, dtype=torch.bfloat16)
        assert not round_into(into, source)
        source[at] = 1 + 2**-20
        assert round_into(into, source)


def test_what_makes_no_sense_is_refused() -> None:
    p = nn.Parameter(torch.zeros(3))
    with pytest.raises(UsageError, match=r"torch.int8.*must be torch.bfloat16 or torch.float16"):
        holdfast.compression.rounded([p], torch.int8)


def test_parameters_of_another_dtype_are_as_they_were(root: Path) -> None:  # noqa: F811
    def new() -> Run:
        run = Run(OPTIMIZERS["adamw"], torch.float64)
        holdfast.compression.rounded(run.model.parameters(), torch.bfloat16)
        return run

    recorded(root, new)
    assert all(found == {"float64"} for found in dtypes(root).values())
