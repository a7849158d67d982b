"""The result of a verb, and its writing: lines, tables and bars for people, JSON for programs.

Names, labels and messages may come from anybody's checkpoint.  So what is no visible character is written
as its escape, in JSON as well, and no text but a line of ours begins at the left margin.

rich is imported when a bar or a table too wide for the terminal is drawn, and not before (60 ms).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from shutil import get_terminal_size
from typing import Any, TextIO

from holdfast.base.errors import printable
from holdfast.cli.words import MARKS, STYLE, dim, style

Row = Sequence[str | int]
"""Cells of a table's line.  Numbers are written with commas; cells that lack at the end are empty."""


@dataclass(frozen=True, slots=True)
class Result:
    """The findings of a verb, for programs and for people."""

    data: Callable[[], object]
    """Returns what `--json` prints: plain values, dataclasses and structs."""
    show: Callable[[], object]
    """Writes the same for people."""
    exit_code: int = 0
    is_quiet: bool = False
    """True on a rank that writes nothing, as another one does."""


def deliver(result: Result, as_json: bool) -> int:
    """Write what a verb has found; returns the exit code."""
    if result.is_quiet:
        return result.exit_code
    if as_json:
        import msgspec

        found = result.data()
        try:
            data = msgspec.json.encode(found, enc_hook=_plain)
        except UnicodeEncodeError:  # a name of others has half of a surrogate pair
            plain = msgspec.to_builtins(found, enc_hook=_plain, str_keys=True)
            data = msgspec.json.encode(_in_utf8(plain))
        text = msgspec.json.format(data, indent=2).decode()
        print("".join(c if c.isprintable() or c == "\n" else _in_json(c) for c in text), flush=True)
    else:
        result.show()
    return result.exit_code


def _in_utf8(tree: Any) -> Any:
    """The tree, with `\\udc80` for what is no UTF-8."""
    if isinstance(tree, str):
        return tree.encode("utf-8", "backslashreplace").decode()
    if isinstance(tree, dict):
        return {_in_utf8(key): _in_utf8(value) for key, value in tree.items()}
    return [*map(_in_utf8, tree)] if isinstance(tree, (list, tuple)) else tree


def _in_json(char: str) -> str:
    import json

    return json.dumps(char)[1:-1]


def _plain(value: Any) -> Any:
    import io

    import numpy as np

    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    return value.item() if isinstance(value, np.generic) else repr(value)


def say(text: str = "", *styles: str, file: TextIO | None = None) -> None:
    """A line on stdout, in colour on terminals.  Lines after the first are indented."""
    file = file or sys.stdout
    first, *others = (style(text, *styles) if styles else text).split("\n")
    lines = [first, *(line if line.startswith(" ") else f"  {line}" for line in others)]
    is_terminal = file.isatty()
    print("\n".join(_shown(line, is_terminal) for line in lines), file=file, flush=True)


def say_lines(text: str, *styles: str) -> None:
    """The lines of a text of ours on stdout."""
    for line in text.split("\n"):
        say(line, *styles)


def _shown(line: str, in_colour: bool) -> str:
    """A line as it is written: what is no visible character as its escape, styles by sequences or not at
    all."""
    parts = STYLE.split(line)  # texts and numbers of styles, in turns
    codes = [f"\x1b[{code}m" if in_colour else "" for code in parts[1::2]]
    return "".join([a + b for a, b in zip(map(printable, parts[::2]), [*codes, ""])])


def heading(text: str) -> None:
    say()
    say(text, "bold")


def fields(rows: Sequence[tuple[str, str]]) -> None:
    """Aligned `name  value` lines."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        say(dim(f"{name:<{width}}  ") + value)


def table(columns: Sequence[str], rows: Sequence[Row], *, indent: int = 2) -> None:
    """Rows under column names; a name that begins with `>` is that of a right-aligned column.

    Where the terminal is too narrow, rich folds the cells.
    """
    names = [c.lstrip(">") for c in columns]
    lines = [
        [f"{cell:,}" if isinstance(cell, int) else printable(cell, MARKS) for cell in row]
        + [""] * (len(names) - len(row))
        for row in rows
    ]
    widths = [max(_width(cell) for cell in column) for column in zip(names, *lines)]
    width = indent + sum(widths) + 2 * len(widths)
    if sys.stdout.isatty() and width > get_terminal_size().columns:
        _folded_table(columns, widths, lines, indent)
        return
    for cells in [[dim(name) for name in names], *lines]:
        padded = []
        for cell, width, column in zip(cells, widths, columns):
            space = " " * (width - _width(cell))
            padded.append(space + cell if column.startswith(">") else cell + space)
        say(" " * indent + "  ".join(padded).rstrip())


def _width(text: str) -> int:
    return len(STYLE.sub("", text))


def _folded_table(
    columns: Sequence[str], widths: list[int], rows: list[list[str]], indent: int
) -> None:
    """The two widest columns are folded; numbers and types stay whole."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    wide = sorted(widths)[-2:]
    for column, width in zip(columns, widths):
        side: Any = "right" if column.startswith(">") else "left"
        drawn.add_column(
            column.lstrip(">"), justify=side, overflow="fold", no_wrap=width not in wide
        )
    for row in rows:
        drawn.add_row(*(Text.from_ansi(_shown(cell, True)) for cell in row))
    Console(highlight=False).print(Padding(drawn, (0, 0, 0, indent)))


@contextmanager
def phases(is_quiet: bool = False) -> Iterator[Callable[[str, int, int], object] | None]:
    """A bar on stderr for each phase of some work, if stderr is a terminal.

    Yields what is told of the phase, the bytes done and all bytes; None where nothing is drawn.
    """
    if is_quiet or not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich
    from rich.console import Console
    from rich.theme import Theme

    columns = (rich.TextColumn("{task.description:>9}"), rich.BarColumn(), rich.DownloadColumn(),
               rich.TransferSpeedColumn(), rich.TimeRemainingColumn())  # fmt: skip
    console = Console(
        stderr=True, theme=Theme({"progress.data.speed": "green"})
    )  # red is for faults
    with rich.Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def advance(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            bar.advance(tasks[phase], done)

        yield advance


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar on stderr while bytes are done; yields what is told of them."""
    with phases() as advance:
        yield lambda num_bytes: advance(what, num_bytes, total) if advance else None
