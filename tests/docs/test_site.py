"""The site is whole: paragraphs are short, and every page is in the contents.

Prose is what stands in paragraphs and lists.  Headings, tables, code blocks and pages that a program writes
are not counted.  Links are followed by `make docs`, and by `test_docs`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from docs.test_docs import DOCS, ROOT, name_of, without_code
from holdfast.cli.main import LAUNCH
from holdfast.cli.verbs import VERBS

MOST_IN_A_PARAGRAPH = 120
WRITTEN = [p for p in sorted(DOCS.rglob("*.md")) if p.name != "strangers.md"]
"""The pages that people write; strangers.md is written by `python -m strangers.table`."""


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs and items of lists of a page."""
    for block in re.split(r"\n\s*\n|\n(?=[*-] |\d+\. )", without_code(text)):
        lines = [line for line in block.splitlines() if not line.startswith("|")]
        words = " ".join(lines).strip()
        if words and not words.startswith(("#", "![")):
            yield words


@pytest.mark.parametrize("page", [pytest.param(p, id=name_of(p)) for p in WRITTEN])
def test_paragraphs_are_short(page: Path) -> None:
    for text in paragraphs(page.read_text()):
        assert len(text.split()) <= MOST_IN_A_PARAGRAPH, text


@pytest.mark.parametrize("page", [pytest.param(p, id=name_of(p)) for p in WRITTEN])
def test_lists_and_tables_begin_after_an_empty_line(page: Path) -> None:
    """The site's Markdown would take them for the paragraph before."""
    lines = without_code(page.read_text()).splitlines()
    for before, line in zip(lines, lines[1:]):
        for mark in (r"(\* |\d+\. )", r"\|"):
            begins = re.match(mark, line) and not re.match(mark, before)
            assert not (begins and before.strip() and not before.startswith(" ")), line


def test_every_page_is_in_the_contents() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = set(pages_of(settings["nav"]))
    there = {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")}
    assert there - listed == {n for n in there if re.match(r"decisions/\d", n)}
    made = {page for page in listed - there if not page.startswith("reference/")}
    assert made == {"index.md"}  # which is README


def test_every_command_is_in_the_contents() -> None:
    """Their pages are made for the site; README and the page about looking name them all, too."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    verbs = (*VERBS, LAUNCH)
    listed = [page for page in pages_of(settings["nav"]) if page.startswith("reference/cli/")]
    assert listed == [f"reference/cli/{verb}.md" for verb in verbs]
    for page in (ROOT / "README.md", DOCS / "how-to" / "look.md"):
        named = re.findall(r"(?:`|\$ holdfast )([a-z]+)\b", page.read_text())
        assert sorted(set(verbs) - set(named)) == [], name_of(page)


def pages_of(nav: object) -> Iterator[str]:
    """The pages of a part of the contents."""
    if isinstance(nav, str):
        yield nav
    for part in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from pages_of(part)


def test_decisions_are_numbered_and_dated() -> None:
    """Each number is there once: as a page, as a section of one, or as what another page says."""
    elsewhere = (DOCS / "decisions" / "index.md").read_text()
    rows = re.findall(r"^\| (\d[\d, ]*) \| \[", elsewhere, re.MULTILINE)
    numbers = [int(number) for row in rows for number in row.split(",")]
    for page in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        text = page.read_text()
        day = r"\d{4}-\d\d-\d\d"
        assert re.match(rf"# \S.*\n\n\*{day}( to {day})?\*\n\n\S", text), page.name
        sections = re.findall(r"^## (\d+)\. \S", text, re.MULTILINE)
        assert not sections or int(sections[0]) == int(page.name[:4]), page.name
        numbers += [int(number) for number in sections or [page.name[:4]]]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
