"""Meshes: coordinates, and the common mesh of axes found one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.layout.strategies import meshes
from holdfast.errors import LayoutError
from holdfast.layout import Axis, Mesh, common_mesh, part_of, parts_of


@given(meshes())
def test_ranks_are_row_major_over_the_axes(mesh) -> None:
    sizes = [n for _, n in mesh.axes]
    for rank in range(mesh.world):
        coords = [mesh.coordinate(rank, name) for name, _ in mesh.axes]
        assert coords == [int(i) for i in np.unravel_index(rank, sizes)]


@settings(deadline=None)
@given(meshes(most_axes=4), st.data())
def test_common_mesh_finds_runs_of_axes_again(mesh, data) -> None:
    """Any run of neighbouring axes, given as (stride, size), is the same cut over the common mesh."""
    names = [name for name, _ in mesh.axes]
    axes = {}
    for _ in range(data.draw(st.integers(0, 4)) if names else 0):
        i = data.draw(st.integers(0, len(names) - 1))
        j = data.draw(st.integers(i, len(names) - 1))
        run = tuple(names[i : j + 1])
        axes[Axis(mesh.strides[names[j]], parts_of(mesh, run))] = run
    found, where = common_mesh(axes, mesh.world)
    assert found.world == mesh.world
    for axis, run in axes.items():
        if axis.size > 1:
            for rank in range(mesh.world):
                assert part_of(found, rank, where[axis]) == part_of(mesh, rank, run)


def test_common_mesh_keeps_names() -> None:
    mesh, where = common_mesh({Axis(1, 8), Axis(1, 4, "tp")}, world=8)
    assert mesh == Mesh((("axis0", 2), ("tp", 4)))
    assert where[Axis(1, 8)] == ("axis0", "tp")


@pytest.mark.parametrize("axes", [{Axis(1, 4), Axis(1, 6)}, {Axis(3, 2)}, {Axis(1, 5)}])
def test_axes_that_form_no_mesh_are_refused(axes) -> None:
    with pytest.raises(LayoutError):
        common_mesh(axes, 12 if Axis(3, 2) not in axes else 4)
