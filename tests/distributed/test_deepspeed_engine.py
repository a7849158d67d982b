"""DeepSpeed engines as live state: saved on two ranks, restored on one, two and three."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gate import cases_of

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported

pytest.importorskip("deepspeed")

from .cases import check, run_module
from .engine_resuming_cases import CASES as RESUMING
from .engine_resuming_cases import ELSEWHERE, OWN_FILES
from .engine_saving_cases import CASES as SAVING
from .engine_saving_cases import COMPILING
from .engines import BUILT
from .launch import TESTS

pytestmark = pytest.mark.distributed

Failed = dict[str, list[str]]


def names_of(cases: list) -> list[str]:
    return [case.__name__ for case in cases]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


def launched(out: Path, folder: str, module: str, ranks: int, *names: str) -> Failed:
    (out / folder).mkdir()
    return run_module(module, ranks, out / folder, *names, forked=ranks != 3)


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, out: Path) -> Failed:
    names = cases_of(request, "test_saving", names_of(SAVING))
    return launched(out, "saved", "engine_saving_cases", 2, *names)


@pytest.fixture(scope="module")
def resumed(request: pytest.FixtureRequest, out: Path, saved: Failed) -> Failed:
    names = cases_of(request, "test_on_two_ranks", names_of(RESUMING))
    return launched(out, "two", "engine_resuming_cases", 2, *names)


@pytest.fixture(scope="module")
def on_one(out: Path, saved: Failed) -> Failed:
    return launched(out, "one", "engine_resuming_cases", 1, *names_of(ELSEWHERE))


@pytest.fixture(scope="module")
def on_three(request: pytest.FixtureRequest, out: Path, saved: Failed) -> Failed:
    names = cases_of(request, "test_on_three_ranks", names_of(ELSEWHERE))
    return launched(out, "three", "engine_resuming_cases", 3, *names)


@pytest.mark.parametrize("name", names_of(SAVING))
def test_saving(saved: Failed, name: str) -> None:
    check(saved, name)


@pytest.mark.parametrize("name", names_of(RESUMING))
def test_on_two_ranks(resumed: Failed, name: str) -> None:
    check(resumed, name)


@pytest.mark.parametrize("name", names_of(ELSEWHERE))
def test_on_one_rank(on_one: Failed, name: str) -> None:
    check(on_one, name)


@pytest.mark.parametrize("name", names_of(ELSEWHERE))
def test_on_three_ranks(on_three: Failed, name: str) -> None:
    check(on_three, name)


@pytest.fixture
def kernels(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DeepSpeed's kernels, compiled once per checkout.

    A compilation that is killed leaves its lock, for which every later one would wait for ever.
    """
    place = pytestconfig.cache.mkdir("kernels")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(place))
    with open(place / "in-use", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for lock in place.glob("*/lock"):
            lock.unlink()
        subprocess.run([sys.executable, "-c", COMPILE], check=True, timeout=400, cwd=TESTS)
        yield


COMPILE = """
import deepspeed_on_cpu
from deepspeed.accelerator import get_accelerator
for name in ("FusedAdamBuilder", "CPUAdamBuilder"):
    get_accelerator().create_op_builder(name).load()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_optimizers_that_deepspeed_compiles(tmp_path: Path) -> None:
    """Its CPU and fused Adam and its Muon: the first run takes minutes."""
    saved = names_of(COMPILING)
    failed = launched(tmp_path, "saved", "engine_saving_cases", 2, *saved)
    resumed = [*(f"resuming-{kind}" for kind in BUILT), *names_of(OWN_FILES)]
    failed |= launched(tmp_path, "two", "engine_resuming_cases", 2, *resumed)
    for name in (*saved, *resumed):
        check(failed, name)
