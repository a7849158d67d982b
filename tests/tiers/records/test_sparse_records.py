"""Gradients that were declared sparse: records hold what is not zero, exactly, or all of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.core.codec.sparse import SPARSE_HEAD_BYTES
from holdfast.core.group import meet
from holdfast.errors import UsageError
from holdfast.live.gradient_compression.topk import largest
from holdfast.live.state.arrays import raw_array
from holdfast.store import open_store
from holdfast.tiers.records.log import open_log
from holdfast.tiers.records.optimizers import NamedOptimizer
from holdfast.tiers.records.packing import BLOCK, PACKED, nonzero, split_off_sparse
from holdfast.tiers.records.places import RecordLayout
from holdfast.tiers.records.planning import agree, record_tensors

from .test_exact import (
    OPTIMIZERS,
    STEPS,
    Run,
    check_equal,
    checkpointer,
    forget,
    recorded,
    root,  # noqa: F401
)

pytestmark = pytest.mark.slow


def few(grad: torch.Tensor) -> torch.Tensor:
    """The larger third of a gradient."""
    flat = grad.reshape(-1)
    chosen = flat.abs().topk(-(-len(flat) // 3)).indices
    return torch.zeros_like(flat).index_copy_(0, chosen, flat[chosen]).view_as(grad)


class Sparse(Run):
    """All its gradients are two thirds zero, but at the steps `noisy`."""

    noisy: tuple[int, ...] = ()

    def __init__(self, name: str = "adamw", dtype: torch.dtype = torch.float32) -> None:
        super().__init__(OPTIMIZERS[name], dtype)
        self.number = 0
        for p in self.model.parameters():
            if p.requires_grad:
                p.register_hook(self._made_sparse)
        holdfast.compression.sparse(self.model.parameters(), at_most=0.5)

    def _made_sparse(self, grad: torch.Tensor) -> torch.Tensor:
        return grad + 1e-3 if self.number in self.noisy else few(grad)

    def step(self, number: int) -> None:
        self.number = number
        super().step(number)


def check_replayed(root: Path, new: Callable[[], Run], **options: Any) -> None:  # noqa: F811
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gradients of")
        at_the_end = recorded(root, new, **options)
    forget(root, 8)
    run = new()
    with checkpointer(root, run) as ckpt:
        assert ckpt.restore() == STEPS
        check_equal(run.everything(), at_the_end)


def packed_bytes(root: Path) -> dict[int, int]:  # noqa: F811
    """By step, of the tensors that hold what is not zero."""
    found = {}
    log = open_log(open_store(str(root)))[0]
    for step in log.steps.values():
        for t in log.open(step, {}, {}).manifest.tensors:
            if t.state == PACKED:
                found[step.step] = found.get(step.step, 0) + t.shape[0]
    return found


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "adamw-fused", "adamw-two-groups"])
def test_every_step_is_exact(root: Path, name: str) -> None:  # noqa: F811
    check_replayed(root, lambda: Sparse(name), batch=2)
    assert set(packed_bytes(root)) == set(range(2, STEPS + 1))


def test_two_optimizers_of_which_one_rests(root: Path) -> None:  # noqa: F811
    class Two(Sparse):
        def __init__(self) -> None:
            super().__init__()
            params = list(self.model.parameters())
            self.optim = torch.optim.SGD(params[2:], lr=0.1, momentum=0.9)
            self.sched = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.8)
            self.other = torch.optim.AdamW(params[:2], lr=0.01)
            self.state |= {"optim": self.optim, "sched": self.sched, "other": self.other}

        def step(self, number: int) -> None:
            super().step(number)
            if number % 2:
                self.other.step()
            self.other.zero_grad()

        def everything(self) -> dict[str, Any]:
            states = [self.other.state.get(p, {}) for p in self.model.parameters()]
            return super().everything() | {"other": copy.deepcopy(states)}

    check_replayed(root, Two, batch=2)


def test_bfloat16(root: Path) -> None:  # noqa: F811
    check_replayed(root, lambda: Sparse(dtype=torch.bfloat16))


def test_gradients_that_are_not_as_sparse_as_was_said(root: Path) -> None:  # noqa: F811
    """That step is saved in full, and later records have them whole; the user is told."""

    class Noisy(Sparse):
        noisy = (6,)

    with pytest.warns(
        holdfast.HoldfastWarning, match=r"and \d more have more nonzero elements than declared"
    ):
        at_the_end = recorded(root, Noisy)
    packed = packed_bytes(root)
    assert min(packed[step] for step in (2, 3, 4, 5)) > 10 * SPARSE_HEAD_BYTES
    assert max(packed[step] for step in (7, 8, 9)) == SPARSE_HEAD_BYTES  # of those without gradient
    assert 6 in holdfast.steps(str(root))
    forget(root, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gradients of")
        run = Noisy()
        with checkpointer(root, run) as ckpt:
            assert ckpt.restore() == STEPS
            check_equal(run.everything(), at_the_end)


def test_a_negative_zero_is_something(root: Path) -> None:  # noqa: F811
    """A mask that multiplies leaves them; they are not made zero in a replay."""
    p = nn.Parameter(torch.zeros(4000))
    holdfast.compression.sparse([p], at_most=0.01)

    class Masked(Run):
        def __init__(self) -> None:
            super().__init__(lambda _: torch.optim.SGD([p], lr=0.1, momentum=0.9))
            self.model.own = p

        def step(self, number: int) -> None:
            p.grad = torch.zeros(4000)
            p.grad[number * 7] = -0.0
            p.grad[number] = 1.0
            self.optim.step()

    run = Masked()
    with torch.no_grad():
        p.zero_()
    recorded(root, lambda: run, 3)
    expected = run.optim.state[p]["momentum_buffer"].clone()
    with torch.no_grad():
        p.fill_(5)
    with checkpointer(root, Masked()) as ckpt:
        assert ckpt.restore() == 3
        found = next(iter(ckpt.state["optim"].state.values()))["momentum_buffer"]
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def layout_of(length: int) -> RecordLayout:
    """Of records with a dense gradient whose parameter has so long a name, and a sparse one."""
    dense, thin = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(40_000))
    holdfast.compression.sparse([thin], at_most=0.1)
    steps = [
        NamedOptimizer("a", torch.optim.SGD([dense], lr=0.1), [[("d" * length, dense)]]),
        NamedOptimizer("b", torch.optim.SGD([thin], lr=0.1), [[("t", thin)]]),
    ]
    live = record_tensors(steps, {"c.small": torch.arange(3, dtype=torch.uint8)})
    agreement, tensors = split_off_sparse(agree(meet(), live, None, 1), 1)
    assert [t.name for t in tensors] == ["b.t.grad"]
    return RecordLayout.of(agreement, tensors, 0, live, steps, 64)


@pytest.mark.parametrize("is_page_shorter", [False, True])
def test_gaps_are_closed(is_page_shorter: bool) -> None:
    """Also where the header of a record is a page shorter than that of the largest one."""
    used = len(layout_of(1).image.header.rstrip(b" "))
    layout = layout_of(4096 - used + 2 if is_page_shorter else 1)
    memory = memoryview(bytearray(layout.image.total_bytes))
    (piece,) = layout.grads["a"]
    memory[piece.offset : piece.offset + piece.bytes] = bytes(range(28))
    pack, at = layout.packs["b"]
    memory[at : at + 5] = b"12345"
    image = layout.seal(memory, {pack.name: 5}, b"{}")
    assert layout.image.data_start - image.data_start == 4096 * is_page_shorter
    data = memory[image.data_start : image.extras_start]
    assert bytes(data) == bytes(range(28)) + bytes(3) + b"12345"


@pytest.mark.parametrize("size", [0, 3, BLOCK - 1, BLOCK, 2 * BLOCK + 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_not_zero(size: int, dtype: torch.dtype) -> None:
    """As torch finds it, in tensors that lie in memory in any order."""
    drawn = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=drawn) * (torch.rand(size, generator=drawn) < 0.02)
    tensor = values.to(dtype).abs().view(-1, 1).expand(-1, 2)[:, 0]
    where, bits = nonzero(tensor)
    assert np.array_equal(where, tensor.nonzero().squeeze(1).numpy())
    assert np.array_equal(bits, raw_array(tensor[tensor != 0]))


@pytest.mark.parametrize("size", [5, 70_000, 300_000])
def test_largest(size: int) -> None:
    """Those that torch.topk over all finds; what is no number is larger than all."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(1))
    k = max(1, size // 100)
    expected = torch.topk(values.abs(), k).values
    found = values[largest(values, k)].abs().sort(descending=True).values
    assert torch.equal(found, expected)
    values[3] = float("nan")
    assert bool(values[largest(values, k)].isnan().any())
    assert len(largest(torch.zeros(size), k)) == k
    rising = torch.from_numpy(np.arange(size, dtype=np.float32))
    rising[::64] = 1e9  # all that the sample sees is large
    assert rising[largest(rising, k)].min() >= torch.topk(rising, k).values.min()


def test_what_makes_no_sense_is_refused() -> None:
    p = nn.Parameter(torch.zeros(3))
    for part in (0.0, 1.5):
        with pytest.raises(UsageError, match="at_most"):
            holdfast.compression.sparse([p], at_most=part)
        with pytest.raises(UsageError, match="ratio"):
            holdfast.compression.TopK(part)
    with pytest.raises(UsageError, match="DistributedDataParallel, not Linear"):
        holdfast.compression.TopK().register(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no model yet"):
        holdfast.compression.TopK().load_state_dict({"ranks": 0, "residual": {}})
