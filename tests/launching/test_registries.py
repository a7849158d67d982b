"""Each registry that recovery in place resets is there, in the versions that are installed."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import metadata
from typing import Any

import pytest

import zygote
from holdfast.launch.registries import CHECKED, REGISTRIES, Registry

LOOK = """
import importlib, json, sys
from holdfast.launch.registries import REGISTRIES, forget_groups, owner_of
there = []
for registry in REGISTRIES:
    if registry.module.split(".")[0] == sys.argv[1]:
        importlib.import_module(registry.module)
        there.append(owner_of(registry) is not None)
forget_groups()
forget_groups()
print(json.dumps(there))
"""
"""In a process of its own: what a framework does when it is imported would stay in this one."""


def package_of(registry: Registry) -> str:
    return registry.module.partition(".")[0]


def name(registry: Registry) -> str:
    return f"{registry.module}.{registry.path}"


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


@cache
def looked_at(package: str) -> tuple[dict[str, bool], str]:
    """Which registries of a package there are, and what resetting them has said.  Skips without it."""
    distribution = {"megatron": "megatron-core"}.get(package, package)
    try:
        installed = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed")
    if version(installed) < version(CHECKED[distribution]):
        pytest.skip(f"{distribution} {installed} is older than the table")
    done = zygote.run(["-c", LOOK, package])
    assert done.returncode == 0, done.stderr
    names = [name(registry) for registry in REGISTRIES if package_of(registry) == package]
    there = json.loads(done.stdout.splitlines()[-1])
    said = "\n".join(line for line in done.stderr.splitlines() if line.startswith("holdfast:"))
    return dict(zip(names, there, strict=True)), said


def marks(package: str) -> Any:
    """Frameworks are not among the packages of development."""
    return () if package == "torch" else pytest.mark.soak


@pytest.mark.parametrize(
    "registry",
    [pytest.param(one, marks=marks(package_of(one)), id=name(one)) for one in REGISTRIES],
)
def test_a_registry_is_there(registry: Registry) -> None:
    there, _ = looked_at(package_of(registry))
    assert there[name(registry)] == (not registry.older), "has it gone, or come back?"


@pytest.mark.parametrize(
    "package",
    [pytest.param(one, marks=marks(one)) for one in sorted(set(map(package_of, REGISTRIES)))],
)
def test_all_are_reset_without_a_word(package: str) -> None:
    assert looked_at(package)[1] == ""


def test_each_has_one_line_and_a_reason() -> None:
    assert len(set(map(name, REGISTRIES))) == len(REGISTRIES)
    assert all(registry.reason for registry in REGISTRIES)
