"""The table of what `make test` runs is true."""

from __future__ import annotations

import re

import pytest

from gate import KEPT, TESTS


def test_every_pattern_keeps_something(request: pytest.FixtureRequest) -> None:
    files = {file for file in KEPT if not (TESTS / file).is_file()}
    assert not files, "no such files"
    source = {file: (TESTS / file).read_text() for file in KEPT}
    for file, patterns in KEPT.items():
        names = re.findall(r"^def (test_\w+)", source[file], re.MULTILINE)
        for pattern in patterns:
            of_names = pattern.split(r"\[")[0]
            assert any(re.fullmatch(of_names, name) for name in names), f"{file}: {pattern}"
