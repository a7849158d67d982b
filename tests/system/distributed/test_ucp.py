"""The evaluation of Universal Checkpointing (arXiv:2406.18820, section 5) in small.

One GPT, one beginning, the same batches everywhere.  A run of Megatron-Core over tensors, pipeline and data
with ZeRO-1 (8 processes) is restored into every other layout; the checkpoint of every layout is restored
into one process of plain torch.  After a restore every element of weights and moments is what its
framework gathers, bit for bit, and the next 50 losses are those of the source, which was not interrupted,
but for noise: uninterrupted runs in these layouts differ by more.

    pytest tests/system/distributed/test_ucp.py -s        prints the table
"""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import holdfast

pytest.importorskip("deepspeed")
pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from holdfast.formats.rules.deepspeed import Slices

from . import ucp_gpt as gpt
from . import ucp_megatron, ucp_two
from .cases import Case, check, run_module
from .launch import launch
from .ucp_cases import Row, apart, losses_of, row, rows, uninterrupted
from .ucp_megatron import MOE_SOURCE, SOURCE
from .ucp_phi import Phi, load_from_phi

pytestmark = [pytest.mark.distributed, pytest.mark.soak]


def plain(*, experts: bool = False, padded: int = gpt.PADDED) -> gpt.Plain:
    """One process of plain torch."""
    model = gpt.Gpt(experts=experts, padded=padded)
    return gpt.Plain(model, gpt.adamw(model))


ALONE: dict[str, Callable[[], gpt.Plain]] = {
    "plain": plain,
    "phi3": Phi,
    "moe_plain": partial(plain, experts=True),
}
DENSE = [SOURCE, *ucp_two.PLAIN, *ucp_two.MEGATRON, "phi3"]
EXPERTS = [MOE_SOURCE, *ucp_two.EXPERTS]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ucp")


@pytest.fixture(scope="module")
def on_eight(out: Path) -> dict[str, list[str]]:
    return run_module("ucp_megatron", 8, out)


@pytest.fixture(scope="module")
def on_two(out: Path, on_eight: dict[str, list[str]]) -> dict[str, list[str]]:
    return run_module("ucp_two", 2, out)


@pytest.fixture(scope="module")
def runs(out: Path, on_two: dict[str, list[str]]) -> Path:
    """The folder of all uninterrupted runs."""
    for name, build in ALONE.items():
        (out / name).mkdir()
        uninterrupted(name, build)(out / name)
    return out


@pytest.fixture(scope="module")
def noise(runs: Path) -> dict[str, float]:
    """By source: by how much at most uninterrupted runs in other layouts differ from its own."""
    apart_from = {
        SOURCE: (*ucp_two.PLAIN, *ucp_two.MEGATRON, "plain", "phi3"),
        MOE_SOURCE: (*ucp_two.EXPERTS, "moe_plain"),
    }
    return {
        source: max(apart(losses_of(runs / name), losses_of(runs / source)) for name in names)
        for source, names in apart_from.items()
    }


def held(found: Row, noise: dict[str, float]) -> None:
    assert found.elements == 0, found
    assert found.losses <= noise[source_of(found.source)], (found, noise)


def source_of(name: str) -> str:
    return MOE_SOURCE if name.startswith("moe") else SOURCE


@pytest.mark.parametrize("case", ucp_megatron.CASES, ids=lambda case: case.__name__)
def test_sources(on_eight: dict[str, list[str]], case: Case) -> None:
    check(on_eight, case.__name__)


@pytest.mark.parametrize("case", ucp_two.CASES, ids=lambda case: case.__name__)
def test_two_ranks(on_two: dict[str, list[str]], case: Case) -> None:
    check(on_two, case.__name__)


# -- one source, many targets ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ucp_two.PLAIN, *ucp_two.MEGATRON, *ucp_two.EXPERTS])
def test_from_one_source(runs: Path, noise: dict[str, float], name: str) -> None:
    (found,) = (r for r in rows(runs) if (r.source, r.target) == (source_of(name), name))
    held(found, noise)


def test_on_its_own_layout(runs: Path) -> None:
    """Nothing is added in another order, so nothing differs."""
    (found,) = (r for r in rows(runs) if (r.source, r.target) == ("pp2", "pp2"))
    assert (found.elements, found.losses) == (0, 0)


def test_into_transformers(runs: Path, noise: dict[str, float]) -> None:
    """Under other names, and with the rows of the fused QKV in another order."""
    phi = Phi()
    phi.load(runs / SOURCE / "checkpoint")
    found = phi.gathered()
    held(row(runs / SOURCE, "phi3", found, phi.run(gpt.FIRST, gpt.MORE)), noise)


# -- many sources, one target ---------------------------------------------------------------------


@pytest.mark.parametrize("saved_by", ["checkpoint", "theirs"])
@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_into_one_target(runs: Path, noise: dict[str, float], name: str, saved_by: str) -> None:
    """What holdfast saved of a live run, and what its framework saved itself."""
    folder = runs / name
    embedding = torch.load(folder / "truth.pt")[f"model.{gpt.EMBEDDING}"]
    target = plain(experts=name in EXPERTS, padded=len(embedding))
    if name == "phi3":
        load_from_phi(target, folder / "checkpoint", folder / saved_by)
    else:
        step = holdfast.load(folder / saved_by, target.state)
        assert step == (
            0 if (folder / saved_by / ".metadata").exists() else gpt.FIRST
        )  # DCP has none
    how = ", its own" if saved_by == "theirs" else ""
    found = target.gathered()
    held(row(folder, "plain", found, target.run(gpt.FIRST, gpt.MORE), how), noise)


# -- noise ----------------------------------------------------------------------------------------


def test_what_noise_is_not(runs: Path, noise: dict[str, float]) -> None:
    """A run that goes on without Adam's moments is far outside of it."""
    bare = plain()
    holdfast.load(runs / SOURCE / "checkpoint", {"model": bare.model})
    forgot = apart(bare.run(gpt.FIRST, gpt.MORE), losses_of(runs / SOURCE))
    print(table(runs, noise), f"without moments: {forgot:.1e}", sep="\n")
    assert forgot > 1000 * noise[SOURCE]


def table(runs: Path, noise: dict[str, float]) -> str:
    lines = [f"\n{'source':32} {'target':12} {'elements':>9} {'losses':>9} {'noise':>9}"]
    for r in sorted(rows(runs), key=lambda r: (r.target == "plain", r.source)):
        limit = noise[source_of(r.source)]
        line = f"{r.source:32} {r.target:12} {r.elements:9.1e} {r.losses:9.1e} {limit:9.1e}"
        lines.append(line)
    return "\n".join(lines)


# -- averaged parameters --------------------------------------------------------------------------


def test_averaged(tmp_path: Path) -> None:
    """Norms and biases that two tensor-parallel ranks of DeepSpeed updated apart: the mean, as
    ds_to_universal takes it."""
    launch("formats.read.deepspeed_grid", 2, tmp_path, 1, 2, 1, 1, "fp32", "apart").check()
    ranks = [torch.load(tmp_path / "held" / f"0-{r}.pt")["held"] for r in (0, 1)]
    apart_ = [n for n, states in ranks[0].items() if states["fp32"].ndim == 1]
    info = torch.load(next((tmp_path / "save").glob("*/mp_rank_00*")), weights_only=False)
    slices = Slices(info["universal_checkpoint_info"], {n: [(6,)] * 2 for n in apart_})
    assert {slices.rules.match(n).rule.replica for n in apart_} == {"averaged"}
    zero = next((tmp_path / "universal").glob("*/zero"))
    with holdfast.open(tmp_path / "save") as saved:
        for name in apart_:
            for state in ("fp32", *gpt.ADAM):
                mine, other = (rank[name][state] for rank in ranks)
                assert state != "fp32" or not torch.equal(mine, other)
                key = f"model.{name}" if state == "fp32" else f"optim.{name}.{state}"
                found = torch.from_numpy(saved.read(key))
                assert torch.equal(found, (mine + other) / 2)
                theirs = torch.load(zero / name / f"{state}.pt", weights_only=False)
                assert torch.equal(found, theirs["param"])
