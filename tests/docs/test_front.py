"""The front page of the site is README, and all links of the site lead somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast
from docs.test_docs import DOCS, ROOT, without_code

LINK = re.compile(r"\]\(([^)\s#]+)")


def words(text: str) -> list[str]:
    """A page's words without the targets of its links and the options of its blocks."""
    plain = re.sub(
        r"\]\([^)]*\)", "]", re.sub(r"^```(\w+) .*$", r"```\1", text, flags=re.MULTILINE)
    )
    return plain.split()


def test_the_front_page_is_readme_with_the_version(site: Path) -> None:
    front = (site / "index.md").read_text()
    (facts,) = re.findall(r"^Version .*\n\n", front, re.MULTILINE)
    assert facts.startswith(f"Version {holdfast.__version__} · [changes](files/CHANGELOG.md)")
    assert words(front.replace(facts, "")) == words((ROOT / "README.md").read_text())
    assert "$ pip install '.[torch]'" in front
    assert "](pictures/demo.png)" in front


def test_the_front_page_names_the_repository(make_site: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(make_site, "repository", lambda: "https://host.org/a/b")
    front = make_site.with_facts("# holdfast\n\nWhat it is.\n\nThe rest.\n")
    title, about, facts, rest = front.split("\n\n")
    assert (title, about, rest) == ("# holdfast", "What it is.", "The rest.\n")
    assert facts.endswith(" · [repository](https://host.org/a/b)")
    monkeypatch.setattr(make_site, "repository", lambda: None)
    assert "repository" not in make_site.with_facts("# holdfast\n\nWhat.\n\nRest.\n")


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://host.org/a/b.git", "https://host.org/a/b"),
        ("https://user:secret@host.org/a/b", "https://host.org/a/b"),
        ("git@host.org:a/b.git", "https://host.org/a/b"),
        ("ssh://git@host.org:2222/a/b.git", "https://host.org/a/b"),
        ("/srv/git/b.git", None),
        ("../b", None),
        ("", None),
    ],
)
def test_the_address_of_the_repository_has_no_secret(
    make_site: Any, origin: str, address: str | None
) -> None:
    assert make_site.address_of(origin) == address


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    """Those of pages that are made or copied, too."""
    broken = [
        f"{page.relative_to(site)}: {target}"
        for page in site.rglob("*.md")
        for target in LINK.findall(without_code(page.read_text()))
        if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists()
    ]
    assert broken == []


def test_the_site_needs_only_the_extra_for_it(tmp_path: Path) -> None:
    """In a clone without .venv `make docs` installs `[docs]`; with one it installs nothing more."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy2(ROOT / name, tmp_path / name)
    plan = ["make", "--dry-run", "--directory", str(tmp_path), "docs"]
    fresh = subprocess.run(plan, capture_output=True, text=True, check=True).stdout
    assert "'.[docs]'" in fresh and ".[dev]" not in fresh
    assert ".venv-docs/bin/zensical build" in fresh
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".ready").touch()
    there = subprocess.run(plan, capture_output=True, text=True, check=True).stdout
    assert "pip install" not in there and ".venv/bin/zensical build" in there


def test_what_makes_the_site_imports_nothing_else(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(DOCS)!r})
for name in ("accelerate", "deepspeed", "hypothesis", "lightning", "megatron", "pytest", "safetensors",
             "transformers", "torchtitan", "obstore", "cryptography", "yaml"):
    sys.modules[name] = None  # as if it were not there
import make_site, pathlib
make_site.assemble(pathlib.Path({str(tmp_path / "docs")!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
