"""Make the reference of the commands: one page each, from what the command says of itself and from the
commands that other pages show, which the tests run.

python docs/make_site.py
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from holdfast.cli.main import LAUNCH
from holdfast.cli.options import Parser
from holdfast.cli.verbs import VERBS

DOCS = Path(__file__).parent
ROOT = DOCS.parent
MOST = 5
"""Examples on a page."""


@dataclass(frozen=True)
class Example:
    """A command that a page shows, with what it prints, as far as the page shows that."""

    page: Path
    command: str
    output: str

    @property
    def verb(self) -> str:
        return self.command.split()[1]


def write(folder: Path) -> None:
    """Write a page for each command into a folder of the site, which lies two below its pages."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = list(examples())
    for verb in (*VERBS, LAUNCH):
        own = [example for example in shown if example.verb == verb]
        (folder / f"{verb}.md").write_text("\n".join([f"# holdfast {verb}\n", *parts(verb, own)]))


def parts(verb: str, own: list[Example]) -> Iterator[str]:
    """The parts of a command's page."""
    about, usage, groups = described(verb)
    yield f"{about}\n\n```text\nUsage: {usage}\n```\n"
    yield "## Examples\n"
    for page in dict.fromkeys(example.page for example in chosen(own)):
        lines = [f"$ {e.command}{e.output}" for e in chosen(own) if e.page == page]
        yield "\n".join(["```console", *lines, "```"])
        yield f"\nFrom [{title_of(page)}]({link_to(page)}), whose commands the tests run.\n"
    for title, rows in groups:
        name = "argument" if title == "Arguments" else "option"
        yield f"## {title}\n\n| {name} | meaning |\n|---|---|"
        yield "\n".join(f"| {cell(a)} | {cell(b)} |" for a, b in rows) + "\n"


def chosen(own: list[Example]) -> list[Example]:
    """The examples that are shown: first those with output, each command once."""
    once = {example.command: example for example in reversed(own)}
    ordered = [example for example in own if once.get(example.command) is example]
    return sorted(ordered, key=lambda example: not example.output)[:MOST]


def described(verb: str) -> tuple[str, str, list[tuple[str, list[tuple[str, str]]]]]:
    """What a command does, its usage, and by group its arguments and options with their meaning."""
    if verb == LAUNCH:
        found = import_module("holdfast.launch.command").parser()
        groups = [group for group in found._action_groups if group._group_actions]
        titles = {
            "holdfast": "Options of holdfast",
            "options": "Options of torchrun",
            "positional arguments": "Arguments",
        }
        order = sorted(groups, key=lambda g: (g.title != "positional arguments", g.title))
        usage = "holdfast run [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]"
        about = f"{found.description} It takes torchrun's options, and four more."
        return about, usage, [(titles.get(g.title, g.title), rows_of(g)) for g in order]
    run = VERBS[verb].run
    parser = Parser(verb, run)
    usage = f"holdfast {verb} [OPTIONS] {' '.join(parser.words)}"
    both = [*parser.arguments._action_groups, *parser.options._action_groups]
    filled = [(str(g.title), rows_of(g)) for g in both if g._group_actions]
    return inspect.getdoc(run) or "", usage, filled


def rows_of(group: argparse._ArgumentGroup) -> list[tuple[str, str]]:
    """Each argument or option of a group, and its meaning."""
    formatter, rows = argparse.HelpFormatter(""), []
    for action in group._group_actions:
        if action.help == argparse.SUPPRESS:
            continue
        names = [name for name in action.option_strings if "_" not in name] or action.option_strings
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        text = ", ".join(names) + value if names else str(action.metavar or action.dest)
        help = formatter._expand_help(action) if action.help else ""
        rows.append((f"`{text}`", " ".join(help.split())))
    return rows


def cell(text: str) -> str:
    """A text as it may stand in a table."""
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text


# -- examples -------------------------------------------------------------------------------------


def examples() -> Iterator[Example]:
    """The commands of holdfast that pages show, page by page."""
    pages = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
    for page in pages:
        for block in re.findall(r"^```console.*\n((?:.*\n)*?)```$", page.read_text(), re.MULTILINE):
            for text in re.split(r"^(?=\$ )", block, flags=re.MULTILINE):
                if text.startswith("$ holdfast "):
                    lines = text.rstrip().splitlines()
                    last = next(i for i, line in enumerate(lines) if not line.endswith("\\"))
                    command = "\n".join(lines[: last + 1])
                    output = "".join(f"\n{line}" for line in lines[last + 1 :])
                    yield Example(page, command.removeprefix("$ "), output)


def title_of(page: Path) -> str:
    """The heading of a page."""
    return page.read_text().partition("\n")[0].removeprefix("# ")


def link_to(page: Path) -> str:
    """The way to a page from one of these; README is the front page."""
    target = DOCS / "index.md" if page.parent == ROOT else page
    return os.path.relpath(target, DOCS / "reference" / "cli")
