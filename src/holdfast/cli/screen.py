"""Helpers that verbs share: how a step is named, how numbers are written, tables, progress, JSON.

rich is imported when a table or a bar is drawn, and not before.
"""

from __future__ import annotations

import calendar
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.arguments import shown, step_of
from holdfast.cli.targets import is_folder
from holdfast.errors import UsageError
from holdfast.sizes import size_text

if TYPE_CHECKING:
    from holdfast.checkpoint.opened import Checkpoint
    from holdfast.store import Store

Target = Annotated[str, typer.Argument(metavar="URL[@STEP]", help="A folder, or a step of it.")]
Root = Annotated[str, typer.Argument(metavar="URL", help="The folder that holds the steps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
ShowAll = Annotated[bool, typer.Option("--all", help="Leave nothing out.")]
MAX_DIGITS = 40
"""Most digits of a step that is typed; ten are enough."""


def split_target(text: str) -> tuple[str, int | None]:
    """`runs/gpt@1000` -> ("runs/gpt", 1000); no step: None.  UsageError if it can mean two things."""
    url, at, step = text.rpartition("@")
    if not at or not url:
        return text, None
    if step.isascii() and step.isdigit() and len(step) <= MAX_DIGITS:
        number = step_of(int(step), "", "step")
        return (text, None) if is_folder(text, url, number) else (url, number)
    if os.path.isdir(url) and not os.path.lexists(text):
        raise UsageError(
            f"{text[:200]}: {shown(step)} is no step",
            hint=f"URL@STEP, such as {url[:200]}@1000; `holdfast ls` lists steps",
        )
    return text, None


def opened(target: str, *, verify: bool = True) -> Checkpoint:
    """The step that a target names, ours or foreign."""
    from holdfast.looking import open

    url, step = split_target(target)
    return open(url, step=step, verify=verify)


def root_of_records(url: str) -> Store:
    """A root of our own; UsageError for a foreign checkpoint, which has no records."""
    from holdfast.interop.detect import detect
    from holdfast.store import open_store

    foreign = detect(url)
    if foreign is not None:
        raise UsageError(f"{url} is a {foreign} checkpoint, which has no records")
    return open_store(url)


# -- words ----------------------------------------------------------------------------------------


size = size_text


def many(count: int, noun: str, plural: str | None = None) -> str:
    """`1 tensor`, `60,000 tensors`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def age_s(created: str) -> float | None:
    """Seconds since a time that a manifest states; None if it states none."""
    try:
        return max(time.time() - calendar.timegm(time.strptime(created, "%Y-%m-%dT%H:%M:%SZ")), 0)
    except ValueError:
        return None


def age(created: str) -> str:
    """`3 h ago`."""
    seconds = age_s(created)
    if seconds is None:
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (unit == "min" and seconds >= length):
            return f"{int(seconds // length)} {unit} ago"
    return "just now" if seconds < 10 else f"{int(seconds)} s ago"


def shape_text(shape: Sequence[int]) -> str:
    return " × ".join(f"{n:,}" for n in shape) if shape else "scalar"


def ranks_text(ranks: Sequence[int], most: int = 6) -> str:
    """`0–3, 8`: runs of ranks; long lists are cut."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in runs]
    if len(texts) > most:
        return ", ".join(texts[: most - 1]) + f", … ({len(ranks):,} ranks)"
    return ", ".join(texts)


# -- output ---------------------------------------------------------------------------------------


def say(text: str = "", *, style: str | None = None) -> None:
    """A line on stdout; `style` is a colour, or `bold` or `dim`, on terminals."""
    if style in ("bold", "dim"):
        typer.echo(typer.style(text, **{style: True}))
    else:
        typer.echo(typer.style(text, fg=style) if style else text)


def heading(text: str) -> None:
    say()
    say(text, style="bold")


def fields(rows: Sequence[tuple[str, str]]) -> None:
    """Aligned `name  value` lines."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        typer.echo(typer.style(f"{name:<{width}}  ", dim=True) + value)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, indent: int = 2) -> None:
    """Rows under column names; a name that begins with `>` is that of a right-aligned column.

    Where the terminal is too narrow, rich folds the cells; else rich is not loaded (60 ms).
    """
    names = [c.lstrip(">") for c in columns]
    right = [c.startswith(">") for c in columns]
    widths = [max(_width(cell) for cell in column) for column in zip(names, *rows)]
    if sys.stdout.isatty():
        if indent + sum(widths) + 2 * len(widths) > get_terminal_size().columns:
            _folded_table(names, right, widths, rows, indent)
            return
    lines = [[dim(name) for name in names], *rows]
    for cells in lines:
        padded = [
            " " * (w - _width(c)) + c if r else c + " " * (w - _width(c))
            for c, w, r in zip(cells, widths, right)
        ]
        typer.echo(" " * indent + "  ".join(padded).rstrip())


def _width(text: str) -> int:
    return len(re.sub(r"\x1b\[[0-9;]*m", "", text))


def _folded_table(
    names: list[str],
    right: list[bool],
    widths: list[int],
    rows: Sequence[Sequence[str]],
    indent: int,
) -> None:
    """The two widest columns are folded; numbers and types stay whole."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    wide = sorted(widths)[-2:]
    for name, on_right, width in zip(names, right, widths):
        drawn.add_column(
            name,
            justify="right" if on_right else "left",
            overflow="fold",
            no_wrap=width not in wide,
        )
    for row in rows:
        drawn.add_row(*(Text.from_ansi(cell) for cell in row))
    Console(highlight=False).print(Padding(drawn, (0, 0, 0, indent)))


def good(text: str) -> str:
    return typer.style(text, fg="green")


def bad(text: str) -> str:
    return typer.style(text, fg="red")


def dim(text: str) -> str:
    return typer.style(text, dim=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value, enc_hook=_plain), indent=2).decode())


def _plain(value: Any) -> Any:
    import numpy as np

    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return value.item()
    return repr(value)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar on stderr while bytes are done, if stderr is a terminal; yields what is told of them."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(),
        TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
