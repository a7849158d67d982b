"""Skips where there can be no nodes."""

import pytest

from .spaces import unavailable


@pytest.fixture(scope="session")
def needs_nodes() -> None:
    """For tests that use a `Cluster`."""
    why = unavailable()
    if why is not None:
        pytest.skip(why)
