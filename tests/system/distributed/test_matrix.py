"""Every layout loads every layout's checkpoint bit by bit; what torch gathers is what holdfast reads."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from capabilities import UNEVEN_OVER_TP
from soaking import cases_of

from .launch import launch
from .layouts import LAYOUTS, VOCABULARY, WIDTH

safetensors = pytest.importorskip("safetensors")
pytestmark = pytest.mark.distributed

MOST_READ = 1.05
"""DESIGN.md section 6: bytes read over bytes wanted, summed over the ranks."""

KEPT = ("plain", "fsdp2", "fsdp2_tp2", "pp2_dp2")
"""Layouts of `make test`: one rank, shards, shards on two axes, stages."""

TIED_TWICE = {"virtual2", "pp2_dp2", "pp2_rep1_dp2_tp2"}
"""Checkpoints with the tied weights under both names, of which the other layouts want one."""

UNEVEN = {name for name in LAYOUTS if "dp" in name and "tp" in name}
"""Layouts that cut a tensor by FSDP2 over tensor parallelism, which is not even in this model."""

COMPARED = 2 * (VOCABULARY * WIDTH * 4 + 4 * (256 << 10))
"""Bytes that are read to compare these two, with the chunks at the edges of shards."""


def run(verb: str, root: Path, layouts: list[str]) -> dict[str, Any]:
    """One launch per world size, two at a time; what each layout found, by its name."""

    def one(size: int) -> Any:
        launch("matrix", size, verb, root, *layouts, forked=size != 3).check()
        return json.loads((root / f"{verb}-{size}.json").read_text())

    found: dict[str, Any] = {}
    with ThreadPoolExecutor(2) as pool:
        sizes = {LAYOUTS[name].num_ranks for name in layouts}
        for of_one in pool.map(one, sorted(sizes, reverse=True)):
            found |= of_one
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(autouse=True)
def _torch_can(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["layout"] in UNEVEN:
        UNEVEN_OVER_TP.require()


@pytest.fixture(scope="module")
def layouts(request: pytest.FixtureRequest) -> list[str]:
    names = cases_of(request, "test_loads_every_checkpoint_bit_by_bit", list(LAYOUTS))
    return [name for name in names if UNEVEN_OVER_TP.is_there or name not in UNEVEN]


@pytest.fixture(scope="module")
def saved(root: Path, layouts: list[str]) -> dict[str, list[str]]:
    return run("save", root, layouts)


@pytest.fixture(scope="module")
def loaded(root: Path, layouts: list[str], saved: dict[str, list[str]]) -> dict[str, Any]:
    assert saved.keys() == set(layouts)
    return run("load", root, layouts)


@pytest.mark.soak_except(*KEPT)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.timeout(900)
def test_torch_gathers_what_holdfast_reads(saved: dict[str, list[str]], layout: str) -> None:
    assert saved[layout] == []


@pytest.mark.soak_except(*KEPT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_safetensors_reader_opens_the_files(
    root: Path, saved: dict[str, list[str]], layout: str
) -> None:
    """The pieces in the files, put together by their names alone, are the tensors."""
    checkpoint = holdfast.open(str(root / layout))
    shapes = {n: checkpoint.info(n).shape for n in checkpoint.names()}
    whole = {n: np.zeros(shape, "f8") for n, shape in shapes.items()}
    for file in root.joinpath(layout).rglob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118  it is no dict
                if not key.startswith("holdfast."):
                    name, _, part = key.partition("@")
                    values = opened.get_tensor(key).double().numpy()
                    whole[name][at(part, shapes[name])] += values
    for name in {t.name for t in checkpoint.manifest.tensors}:
        assert np.array_equal(whole[name], checkpoint.read(name).astype("f8")), name


def at(part: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The slices that a piece's name states."""
    if not part:
        return tuple(slice(n) for n in shape)
    ranges = part.strip("[]").split(",")
    return tuple(slice(*map(int, r.split(":"))) for r in ranges)


@pytest.mark.soak_except(*KEPT)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.timeout(1200)
def test_loads_every_checkpoint_bit_by_bit(
    loaded: dict[str, Any], layouts: list[str], layout: str
) -> None:
    assert loaded[layout].keys() == set(layouts)
    assert {s: found["wrong"] for s, found in loaded[layout].items() if found["wrong"]} == {}


@pytest.mark.soak_except(*KEPT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_together_read_each_byte_about_once(loaded: dict[str, Any], layout: str) -> None:
    """Verifying reads whole chunks; where all tensors are wanted, that is hardly more than they are.

    A weight that was saved under each of its names is read before, to see that both have the same values.
    """
    complete = 0
    for checkpoint, found in loaded[layout].items():
        assert found["wanted"] > 5_000_000, "too little for chunks of 256 KiB to count"
        most = MOST_READ * found["chunks"] + COMPARED * (checkpoint in TIED_TWICE)
        assert found["wanted"] <= found["read"] <= most, checkpoint
        if checkpoint not in TIED_TWICE:
            assert found["read"] <= MOST_READ * found["wanted"], checkpoint
            complete += 1
    assert complete == len(loaded[layout].keys() - TIED_TWICE)
