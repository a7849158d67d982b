"""What holds for all tests."""

import gc
import os
from contextlib import suppress

import pytest

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch: processes are forked, and compute alike
os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a process that crashes says where it was
# A busy machine is no failure.  The soak draws other cases each time.
with suppress(ImportError):  # tests of devices run where it is not
    from hypothesis import settings

    settings.register_profile("holdfast", deadline=None, derandomize=True)
    settings.register_profile("anew", deadline=None)
    settings.load_profile("holdfast")

from gate import in_order, leave_to_the_soak
from holdfast.errors import silence
from memory.fixtures import lives, zygote

__all__ = ["lives", "zygote"]

silence("held-long")  # which a busy machine makes true


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # of pytest-xdist: files have their order here


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is not wanted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_to_the_soak(config, items)
    items[:] = in_order(items)


def pytest_collection_finish() -> None:
    """Thousands of tests stay until the end: the collector does not go over them at every turn, nor does it
    copy their memory in forked processes."""
    gc.collect()
    gc.freeze()
