"""A tier is three methods and a thread: a toy one, which keeps images in a dict."""

from __future__ import annotations

import pytest
import torch
from safetensors.numpy import load
from torch import nn

from holdfast.base.threads import Worker
from holdfast.core.group import meet
from holdfast.errors import HoldfastError
from holdfast.live.collecting import RunState
from holdfast.live.saving.operation import Draft, Request, SaveOperation
from holdfast.live.saving.saver import Saver
from holdfast.live.state.snapshot import Buffer, PrivateBuffer


class Toy:
    """Keeps the image of each step."""

    kind = "toy"

    def __init__(self, most_bytes: int = 1 << 20) -> None:
        self.worker = Worker("toy")
        self.images: dict[int, bytes] = {}
        self.num_released = 0
        self._most_bytes = most_bytes
        self._buffer = PrivateBuffer()

    def take(self, op: SaveOperation) -> Buffer:
        return self._buffer

    def keep(self, op: SaveOperation, draft: Draft) -> None:
        draft.filling.conclude()
        assert draft.image is not None
        if draft.image.total_bytes > self._most_bytes:
            raise HoldfastError("the toy is full")
        self.images[op.step] = bytes(draft.buffer.view[: draft.image.total_bytes])
        op.release()
        op.end()

    def release(self, op: SaveOperation) -> None:
        self.num_released += 1


def begun(saver: Saver, tier: Toy, state: RunState, step: int) -> SaveOperation:
    op = saver.operation(tier, Request(step))
    saver.begin(op, state.collect)
    return op


def test_three_methods_are_a_tier() -> None:
    """An image is a safetensors file; the optimizer's step waits for it."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, saver, tier = RunState({"model": model}, {}), Saver(meet(60.0, "test")), Toy()
    expected = {}
    for step in (1, 2, 3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        expected[step] = model.weight.detach().clone()
        begun(saver, tier, state, step).save.wait(300)
    saver.close()
    for step, weight in expected.items():
        assert torch.equal(torch.from_numpy(load(tier.images[step])["model.weight"]), weight)
    assert tier.num_released == 3


def test_what_a_tier_raises_ends_the_operation() -> None:
    state, saver = RunState({"model": nn.Linear(4, 3)}, {}), Saver(meet(60.0, "test"))
    tier = Toy(most_bytes=10)
    op = begun(saver, tier, state, 1)
    with pytest.raises(HoldfastError, match="the toy is full") as failed:
        op.save.wait(300)
    assert failed.value.step == 1
    assert tier.num_released == 1
    saver.close()
