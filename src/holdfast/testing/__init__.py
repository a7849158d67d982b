"""Tools that holdfast tests itself with, for those who build on it.

class TestMyStore(StoreTests):         # is my store a right one?
    @pytest.fixture
    def store(self, tmp_path): return MyStore(tmp_path)

StopAfter(store, 7)                    # does my program survive death at its 7th change?
"""

from __future__ import annotations

from holdfast.testing.stores import StoreTests
from holdfast.testing.wrappers import Counting, Faulty, Operation, Slow, StopAfter, Stopped

__all__ = ["Counting", "Faulty", "Operation", "Slow", "StopAfter", "Stopped", "StoreTests"]
