"""A twin of an optimizer makes the same steps, bit for bit, with the optimizer states of another rank.

The optimizers are torch's, inside its ZeroRedundancyOptimizer on one rank, whose own states the twin is to
arrive at.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from holdfast.errors import Corrupt, HoldfastError, SegmentLost, UsageError
from holdfast.live.state import blockwise
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.protecting import Protector
from holdfast.tiers.memory.recompute import recomputed_states
from holdfast.tiers.memory.twin import MOST_AHEAD, ParamPart, Twin


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(kind: Any, **options: Any) -> tuple[torch.nn.Module, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 33), torch.nn.Linear(33, 40))
    model[1].bias.requires_grad_(False)
    groups = [
        {"params": list(model[0].parameters())},
        {"params": list(model[1].parameters()), "lr": 0.3},
    ]
    optimizer = ZeroRedundancyOptimizer(groups, kind, lr=0.01, **options)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4
    return model, optimizer


def gradients(model: torch.nn.Module, step: int) -> None:
    """One parameter has none at some steps, one never."""
    torch.manual_seed(step)
    model(torch.randn(8, 40)).square().mean().backward()
    if step in (0, 3):
        model[0].bias.grad = None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.NAdam, {}),
    ],
)
@pytest.mark.parametrize("block_bytes", [1000, blockwise.CACHED_BYTES], ids=["blocks", "whole"])
def test_the_same_steps(
    kind: Any, options: dict[str, Any], block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "CACHED_BYTES", block_bytes)
    model, optimizer = made(kind, **options)
    parts = [ParamPart(name, p) for name, p in model.named_parameters()]
    twin = Twin(optimizer, parts)
    twin.copy_weights()
    in_blocks = []
    for step in range(6):
        gradients(model, step)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        taken = twin.take()
        assert taken is not None
        optimizer.step()
        optimizer.zero_grad()
        twin.apply(taken)
        in_blocks.append(twin._blockwise.is_possible())
        twin.give_back(taken)
    assert any(in_blocks) == (block_bytes == 1000 and not options.get("fused"))
    assert all(optimizer.optim.state[p] for p in model.parameters() if p.requires_grad)
    for part, mine, redone in zip(parts, twin.weights, twin.states()):
        assert torch.equal(mine, part.param), part.name
        for state, value in optimizer.optim.state[part.param].items():
            assert torch.equal(redone.pop(state), value), (part.name, state)
        assert not redone


def test_gradients_that_wait_are_bounded() -> None:
    model, optimizer = made(torch.optim.SGD)
    twin = Twin(optimizer, [ParamPart("0.weight", model[0].weight)])
    gradients(model, 1)
    taken = [twin.take() for _ in range(MOST_AHEAD + 1)]
    assert taken[-1] is None
    assert None not in taken[:-1]
    twin.give_back(taken[0])
    assert twin.take() is not None


@pytest.mark.parametrize(
    ("error", "ended"), [(Corrupt("differs"), 1), (SegmentLost("a peer is gone"), 0)]
)
def test_three_differences_end_it_and_three_failures_do_not(
    error: HoldfastError, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent says whether what was redone is other than what was saved, or could not be compared."""
    model, optimizer = made(torch.optim.SGD)
    recomputed = recomputed_states({"model": model, "optim": optimizer})
    ends: list[str] = []
    monkeypatch.setattr(recomputed.twins, "end", ends.append)

    def ask(*_: Any) -> None:
        raise error

    tier = SimpleNamespace(agent=SimpleNamespace(client=SimpleNamespace(ask=ask)))
    rank: Any = SimpleNamespace(
        _tier=tier, _guard=SimpleNamespace(seen=()), _current_recomputed=lambda: recomputed
    )
    op: Any = SimpleNamespace(step=1)
    order = w.Protect("j", "", "a", 0, (), 1, 1, 0, 0)
    for _ in range(3):
        assert not Protector._finish_own(rank, op, order, (), (), w.Lease("guard", 0))
    assert len(ends) == ended


def test_other_optimizers_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    with pytest.raises(UsageError, match="ZeroRedundancyOptimizer under DDP") as failed:
        recomputed_states(state)
    assert failed.value.hint == "choose copy or parity"
