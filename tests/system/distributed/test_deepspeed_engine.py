"""DeepSpeed engines as live state: saved on two ranks, restored on one, two and three."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import compiled
from soaking import cases_of

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported

pytest.importorskip("deepspeed")

from .cases import check, run_module
from .engine_resuming_cases import CASES as RESUMING
from .engine_resuming_cases import ELSEWHERE, OWN_FILES
from .engine_saving_cases import CASES as SAVING
from .engine_saving_cases import COMPILING
from .engines import BUILT

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


@pytest.mark.soak_except(
    "zero3-fp32",
    "what_modules_say_besides_is_refused",
    "a_damaged_step_leaves_nothing_that_trains",
)
@pytest.mark.parametrize("name", names_of(SAVING))
def test_saving(saved: Failed, name: str) -> None:
    check(saved, name)


@pytest.mark.soak_except("resuming-zero3-fp32", "zero3-fp32-to-zero1-fp32")
@pytest.mark.parametrize("name", names_of(RESUMING))
def test_on_two_ranks(resumed: Failed, name: str) -> None:
    check(resumed, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", names_of(ELSEWHERE))
def test_on_one_rank(on_one: Failed, name: str) -> None:
    check(on_one, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", names_of(ELSEWHERE))
def test_on_three_ranks(on_three: Failed, name: str) -> None:
    check(on_three, name)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DeepSpeed's kernels, which the ranks that are started find."""
    env = dict(os.environ)
    with compiled(env):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", env["TORCH_EXTENSIONS_DIR"])
        yield


@pytest.mark.soak
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
