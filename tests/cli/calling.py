"""The command line, called in this process."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

from holdfast.cli.main import run


def call(*args: object) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = run([str(a) for a in args])
        except SystemExit as ended:  # --help, and the agent in the foreground
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


def call_json(*args: object) -> tuple[int, Any]:
    code, out, _ = call(*args, "--json")
    return code, json.loads(out)
