"""What `holdfast plan` says of a scheme, against counting it out."""

from itertools import combinations

import pytest

from holdfast.core.codec.stripes import Stripes
from holdfast.errors import UsageError
from holdfast.policy.redundancy import choose, parity_groups, parse, protection
from holdfast.policy.survival import failure_within, rs

SCHEMES = ["none", "copy", "copy(3)", "parity", "rs(2)"]
TIMES = {"node_mtbf_s": 1e6, "repair_s": 600.0}


def stripes(lengths: list[int], scheme: str) -> Stripes:
    found = parse(scheme)
    assert found is not None
    return Stripes(tuple(lengths), *found.blocks(len(lengths)))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("num_nodes", "per_node", "holdings"),
    [
        (4, 1, None),
        (4, 2, None),
        (5, 1, None),
        (6, 2, None),
        (4, 1, [0, 0, 0, 0]),  # DDP
        (4, 1, [0, 1, 0, 1]),  # HSDP 2 x 2
        (4, 2, [0, 1, 2, 3, 0, 1, 2, 3]),  # HSDP 2 x 4: a replica on two nodes
        (6, 2, [0, 1] * 6),  # data x tensor parallelism
        (6, 1, [0, 1, 1, 0, 2, 2]),
    ],
)
def test_what_is_borne_is_what_the_stripes_bear(
    scheme: str, num_nodes: int, per_node: int, holdings: list[int] | None
) -> None:
    """Set by set of lost nodes: the code can rebuild every share of every group, or the plan says no."""
    nodes = [f"n{r // per_node}" for r in range(num_nodes * per_node)]
    shares = [1_000_000 + 1000 * r for r in range(len(nodes))]
    found = parse(scheme)
    assert found is not None
    plan = protection(found, nodes, shares, holdings, **TIMES)
    q, total = failure_within(1e6, 600.0), 0.0
    names = sorted(set(nodes))
    for size in range(num_nodes + 1):
        for lost in combinations(names, size):
            borne = all(
                stripes([shares[r] for r in group], scheme).survives(
                    {i for i, r in enumerate(group) if nodes[r] in lost}
                )
                for group in plan.groups
            )
            said = not any(some <= set(lost) for some in plan.fatal)
            assert borne == said, (lost, plan.fatal)
            assert borne or size > plan.bears
            total += 0 if borne else q**size * (1 - q) ** (num_nodes - size)
    assert plan.loss == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_are_those_of_the_stripes(scheme: str) -> None:
    """But for rounding to the code's units."""
    shares = [5_000_000, 5_100_000, 4_900_000, 5_050_000]
    found = parse(scheme)
    assert found is not None
    plan = protection(found, ["a", "b", "c", "d"], shares, **TIMES)
    assert plan.kept_bytes == pytest.approx(stripes(shares, scheme).kept_bytes, rel=0.1)
    assert plan.node_bytes <= 2 * (max(shares) + plan.kept_bytes)


def test_bytes_of_pairs_of_replicas() -> None:
    """A block of parity over one other image is as long as the image: what a copy takes."""
    shares, nodes = [5_000_000] * 4, ["a", "b", "c", "d"]
    whole, pairs = (protection(rs(1), nodes, shares, h, **TIMES) for h in (None, [0, 1, 0, 1]))
    assert (whole.groups, pairs.groups) == (((0, 1, 2, 3),), ((0, 2), (1, 3)))
    assert whole.kept_bytes == pytest.approx(5_000_000 / 3, rel=1e-6)
    assert pairs.kept_bytes == 5_000_000 and pairs.node_bytes == 20_000_000
    assert pairs.fatal == (frozenset("ac"), frozenset("bd"))
    assert len(whole.fatal) == 6


def test_names_of_schemes() -> None:
    assert [str(parse(s)) for s in (*SCHEMES, "rs(1)", "rs( 3 )")] == [
        "none", "copy(2)", "copy(3)", "parity", "rs(2)", "parity", "rs(3)"
    ]  # fmt: skip
    assert parse("auto") is None
    assert [str(choose(n)) for n in (1, 2, 3, 100)] == ["none", "copy(2)", "parity", "parity"]
    for wrong in ("paritty", "rs(0)", "copy(1)", "rs", "", "rs(-1)"):
        with pytest.raises(UsageError):
            parse(wrong)


def test_groups_are_on_different_nodes_and_alike_where_state_is_replicated() -> None:
    parity = parse("parity")
    assert parity is not None
    nodes = ["a", "a", "b", "b", "c", "c"]
    assert parity_groups(nodes, parity) == [(0, 2, 4), (1, 3, 5)]
    assert parity_groups(nodes, parity, [0, 1, 0, 1, 0, 1]) == [(0, 2, 4), (1, 3, 5)]
    assert parity_groups(nodes, parity, [0, 1, 1, 0, 0, 1]) == [(0, 3, 4), (1, 2, 5)]
    # replicas on one node cannot protect each other from its loss
    assert parity_groups(nodes, parity, [0, 0, 1, 1, 2, 2]) == [(0, 2, 4), (1, 3, 5)]
    twenty = [f"n{i}" for i in range(20)]
    assert sorted(map(len, parity_groups(twenty, parity))) == [6, 7, 7]
    assert parity_groups(["a"] * 3, parity) == [(0, 1, 2)]
    with pytest.raises(UsageError, match="rank 2 finds 0 others"):
        parity_groups(["a", "b", "b"], parity)
