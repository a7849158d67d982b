"""Each register that recovery in place resets is there, in the versions that are installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from typing import Any

import pytest

from holdfast.launch.registers import CHECKED, REGISTERS, Register

LOOK = """
import importlib, json, sys
from holdfast.launch.registers import REGISTERS, forget_groups, owner_of
there = []
for register in REGISTERS:
    if register.module.split(".")[0] == sys.argv[1]:
        importlib.import_module(register.module)
        there.append(owner_of(register) is not None)
forget_groups()
forget_groups()
print(json.dumps(there))
"""
"""In a process of its own: what a framework does when it is imported would stay in this one."""


def package_of(register: Register) -> str:
    return register.module.partition(".")[0]


def name(register: Register) -> str:
    return f"{register.module}.{register.path}"


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


@cache
def looked_at(package: str) -> tuple[dict[str, bool], str]:
    """Which registers of a package there are, and what resetting them has said.  Skips without it."""
    distribution = {"megatron": "megatron-core"}.get(package, package)
    try:
        installed = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed")
    if version(installed) < version(CHECKED[distribution]):
        pytest.skip(f"{distribution} {installed} is older than the table")
    done = subprocess.run(
        [sys.executable, "-c", LOOK, package], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names = [name(register) for register in REGISTERS if package_of(register) == package]
    there = json.loads(done.stdout.splitlines()[-1])
    said = "\n".join(line for line in done.stderr.splitlines() if line.startswith("holdfast:"))
    return dict(zip(names, there, strict=True)), said


def marks(package: str) -> Any:
    """Frameworks are not among the packages of development."""
    return () if package == "torch" else pytest.mark.soak


@pytest.mark.parametrize(
    "register", [pytest.param(one, marks=marks(package_of(one)), id=name(one)) for one in REGISTERS]
)
def test_a_register_is_there(register: Register) -> None:
    there, _ = looked_at(package_of(register))
    assert there[name(register)] == (not register.older), "has it gone, or come back?"


@pytest.mark.parametrize(
    "package",
    [pytest.param(one, marks=marks(one)) for one in sorted(set(map(package_of, REGISTERS)))],
)
def test_all_are_reset_without_a_word(package: str) -> None:
    assert looked_at(package)[1] == ""


def test_each_has_one_line_and_a_reason() -> None:
    assert len(set(map(name, REGISTERS))) == len(REGISTERS)
    assert all(register.reason for register in REGISTERS)
