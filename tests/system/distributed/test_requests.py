"""Requests of several ranks: rank 0 looks for all, and the others ask for nothing but their images.

`checkpoint/test_requests.py` counts those of one rank, with many steps kept.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

from capabilities import FSDP2_ON_CPUS

from .launch import launch
from .requests_cases import KEPT

pytestmark = [pytest.mark.distributed]
Phases = dict[str, list[tuple[str, str]]]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.soak)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Phases]:
    """The requests of each rank, by phase."""
    FSDP2_ON_CPUS.require()
    out = tmp_path_factory.mktemp("out")
    launch("requests_cases", request.param, out).check()
    found = [json.loads((out / f"requests-{r}.json").read_text()) for r in range(request.param)]
    for phase in found[0]:
        for rank, phases in enumerate(found):
            print(f"{phase:22} rank {rank}  {dict(counted(phases[phase]))}")
    return found


def counted(made: list[tuple[str, str]]) -> Counter[str]:
    return Counter(name for name, _ in made)


@pytest.mark.parametrize("phase", ["save", "save in its place", "first save"])
def test_a_save(ranks: list[Phases], phase: str) -> None:
    """Rank 0 deletes the images of all ranks of the step that goes, by one request."""
    image = Counter({"create": 1, "write": 1, "finish": 1})
    for phases in ranks[1:]:
        assert counted(phases[phase]) == image
    others = counted(ranks[0][phase]) - image
    assert sum(others.values()) <= 8
    assert others["list"] + others["entries"] == 3
    assert others["delete"] == (phase != "save in its place")
    assert others["delete_many"] == 1


@pytest.mark.parametrize("phase", ["save with records", "save in its place, with records"])
def test_a_save_that_tidies_up_records(ranks: list[Phases], phase: str) -> None:
    """They are listed with the steps, and go with the images."""
    made = counted(ranks[0][phase]) - Counter({"create": 1, "write": 1, "finish": 1})
    assert sum(made.values()) <= 8
    assert (made["list"], made["entries_many"], made["entries"]) == (1, 1, 1)
    assert made["read"] == 0 and made["get"] == 2 and made["delete_many"] == 1


def test_a_claim(ranks: list[Phases]) -> None:
    for phase in ("claim anew", "claim", "close"):
        for phases in ranks[1:]:
            assert phases[phase] == []
    assert counted(ranks[0]["claim anew"]) == {"entries_many": 1, "list": 1, "put": 1}
    assert counted(ranks[0]["claim"]) == {"entries_many": 1, "get": 1, "put": 1, "delete": 1}


@pytest.mark.parametrize("kind", ["", " with records"])
def test_a_restart(ranks: list[Phases], kind: str) -> None:
    """Two listings for all ranks, with the claim, and each file that is read is an image or a record."""
    both = [one for phases in ranks for one in phases[f"claim{kind}"] + phases[f"restore{kind}"]]
    listings = [key for name, key in both if name in ("list", "entries", "entries_many")]
    assert listings == ["claims/ log/ steps/", "log/ steps/"]
    for phases in ranks[1:]:
        assert not [key for _, key in phases[f"restore{kind}"] if key.endswith("manifest.json")]
    assert kind or counted(both)["put"] == 1  # the claim


def test_a_restart_reads_the_beginning_of_each_manifest_once(ranks: list[Phases]) -> None:
    read = [key for name, key in ranks[0]["restore"] if name == "read" and key.endswith(".json")]
    assert len(read) == len(set(read)) == KEPT
