"""Who writes which bytes: against a brute-force oracle, over random meshes and shardings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast.core.layout.pieces as pieces_module
from core.layout.strategies import boxes_in, held_by, layouts
from holdfast.core.layout.pieces import Placement, Table
from holdfast.layout import Box, Cut, Mesh, Sharding

MODERATE = settings(max_examples=60, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def small_bytes():
    """Make division inside tensors happen on small ones too."""
    before, pieces_module.MIN_SHARE_BYTES = pieces_module.MIN_SHARE_BYTES, 64
    yield
    pieces_module.MIN_SHARE_BYTES = before


def real_boxes(pieces, rows):
    """(tensor, box, offset, bytes) of each piece, without the padding."""
    columns = (pieces.tensor, pieces.start, pieces.stop, pieces.offset, pieces.bytes)
    for tensor, start, stop, offset, size in zip(*(c.tolist() for c in columns)):
        n = len(rows[tensor][1])
        yield tensor, Box(tuple(start[:n]), tuple(stop[:n])), offset, size


@MODERATE
@given(layouts())
def test_every_element_is_written_once_and_by_a_rank_that_holds_it(layout) -> None:
    mesh, rows, table = layout
    placement = Placement(mesh, table)
    written = [np.zeros(shape, int) for _, shape, _, _ in rows]
    for rank in range(mesh.world):
        end = 0
        for tensor, box, offset, size in real_boxes(placement.pieces(rank), rows):
            _, shape, itemsize, sharding = rows[tensor]
            at = box.within((0,) * len(shape))
            written[tensor][at] += 1
            assert held_by(mesh, rank, shape, sharding)[at].all()
            assert (offset, size) == (end, box.size * itemsize)
            assert offset % itemsize == 0
            end += size
        assert placement.pieces(rank).total_bytes == end
    for count in written:
        assert (count == 1).all()


@MODERATE
@given(layouts(), st.data())
def test_locate_inverts_pieces(layout, data) -> None:
    mesh, rows, table = layout
    placement = Placement(mesh, table)
    image = {
        (rank, offset): (tensor, box)
        for rank in range(mesh.world)
        for tensor, box, offset, _ in real_boxes(placement.pieces(rank), rows)
    }
    wants = data.draw(
        st.lists(
            st.integers(0, len(rows) - 1).flatmap(
                lambda i: st.tuples(st.just(i), boxes_in(rows[i][1]))
            ),
            max_size=6,
        )
    )
    width = table.shape.shape[1]
    start, stop = np.zeros((len(wants), width), int), np.ones((len(wants), width), int)
    for i, (_, box) in enumerate(wants):
        start[i, : len(box.start)], stop[i, : len(box.stop)] = box.start, box.stop
    fresh = Placement(mesh, table)
    found = fresh.locate(np.array([t for t, _ in wants], int), start, stop)
    seen = [np.zeros(rows[t][1], int) for t, _ in wants]
    for k in range(len(found.want)):
        tensor, _ = wants[found.want[k]]
        n = len(rows[tensor][1])
        piece = Box(tuple(found.piece_start[k, :n]), tuple(found.piece_stop[k, :n]))
        assert image[int(found.rank[k]), int(found.offset[k])] == (tensor, piece)
        common = Box(tuple(found.start[k, :n]), tuple(found.stop[k, :n]))
        assert common == (common & piece if n else piece)
        seen[found.want[k]][common.within((0,) * n)] += 1
    for (tensor, box), count in zip(wants, seen):
        expected = np.zeros(rows[tensor][1], int)
        expected[box.within((0,) * len(box.start))] = 1
        assert (count == expected).all()


@MODERATE
@given(layouts())
def test_a_rank_s_box_is_what_it_holds(layout) -> None:
    mesh, rows, _ = layout
    for _, shape, _, sharding in rows:
        for rank in range(mesh.world) if sharding.held is None else ():
            mask = np.zeros(shape, bool)
            box = sharding.box(shape, mesh, rank)
            if box is not None:
                mask[box.within((0,) * len(shape))] = True
            assert (mask == held_by(mesh, rank, shape, sharding)).all()


def test_replicas_share_large_tensors_evenly() -> None:
    mesh = Mesh((("dp", 4),))
    placement = Placement(mesh, Table.of([("w", (4096, 256), 4, Sharding())]))
    shares = [placement.pieces(rank).total_bytes for rank in range(4)]
    assert shares == [4096 * 256] * 4


def test_a_small_tensor_is_written_whole_by_one_replica() -> None:
    table = Table.of([(f"b{i}", (3, 5), 1, Sharding()) for i in range(8)])
    placement = Placement(Mesh((("dp", 4),)), table)
    sizes = [placement.pieces(rank).bytes.tolist() for rank in range(4)]
    assert [size for of_rank in sizes for size in of_rank] == [15] * 8


def test_pieces_of_a_rank_outside_the_mesh_are_none() -> None:
    table = Table.of([("w", (8,), 4, Sharding((Cut(0, ("dp",)),)))])
    assert Placement(Mesh((("dp", 2),)), table).pieces(2).total_bytes == 0


def test_planning_for_many_replicas_is_cheap() -> None:
    """A few bytes of manifest can state 2**20 ranks: what that costs must stay small."""
    mesh = Mesh((("dp", 1 << 20),))
    shardings = [Sharding(on=(("dp", tuple(range(i + 1))),)) for i in range(20)] + [Sharding()]
    table = Table.of([(f"t{i}", (8,), 4, s) for i, s in enumerate(shardings)])
    found = Placement(mesh, table).locate(
        np.array([20]), np.zeros((1, 1), int), np.full((1, 1), 8, int)
    )
    assert len(found.want) == 1
