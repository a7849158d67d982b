"""Private places of other packages: the table has them all, and each is there in what is installed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from holdfast import errors
from holdfast.launch.registries import REGISTRIES
from house.private_names import SRC, asked_for, is_private, of_others, parsed, said, used

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
try:
    from private_places import PLACES, REFUSED, Place
finally:
    sys.path.pop(0)

QUICK = ("Python", "numpy", "torch")
"""Packages whose places are looked for in `make test`; those of others need seconds each to be imported."""
IN_REGISTRIES = {part for one in REGISTRIES for part in f"{one.module}.{one.path}".split(".")}


# -- the table and the code -------------------------------------------------------------------------


def test_a_name_of_somebody_else_is_seen() -> None:
    found = of_others(
        ast.parse(
            "from torch._a import _b\nimport torch._c.d\n"
            "class Own(Base):\n    _mine = 1\n    def _e(self): return super()._e() + self._mine\n"
            "def f(x): return x._g, getattr(x, '_h'), x._mine, _local\n_local = '_local'\n"
        )
    )
    assert found == {"_a", "_b", "_c", "_e", "_g", "_h"}


def test_the_table_has_each_private_name_that_the_code_uses() -> None:
    missing = []
    for file, names in used().items():
        known = {part for p in PLACES if file.startswith(p.where) for part in p.path.split(".")}
        known = {part.partition("(")[0] for part in known} | {"_global_"}
        if file == "launch/registries.py":
            known |= IN_REGISTRIES | {"_non_cached"}
        missing += [f"{file}: {name}" for name in sorted(names - known)]
    assert not missing, "\n".join(missing)


def test_the_code_uses_each_place_of_the_table() -> None:
    names = {
        path.relative_to(SRC).as_posix(): {
            part for text in said(parsed(path)) for part in text.split(".")
        }
        for path in SRC.rglob("*.py")
    }
    users = {
        place: {
            where
            for where in place.where
            for file in names
            if file.startswith(where) and _has(place, names[file])
        }
        for place in PLACES
    }
    assert [place.path for place, where in users.items() if not where] == []
    paragraphs = {(place.where, place.why): set[str]() for place in PLACES}
    for place, where in users.items():
        paragraphs[place.where, place.why] |= where
    assert [one for one, where in paragraphs.items() if where != set(one[0])] == []


def _has(place: Place, names: set[str]) -> bool:
    return place.name in names or any(
        one.endswith("_") and place.name.startswith(one) for one in names
    )


def test_what_is_said_to_be_refused_is_asked_for() -> None:
    asked = asked_for()
    silent = [p.path for p in PLACES if p.without == REFUSED and p.name not in asked]
    assert not silent, "\n".join(silent)
    refused = {p.name for p in PLACES if p.without == REFUSED}
    assert {name for name in asked if is_private(name)} <= refused | {"_weights_only_unpickler"}


@pytest.mark.soak
def test_what_a_class_overrides_of_somebody_else_is_in_the_table() -> None:
    """Without `super()` no text of the code shows that there is such a method."""
    done = subprocess.run(
        [sys.executable, "-m", "house.private_names"],
        capture_output=True, text=True, check=False, cwd=ROOT / "tests",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert ["launch/workers", "_poll"] in found
    missing = [
        f"{file}: {name}"
        for file, name in found
        if not any(p.name == name and file.startswith(p.where) for p in PLACES)
    ]
    assert not missing, "\n".join(missing)


def test_each_place_has_one_line_and_says_why() -> None:
    assert len({(p.package, p.path) for p in PLACES}) == len(PLACES)
    assert all(p.why and p.without and any(map(is_private, p.path.split("."))) for p in PLACES)


# -- what is installed ------------------------------------------------------------------------------


@cache
def looked_at(package: str) -> dict[str, str]:
    """What `house.private_objects` says of a package, in a process of its own.  Skips without it."""
    if package != "Python":
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "house.private_objects", package],
        capture_output=True, text=True, check=False, cwd=ROOT / "tests",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def cases() -> list[Any]:
    return [
        pytest.param(p, id=p.path, marks=() if p.package in QUICK else pytest.mark.soak)
        for p in PLACES
    ]


@pytest.mark.parametrize("place", cases())
def test_a_place_is_there(place: Place) -> None:
    said = looked_at(place.package)[place.path]
    if said.startswith("skipped: "):
        pytest.skip(said.removeprefix("skipped: "))
    if said and place.since and _version(metadata.version(place.package)) < _version(place.since):
        pytest.skip(f"{place.package} has it since {place.since}")
    assert not said


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def test_the_page_says_in_which_versions_a_place_was_found() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        page = import_module("make_private")
    finally:
        sys.path.pop(0)
    place = next(p for p in PLACES if p.since)
    case = f"tests.house.test_private_places::test_a_place_is_there[{place.path}]"
    new = {
        "package": place.package,
        "python": "3.11.7",
        "tests": "-m quick",
        "failed": [],
        "skipped": {},
    }
    of_trainer = {**new, "tests": "tests/integrations/trainers/test_lightning.py", "version": "1"}
    records = [
        {**new, "version": "2.1", "skipped": {f"{place.package} has it since {place.since}": 1}},
        {**new, "version": "2.2"},
        {**new, "version": "2.3", "failed": [case]},
        {**new, "version": "7", "package": "another"},
        of_trainer,
    ]
    assert page.versions(place, records) == "2.2; not in 2.1, 2.3"
    assert page.versions(place, []) == ""
    python = next(p for p in PLACES if p.package == "Python")
    assert page.versions(python, records) == "3.11.7"


# -- refusing ---------------------------------------------------------------------------------------


def test_a_version_is_refused_with_all_that_it_lacks() -> None:
    version = re.escape(metadata.version("torch"))
    with pytest.raises(
        errors.UsageError, match=rf"^torch {version} has no Linear\._gone, _lost, which holdfast"
    ):
        errors.need(
            "torch", import_module("torch").nn.Linear(1, 1), "_gone", "_parameters", "_lost"
        )
    for owner in ("torch.nn.nothing", "torch.nn.modules.module"):
        with pytest.raises(errors.UsageError, match=re.escape(f"has no {owner}._gone")):
            errors.need("torch", owner, "_gone")
    with pytest.raises(errors.UsageError, match=r"^Python 3\.\d+\.\d+\S* has no threading\._gone"):
        errors.need("Python", import_module("threading"), "_gone")
    with pytest.raises(errors.UsageError, match=r"^nothing \(of unknown version\) has no "):
        errors.need("nothing", ModuleType("nothing"), "_gone")


def test_what_is_there_is_returned() -> None:
    nn = import_module("torch").nn
    assert errors.need("torch", nn.Module, "_apply", "_parameters") == [nn.Module._apply, None]
    one = nn.Linear(1, 1)
    assert errors.need("torch", one, "_buffers")[0] is one._buffers


LACKING = """
import torch
{take_away}
try:
    {use}
except ValueError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("take_away", "use", "said"),
    [
        (
            "del torch._foreach_copy_",
            "import holdfast; holdfast.Checkpointer",
            "torch._foreach_copy_",
        ),
        (
            "del torch.nn.Module.__annotations__['_buffers']",
            "import holdfast; holdfast.save('root', {}, step=1)",
            "Module._buffers",
        ),
        (
            "from torch.distributed.elastic.rendezvous import dynamic_rendezvous as d; del d._delay",
            "import holdfast.launch.rendezvous",
            "torch.distributed.elastic.rendezvous.dynamic_rendezvous._delay",
        ),
        (
            "import torch.serialization as s; del s._load",
            "import holdfast; holdfast.dcp.save",
            "torch.serialization._load",
        ),
        (
            "import threading; del threading._register_atexit",
            "import holdfast.base.threads",
            "threading._register_atexit",
        ),
    ],
    ids=["copies", "modules", "rendezvous", "dcp", "Python"],
)
def test_nothing_begins_with_a_version_that_lacks_a_place(
    take_away: str, use: str, said: str
) -> None:
    code = LACKING.format(take_away=take_away, use=use)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    first = done.stdout.partition("\n")[0]
    assert re.fullmatch(rf"UsageError \w+ \S+ has no {re.escape(said)}, which .*", first), done
