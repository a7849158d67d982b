"""Where ranks lie in meshes made by hand, and copies of what a rank does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from holdfast.core.format.image import plan_image
from holdfast.errors import HoldfastError
from holdfast.layout import Axis, Box
from holdfast.live.saving.planning import new_plan
from holdfast.live.state.agreed import describe_tensors, merge_descriptions
from holdfast.live.state.named import Collected, LiveTensor
from holdfast.live.state.placed import Placed, mesh_axes
from holdfast.live.state.snapshot import Copies


@dataclass(eq=False)
class Mesh:
    """Ranks as a DeviceMesh has them."""

    mesh: torch.Tensor
    mesh_dim_names: tuple[str, ...] | None = None


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        ([0, 1], [Axis(1, 2)]),
        ([2, 3], [Axis(1, 2)]),
        ([1, 3], [Axis(2, 2)]),
        ([3], [Axis(1, 1)]),
        ([[0, 1], [2, 3]], [Axis(2, 2), Axis(1, 2)]),
        ([[0, 2], [1, 3]], [Axis(1, 2), Axis(2, 2)]),
        ([[4, 5, 6, 7]], [Axis(1, 1), Axis(1, 4)]),
        ([1, 2], None),
        ([2, 3, 4, 5], None),
        ([0, 1, 3], None),
        ([1, 0], None),
        ([[1, 2], [3, 4]], None),
    ],
)
def test_axes_tell_each_ranks_part_by_its_number(ranks: Any, axes: list[Axis] | None) -> None:
    assert mesh_axes(Mesh(torch.tensor(ranks))) == axes


@pytest.mark.parametrize("start", [2, 4])
def test_no_copy_is_made_of_what_a_rank_has_not(start: int) -> None:
    """Neither is it empty, nor other rows in their place."""

    def live(box: Box) -> Collected:
        local = torch.ones(box.shape)
        placed = Placed(local, (8, 3), box, None)
        return Collected(tensors={"w": LiveTensor("w", "param", placed, True, local)})

    plan = new_plan(
        merge_descriptions([describe_tensors(live(Box((0, 0), (8, 3))))], [0]), "a digest"
    )
    image = plan_image(plan.agreement.tensors, plan.placement.pieces(0))
    data = memoryview(bytearray(image.total_bytes))
    other = live(Box((start, 0), (8, 3)))
    with pytest.raises(
        HoldfastError, match=rf"'w': this rank is to write .* but has {start}:8,0:3"
    ):
        Copies.plan(image, plan.agreement.tensors, other, {}, data)
