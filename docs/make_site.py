"""Put the pages of the site together: those of docs/, and those that are made from the code.

python docs/make_site.py [FOLDER]        by default build/docs, from which `make docs` builds build/site

What is made: the reference of the public names and of the commands, the versions tested, the charts of
speed.md, the drawings of how-it-works/, and the list of decisions.  The repository keeps none of that.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import make_api
import make_charts
import make_cli
import make_drawings
import make_versions

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
    make_charts.write(site / "pictures")
    make_drawings.write(site / "pictures")
    (site / "decisions" / "index.md").write_text(list_of_decisions(site / "decisions"))
    for page in site.rglob("*.md"):
        page.write_text(with_files(without_options(page.read_text()), page, site))


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


def with_files(text: str, page: Path, site: Path) -> str:
    """The page with copies of the files of the repository, outside of docs/, to which it has links."""
    source = (DOCS / page.relative_to(site)).parent

    def link(match: re.Match[str]) -> str:
        file = (source / match[1]).resolve()
        if re.match(r"[a-z]+:", match[1]) or file.is_relative_to(DOCS) or not file.is_file():
            return match[1]
        copy = site / "files" / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        return "../" * len(page.relative_to(site).parts[1:]) + str(copy.relative_to(site))

    return LINK.sub(link, text)


if __name__ == "__main__":
    assemble(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs")
