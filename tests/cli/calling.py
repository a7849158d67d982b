"""The command line, called in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from holdfast.cli.main import app


def call(*args: object) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def call_json(*args: object) -> tuple[int, Any]:
    code, out, _ = call(*args, "--json")
    return code, json.loads(out)
