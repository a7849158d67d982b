"""Shards of Megatron-Core's weights: a rank's tensor, or a flat part of it, as boxes of the whole one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.layout import Box, tiles
from holdfast.live.state.megatron_shards import TensorShard
from holdfast.live.state.placed import Placed, parts_in
from holdfast.sources import Master

ROWS = 4


def gated(rank: int, ranks: int, width: int) -> TensorShard:
    """A gate and a value of ROWS rows on each rank; in the whole, all gates come first."""
    halves = [
        (Box((h * ROWS, 0), ((h + 1) * ROWS, width)), ((h * ranks + rank) * ROWS, 0))
        for h in (0, 1)
    ]
    return TensorShard("w", (2 * ROWS * ranks, width), (2 * ROWS, width), tuple(halves))


def placed(shard: TensorShard, values: torch.Tensor) -> tuple[Placed, ...]:
    """The parts that a weight has as a checkpoint describes them."""
    return parts_in(Master(values, shape=shard.shape, cut=shard.parts), values, shard.name)


@given(st.integers(1, 3), st.integers(1, 5), st.lists(st.integers(0, 40), max_size=4))
def test_flat_parts_make_up_the_whole(ranks: int, width: int, cuts: list[int]) -> None:
    whole = torch.arange(2 * ROWS * ranks * width).view(-1, width)
    boxes = []
    for rank in range(ranks):
        shard = gated(rank, ranks, width)
        local = torch.cat([whole[a : a + ROWS] for _, (a, _) in shard.pieces])
        ends = [0, *sorted(min(c, local.numel()) for c in cuts), local.numel()]
        for start, stop in zip(ends, ends[1:]):
            flat = local.reshape(-1)[start:stop].clone()
            for box, values in shard.flat_parts(flat, start, stop):
                assert torch.equal(values, whole[box.within((0, 0))])
                boxes.append(box)
        for box, values in shard.parts(local):
            assert torch.equal(values, whole[box.within((0, 0))])
    assert tiles(boxes, tuple(whole.shape))


def test_parts_are_views() -> None:
    shard, flat = gated(1, 2, 3), torch.zeros(24)
    for _, values in shard.flat_parts(flat[5:20], 5, 20):
        values.fill_(1)
    assert flat.sum() == 15 and not flat[:5].any() and not flat[20:].any()


def test_a_number_and_a_whole_tensor() -> None:
    number = TensorShard("n", (), (), ((Box((), ()), ()),))
    (part,) = placed(number, torch.tensor(3.0))
    assert part.local == 3 and part.cuts == ()
    square = TensorShard("w", (2, 2), (2, 2), ((Box((0, 0), (2, 2)), (0, 0)),))
    (part,) = placed(square, torch.ones(2, 2))
    assert part.cuts == ()
