"""Every event that is told is in the reference."""

from __future__ import annotations

import re
from pathlib import Path

import holdfast

ROOT = Path(__file__).parents[2]
TOLD = re.compile(r"""\b(?:emit|span)\(\s*"([a-z_.]+)\"""")


def test_the_page_of_events_names_all() -> None:
    sources = Path(holdfast.__file__).parent.rglob("*.py")
    told = {name for path in sources for name in TOLD.findall(path.read_text())}
    assert len(told) > 40
    page = (ROOT / "docs" / "reference" / "events.md").read_text()
    assert sorted(name for name in told if f"`{name}`" not in page) == []
