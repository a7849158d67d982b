"""The rotating layout: every loss within tolerance is rebuilt exactly, by ranges; beyond it, refused."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.codec import stripes
from holdfast.core.codec.erasure import Octets
from holdfast.core.codec.stripes import Area, Extent, Stripes
from holdfast.errors import NotRecoverable, UsageError

MODERATE = settings(max_examples=100, deadline=None)
LENGTHS = (700, 641, 0, 699, 1, 512, 650, 700)
Make = Callable[[int], Stripes]


def none(n: int) -> Stripes:
    return stripes.none(LENGTHS[:n])


def copy(r: int) -> Make:
    return lambda n: stripes.copy(LENGTHS[:n], r)


def rs(m: int) -> Make:
    return lambda n: Stripes(LENGTHS[:n], n - m, m, packet_bytes=8)


SCHEMES = [
    *((f"none {n}", none(n)) for n in (1, 3)),
    *((f"copy({r}) of {n}", copy(r)(n)) for r in (2, 3, 4) for n in (3, 5, 8) if r <= n),
    *((f"rs({m}) of {n}", rs(m)(n)) for m in (1, 2, 3, 4) for n in range(m + 1, 9)),
]
EACH = pytest.mark.parametrize("layout", [s for _, s in SCHEMES], ids=[name for name, _ in SCHEMES])


class Group:
    """A layout's members in memory."""

    def __init__(self, layout: Stripes) -> None:
        rng = np.random.default_rng(1)
        self.layout = layout
        self.areas: dict[tuple[int, Area], Octets] = {
            (j, "share"): rng.integers(0, 256, length, dtype=np.uint8)
            for j, length in enumerate(layout.lengths)
        }
        for j in range(layout.num_members):
            self.areas[j, "kept"] = self.kept(j)

    def kept(self, member: int) -> Octets:
        size = self.layout.block_bytes
        kept, begun = np.full(self.layout.kept_bytes, 201, np.uint8), set()
        for c in self.layout.contributions(member):
            assert c.source.member != member
            parity = {c.row: kept[c.at : c.at + size]}
            fresh = c.row not in begun
            self.layout.code.accumulate(parity, c.index, self.read(c.source), fresh=fresh)
            begun.add(c.row)
        return kept

    def read(self, extent: Extent) -> Octets:
        area = self.areas[extent.member, extent.area]
        assert 0 <= extent.start <= extent.stop <= len(area)
        return area[extent.start : extent.stop]

    def rebuilt(
        self, lost: Collection[int], member: int, start: int, stop: int, area: Area = "share"
    ) -> Octets:
        out, at = np.full(stop - start, 3, np.uint8), start
        for piece in self.layout.sources(lost, member, start, stop, area):
            assert piece.start == at and not {e.member for e in piece.reads} & set(lost)
            part = out[piece.start - start : piece.stop - start]
            self.layout.fill(piece, [self.read(e) for e in piece.reads], part)
            at = piece.stop
        assert at == stop
        return out


def subsets(n: int) -> list[tuple[int, ...]]:
    return list(chain(*(combinations(range(n), size) for size in range(n + 1))))


def tolerated(name: str, n: int, lost: Collection[int]) -> bool:
    """By the scheme's description alone."""
    kind = name.split()[0]
    if kind == "none":
        return not lost
    number = int(kind[kind.index("(") + 1 : -1])
    if kind.startswith("rs"):
        return len(lost) <= number
    return not any(all((i + d) % n in lost for d in range(number)) for i in range(n))


@pytest.mark.parametrize(("name", "layout"), SCHEMES, ids=[name for name, _ in SCHEMES])
def test_every_loss_within_tolerance_is_rebuilt_and_no_other(name: str, layout: Stripes) -> None:
    group, n = Group(layout), layout.num_members
    for lost in subsets(n):
        assert layout.survives(lost) == tolerated(name, n, lost)
        if not layout.survives(lost):
            check_refused(layout, lost)
        elif len(lost) == layout.num_parity or n < 6:
            for j in lost:
                assert (
                    group.rebuilt(lost, j, 0, layout.lengths[j]) == group.areas[j, "share"]
                ).all()


def check_refused(layout: Stripes, lost: tuple[int, ...]) -> None:
    who = ", ".join(map(str, lost))
    gone = layout.unrecoverable(lost)
    assert gone
    for j in gone:
        if layout.lengths[j]:
            with pytest.raises(NotRecoverable, match=rf"members are lost \({who}\).* left$"):
                layout.sources(lost, j, 0, layout.lengths[j])
    for j in set(range(layout.num_members)) - set(lost):
        (piece,) = layout.sources(lost, j, 0, layout.lengths[j]) or [None]
        assert piece is None or piece.want is None


@EACH
def test_kept_areas_are_rebuilt_too(layout: Stripes) -> None:
    group = Group(layout)
    for lost in combinations(range(layout.num_members), min(layout.num_parity, 2)):
        for j in lost:
            found = group.rebuilt(lost, j, 0, layout.kept_bytes, "kept")
            assert (found == group.areas[j, "kept"]).all()


GROUPS = {name: Group(layout) for name, layout in SCHEMES}


@MODERATE
@given(st.sampled_from(SCHEMES), st.data())
def test_any_range_is_read_with_little_more(scheme, data) -> None:
    """Per block that is read, less than a unit more at each end; nothing beyond a share's end."""
    name, layout = scheme
    n = layout.num_members
    lost = data.draw(st.sets(st.integers(0, n - 1), max_size=layout.num_parity))
    member = data.draw(st.integers(0, n - 1))
    area = data.draw(st.sampled_from(["share", "kept"]))
    if member in lost and not layout.survives(lost):
        return
    whole = GROUPS[name].areas[member, area]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    assert (GROUPS[name].rebuilt(lost, member, start, stop, area) == whole[start:stop]).all()
    for piece in layout.sources(lost, member, start, stop, area):
        reads = len(piece.reads)
        assert reads == (1 if member not in lost else layout.num_data)
        for extent in piece.reads:
            more = (extent.stop - extent.start) - (piece.stop - piece.start)
            assert more < 2 * layout.code.unit_bytes


@EACH
def test_blocks_of_a_stripe_are_on_distinct_members(layout: Stripes) -> None:
    n, numbers = layout.num_members, range(layout.num_data + layout.num_parity)
    for s in range(n):
        assert len({layout.place(s, i).member for i in numbers}) == len(numbers)
    for j in range(n):
        placed = [layout.place(*block) for block in layout.blocks(j)]
        assert {p.member for p in placed} == {j}
        covered = [i for p in placed for i in range(p.start, p.stop)]
        assert covered == list(range(layout.lengths[j]))
        kept = [layout.place(*block) for block in layout.blocks(j, "kept")]
        assert [p.start for p in kept] == [r * layout.block_bytes for r in range(len(kept))]
        assert {(p.member, p.area) for p in kept} <= {(j, "kept")}


@pytest.mark.parametrize("n", range(2, 9))
def test_parity_is_the_rotation_of_the_paper(n: int) -> None:
    """RAIM5, after REFT: stripe s has its parity on s and takes block (s - j - 1) mod n of j != s."""
    layout = stripes.rs([640] * n, 1)
    for s in range(n):
        assert layout.holder(s, n - 1) == s
        for j in set(range(n)) - {s}:
            assert ((s, (s - j - 1) % n)) in layout.blocks(j)


@pytest.mark.parametrize(("n", "m"), [(2, 1), (4, 1), (4, 2), (8, 2), (8, 3), (8, 7)])
def test_host_bytes_per_member(n: int, m: int) -> None:
    """Its share and m blocks: S / (n - m), for S the sum of the shares."""
    share = (n - m) * (1 << 20)
    layout = stripes.rs([share] * n, m)
    assert share + layout.kept_bytes == n * share // (n - m)


def test_a_copy_keeps_the_shares_before_it_as_they_are() -> None:
    group = Group(stripes.copy(LENGTHS[:5], 3))
    size = group.layout.block_bytes
    for j in range(5):
        for q in (0, 1):
            share = group.areas[(j - 1 - q) % 5, "share"]
            assert bytes(group.areas[j, "kept"][q * size :][: len(share)]) == bytes(share)


def test_an_unlost_member_is_read_where_it_is() -> None:
    layout = stripes.rs([1000] * 4, 1)
    (piece,) = layout.sources({1}, 2, 100, 900)
    assert piece.reads == (Extent(2, "share", 100, 900),) and piece.want is None
    assert layout.sources({1}, 1, 10, 10) == []


def test_what_cannot_be_meant_is_refused() -> None:
    layout = stripes.rs([1000] * 4, 1)
    with pytest.raises(UsageError, match="no member 4"):
        layout.sources({4}, 0, 0, 10)
    with pytest.raises(UsageError, match=r"bytes 0\.\.1001 of member 0's share"):
        layout.sources({1}, 0, 0, 1001)
    with pytest.raises(UsageError, match="kept area, which has"):
        layout.sources({1}, 1, 0, 5000, "kept")
    with pytest.raises(UsageError, match="no code"):
        stripes.rs([1000] * 4, 4)
    with pytest.raises(UsageError, match="4 members cannot hold stripes of 1 data and 4"):
        stripes.copy([1000] * 4, 5)
