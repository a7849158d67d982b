"""The tools by which holdfast tests itself, for those who build on it.

class TestMyStore(StoreTests):         # does my store keep the promises of `Store`?
    @pytest.fixture
    def store(self, tmp_path): return MyStore(tmp_path)

class TestMyFramework(SourceTests):    # does my framework state correctly where its values are?
    @pytest.fixture
    def build(self): return lambda seed: Training({"model": ..., "optim": ...}, train)

assert prove(train, ranks=2)           # does my training go on exactly when it is killed?

StopAfter(store, 7)                    # does my program survive a death at its 7th change?
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.testing.stores import StoreTests
from holdfast.testing.wrappers import Counting, Faulty, Operation, Slow, StopAfter, Stopped

if TYPE_CHECKING:
    from holdfast.prove.calling import prove
    from holdfast.testing.sources import SourceTests, Training

__all__ = [
    "Counting",
    "Faulty",
    "Operation",
    "Training",
    "Slow",
    "SourceTests",
    "StopAfter",
    "Stopped",
    "StoreTests",
    "prove",
]


def __getattr__(name: str) -> Any:
    """Load the suite for frameworks when it is used, since it needs torch; `prove`, since few need it."""
    if name == "prove":
        return importlib.import_module("holdfast.prove.calling").prove
    if name in ("Training", "SourceTests"):
        return getattr(importlib.import_module("holdfast.testing.sources"), name)
    raise AttributeError(f"module 'holdfast.testing' has no attribute {name!r}")
