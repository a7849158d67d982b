"""What holds for all tests."""

import gc
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch: processes are forked, and compute alike
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # torch 2.6 begins them when imported
os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a process that crashes says where it was
# A busy machine is no failure.  The soak draws other cases each time.
with suppress(ImportError):  # tests of devices run where it is not
    from hypothesis import settings

    settings.register_profile("holdfast", deadline=None, derandomize=True)
    settings.register_profile("anew", deadline=None)
    settings.load_profile("holdfast")

from holdfast.errors import silence
from soaking import leave_to_the_soak
from tiers.memory.fixtures import lives, zygote

__all__ = ["lives", "zygote"]

silence("held-long")  # which a busy machine makes true

TESTS = Path(__file__).parent
FIRST = (
    "live/state/test_many_tensors.py",  # these two while there is little in memory: the collector, forks
    "tiers/memory/test_every_write.py",
    "launching/test_kills.py",  # these seven for the soak: up to half an hour each
    "core/store/objects/test_faults.py",
    "system/loops/test_loops.py",
    "docs/test_docs.py",
    "integrations/trainers/test_deepspeed.py",
    "integrations/trainers/test_accelerate.py",
    "integrations/trainers/test_transformers.py",
    "system/strangers/test_strangers.py",
    "system/crash/test_mixed_overwrite.py",
    "tiers/records/test_kills.py",
    "live/optimizers/test_optimizers.py",
    "system/nodes/test_elastic_memory.py",
    "system/nodes/test_chaos.py",
    "system/nodes/test_elastic_durable.py",
    "system/distributed/test_matrix.py",
    "system/distributed/test_deepspeed_engine.py",
    "system/distributed/test_megatron.py",
    "tiers/memory/test_lives.py",
    "tiers/memory/test_deaths.py",
    "system/disks/test_exit.py",
    "tiers/records/test_topk.py",
    "system/nodes/test_elastic_page.py",
    "system/late/test_on_late.py",
    "core/group/test_partners.py",
    "core/group/test_meetings.py",
    "tiers/records/test_delta_lives.py",
    "system/distributed/test_saving.py",
    "system/distributed/test_loading.py",
    "system/distributed/test_files.py",
    "system/distributed/test_converting.py",
)
"""Files of few tests that take long: begun first, so that none is left at the end for one worker alone."""


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """File by file: those named above, then the others, those of many tests before those of few."""
    sizes = Counter(item.path for item in items)

    def turn(item: pytest.Item) -> tuple[int, int]:
        file = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
        return FIRST.index(file) if file in FIRST else len(FIRST), -sizes[item.path]

    return sorted(items, key=turn)


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # of pytest-xdist: files have their order here


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is not wanted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    own = [item for item in items if item.path.is_relative_to(TESTS)]
    leave_to_the_soak(own, are_all=not any("::" in arg for arg in config.args))
    items[:] = in_order(items)


def pytest_collection_finish() -> None:
    """Thousands of tests stay until the end: the collector does not go over them at every turn, nor does it
    copy their memory in forked processes."""
    gc.collect()
    gc.freeze()
