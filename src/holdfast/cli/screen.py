"""Writes the result of a verb: lines, tables and progress bars for people, JSON for programs.

Names, labels and messages may come from a stranger's checkpoint.  So invisible characters are escaped, in
JSON too, and only our own lines begin at the left margin.

rich takes 60 ms to import: it is imported only to draw a progress bar, or a table wider than the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from shutil import get_terminal_size
from typing import Any, TextIO

from holdfast.base.errors import printable
from holdfast.cli.words import STYLE, STYLE_MARKS, dim, style

TableRow = Sequence[str | int]
"""Cells of a row.  Numbers are written with commas; missing cells at the end are empty."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a verb, for programs and for people."""

    data: Callable[[], object]
    """Returns what `--json` prints: plain values, dataclasses and structs."""
    show: Callable[[], object]
    """Writes the same for people."""
    exit_code: int = 0
    is_quiet: bool = False
    """True on ranks that print nothing, since the first rank does."""


def deliver(result: Result, as_json: bool) -> int:
    """Print the result of a verb; return the exit code."""
    if result.is_quiet:
        return result.exit_code
    if as_json:
        import msgspec

        found = result.data()
        try:
            data = msgspec.json.encode(found, enc_hook=_plain)
        except (TypeError, UnicodeEncodeError):  # a key, or half a surrogate pair, that JSON lacks
            plain = msgspec.to_builtins(_with_text_keys(found), enc_hook=_plain, str_keys=True)
            data = msgspec.json.encode(_in_utf8(plain))
        text = msgspec.json.format(data, indent=2).decode()
        print("".join(c if c.isprintable() or c == "\n" else _in_json(c) for c in text), flush=True)
    else:
        result.show()
    return result.exit_code


def _with_text_keys(tree: Any) -> Any:
    """Return the tree with a text for each key that is neither a text nor a number, such as a tuple."""
    if isinstance(tree, dict):
        pairs = ((k, _with_text_keys(value)) for k, value in tree.items())
        return {k if type(k) in (str, int, float) else repr(k): value for k, value in pairs}
    return [*map(_with_text_keys, tree)] if isinstance(tree, (list, tuple)) else tree


def _in_utf8(tree: Any) -> Any:
    """Return the tree with escapes such as `\\udc80` for characters that UTF-8 lacks."""
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
    """Print a text on stdout, in colour on terminals, with lines after the first indented."""
    file = file or sys.stdout
    first, *others = (style(text, *styles) if styles else text).split("\n")
    lines = [first, *(line if line.startswith(" ") else f"  {line}" for line in others)]
    is_terminal = file.isatty()
    print("\n".join(_shown(line, is_terminal) for line in lines), file=file, flush=True)


def say_lines(text: str, *styles: str) -> None:
    """Print each line of our own text on stdout."""
    for line in text.split("\n"):
        say(line, *styles)


def _shown(line: str, in_colour: bool) -> str:
    """Return a line for output: invisible characters escaped, styles as escape sequences or left out."""
    parts = STYLE.split(line)  # texts and numbers of styles, in turns
    codes = [f"\x1b[{code}m" if in_colour else "" for code in parts[1::2]]
    return "".join([a + b for a, b in zip(map(printable, parts[::2]), [*codes, ""])])


def heading(text: str) -> None:
    say()
    say(text, "bold")


def fields(rows: Sequence[tuple[str, str]]) -> None:
    """Print aligned `name  value` lines."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        say(dim(f"{name:<{width}}  ") + value)


def table(columns: Sequence[str], rows: Sequence[TableRow], *, indent: int = 2) -> None:
    """Print rows under column names; a name with a leading `>` makes the column right-aligned.

    If the terminal is too narrow, rich folds the cells.
    """
    names = [c.lstrip(">") for c in columns]
    lines = [
        [f"{cell:,}" if isinstance(cell, int) else printable(cell, STYLE_MARKS) for cell in row]
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
    """Print a table with its two widest columns folded; numbers and types stay whole."""
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
    """Draw a progress bar on stderr for each phase of some work, if stderr is a terminal.

    Yields the function to call with the phase, the bytes done and the total; None if nothing is drawn.
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
    """Draw a progress bar on stderr; yields the function to call with the number of bytes done."""
    with phases() as advance:
        yield lambda num_bytes: advance(what, num_bytes, total) if advance else None
