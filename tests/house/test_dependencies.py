"""`pip install holdfast` brings at most eight packages, with those that they need themselves."""

from __future__ import annotations

import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
MOST = 8


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def closure(requirements: list[str]) -> set[str]:
    """The packages that pip installs for some requirements, by what is installed here."""
    found: set[str] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        one = todo.pop()
        extras = one.extras or {""}
        if one.marker and not one.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(one.name)
        if name in found:
            continue
        found.add(name)
        for needed in map(Requirement, requires(name) or []):
            if not needed.marker or any(needed.marker.evaluate({"extra": e}) for e in extras):
                needed.marker = None
                todo.append(needed)
    return found


def test_few_packages_are_installed() -> None:
    needed = closure(project()["dependencies"])
    assert "numpy" in needed and "rich" in needed and "mdurl" in needed  # needs of needs count
    assert len(needed) <= MOST, sorted(needed)


def test_what_one_tier_or_format_needs_comes_with_its_extra() -> None:
    own = {canonicalize_name(Requirement(text).name) for text in project()["dependencies"]}
    extras = project()["optional-dependencies"]
    for name, extra in (("torch", "torch"), ("aiohttp", "memory"), ("cryptography", "tls")):
        assert name not in own
        assert any(Requirement(text).name == name for text in extras[extra])
