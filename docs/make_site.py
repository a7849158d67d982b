"""Put the pages of the site together: those of docs/, and those that are made from the code.

python docs/make_site.py [FOLDER]        by default build/docs, from which `make docs` builds build/site

What is made: the front page, which is README.md, the reference of the public names and of the commands,
the versions tested, the private places of others, the charts of speed.md, the drawings of how-it-works/,
and the list of decisions.  The repository keeps none of that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import make_api
import make_charts
import make_cli
import make_drawings
import make_private
import make_versions

import holdfast

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")


def assemble(site: Path) -> None:
    """Write all pages and pictures of the site into a folder, which is emptied first."""
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(DOCS, site, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    make_api.write(site / "reference" / "api")
    make_cli.write(site / "reference" / "cli")
    make_versions.write(site / "reference" / "versions.md")
    make_private.write(site / "reference" / "private.md")
    make_charts.write(site / "pictures")
    make_drawings.write(site / "pictures")
    (site / "decisions" / "index.md").write_text(list_of_decisions(site / "decisions"))
    for page in sorted(site.rglob("*.md")):
        source = DOCS / page.relative_to(site)
        page.write_text(moved(without_options(page.read_text()), source, page, site))
    front = without_options((ROOT / "README.md").read_text())
    page = site / "index.md"
    page.write_text(moved(with_facts(front), ROOT / "README.md", page, site))


def with_facts(front: str) -> str:
    """The front page with a line, below its first paragraph, of what README has no need to say: the
    version, and where the repository is."""
    title, about, rest = front.split("\n\n", 2)
    facts = [f"Version {holdfast.__version__}", "[changes](CHANGELOG.md)"]
    if address := repository():
        facts.append(f"[repository]({address})")
    return "\n\n".join([title, about, " · ".join(facts), rest])


def repository() -> str | None:
    """The address, for a browser, of the repository that this is a clone of; None if git knows none."""
    command = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return address_of(done.stdout.strip())


def address_of(origin: str) -> str | None:
    """`git@host.org:a/b.git` -> `https://host.org/a/b`, without user, password, port; None for a path."""
    way = r"(?:(?:https?|ssh|git)://)?(?:[^@/]+@)?"
    match = re.fullmatch(rf"{way}([\w-]+(?:\.[\w-]+)+)(?::\d+/|[:/])(.+?)(?:\.git)?/?", origin)
    return f"https://{match[1]}/{match[2]}" if match else None


def list_of_decisions(folder: Path) -> str:
    """The page that lists the decisions by number: a page is one, or has several in its sections."""
    rows = {}
    for page in sorted(folder.glob("[0-9]*.md")):
        text = page.read_text()
        title, date = re.match(r"# (.+)\n\n\*(.+)\*\n", text).groups()
        rows[int(page.name[:4])] = f"| {date} | [{title}]({page.name}) |"
        for number, title in re.findall(r"^## (\d+)\. (.+)$", text, re.MULTILINE):
            anchor = re.sub(r"[^\w\- ]", "", f"{number}. {title}".lower()).replace(" ", "-")
            rows[int(number)] = f"| {date} | [{title}]({page.name}#{anchor}) |"
    head = (folder / "index.md").read_text()
    lines = [line.replace("| ", f"| {number} | ", 1) for number, line in sorted(rows.items())]
    return "\n".join([head, "| number | date | decision |", "|---|---|---|", *lines, ""])


def without_options(text: str) -> str:
    """The page with the options of its code blocks left out; they are for the tests alone."""
    return re.sub(r"^```(\w+) .*$", r"```\1", text, flags=re.MULTILINE)


def moved(text: str, source: Path, page: Path, site: Path) -> str:
    """The text of `source` as that of `page`: each link leads from there to the page of the site, or to a
    copy of the repository's file in `files/`."""

    def link(match: re.Match[str]) -> str:
        file = (source.parent / match[1]).resolve()
        if re.match(r"[a-z]+:", match[1]):
            return match[1]
        if file.is_relative_to(DOCS):
            return os.path.relpath(site / file.relative_to(DOCS), page.parent)
        return os.path.relpath(copied(file, site), page.parent) if file.is_file() else match[1]

    return LINK.sub(link, text)


def copied(file: Path, site: Path) -> Path:
    """The copy of a file of the repository; of a page, with links that lead from there."""
    copy = site / "files" / file.relative_to(ROOT)
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        if file.suffix == ".md":
            copy.write_text(moved(without_options(file.read_text()), file, copy, site))
    return copy


if __name__ == "__main__":
    assemble(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs")
