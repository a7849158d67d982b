"""The strongest scheme that fits the nodes there are: against all that are weaker than what was wanted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.policy.redundancy import fitting, groups
from holdfast.policy.survival import Scheme, copy, none, rs


def fits(scheme: Scheme, nodes: list[str]) -> bool:
    try:
        groups(nodes, scheme)
    except UsageError:
        return False
    return True


@given(st.lists(st.integers(1, 3), min_size=1, max_size=9), st.integers(1, 4), st.booleans())
def test_the_strongest_that_fits(ranks: list[int], losses: int, parity: bool) -> None:
    nodes = [f"n{n}" for n, count in enumerate(ranks) for _ in range(count)]
    wanted = rs(losses) if parity else copy(losses + 1)
    found = fitting(wanted, nodes)
    assert fits(found, nodes)
    stronger = range(found.losses + 1, losses + 1)
    assert not any(fits(Scheme(wanted.kind, n), nodes) for n in stronger)


@pytest.mark.parametrize(("num_nodes", "kept"), [(5, rs(2)), (3, rs(2)), (2, rs(1)), (1, none())])
def test_after_losses(num_nodes: int, kept: Scheme) -> None:
    assert fitting(rs(2), [f"n{n}" for n in range(num_nodes)]) == kept
