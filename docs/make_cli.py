"""Make the reference of the commands: one page each, from what the command says of itself.

python docs/make_site.py
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from unittest import mock

from holdfast.cli.main import LAUNCH, VERBS, main

COLUMNS = "96"


def write(folder: Path) -> None:
    """Write a page for each command into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for verb in (*VERBS, LAUNCH):
        text = f"# holdfast {verb}\n\n```text\n{help_of(verb)}\n```\n"
        (folder / f"{verb}.md").write_text(text)


def help_of(verb: str) -> str:
    """What `holdfast VERB --help` prints."""
    printed = io.StringIO()
    words = ["holdfast", verb, "--help"]
    plain = {"COLUMNS": COLUMNS, "TERMINAL_WIDTH": COLUMNS, "NO_COLOR": "1", "TERM": "dumb"}
    patched = mock.patch.object(sys, "argv", words), mock.patch.dict(os.environ, plain)
    with patched[0], patched[1], redirect_stdout(printed), suppress(SystemExit):
        main()
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())
