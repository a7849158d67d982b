"""`holdfast VERB ...`: looks a verb up, runs it, and turns errors into messages and exit codes.

A verb is a module of this package with a function `run`; it is imported when it is called, so that no
verb waits for what another one needs.  Exit codes: 0 fine, 1 a problem was found, 2 usage.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import typer
from typer.core import TyperGroup

from holdfast.errors import (
    HoldfastError,
    HoldfastWarning,
    NotFound,
    NotRecoverable,
    UsageError,
)
from holdfast.near import near
from holdfast.version import __version__

VERBS = ("ls", "inspect", "verify", "diff", "plan", "convert", "prune", "log", "replay", "simulate",
         "agent")  # fmt: skip
_CALL = re.compile(r"^[a-z_.]*\((.*?=.*?)\): must be ", re.DOTALL)
"""Start of an error for an argument; who typed a command knows the argument, not the Python call."""


class Verbs(TyperGroup):
    """The verbs, by name.  Errors of holdfast end as one message and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"holdfast.cli.{cmd_name}")
        one = typer.Typer(add_completion=False, rich_markup_mode=None)
        one.command(cmd_name, no_args_is_help=True)(module.run)
        return typer.main.get_command(one)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            fail(
                f"there is no verb {args[0]!r}; there are {', '.join(VERBS)}", near(args[0], VERBS)
            )
            raise typer.Exit(2)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("always", HoldfastWarning)
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            try:
                return super().invoke(ctx)
            except HoldfastError as error:
                fail(*explained(error))
                raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None


def explained(error: HoldfastError) -> tuple[str, str | None]:
    """The message and the hint of an error, as a user of the command line needs them."""
    hint, error.hint = error.hint, None
    text = _CALL.sub(r"\1: must be ", str(error))
    if isinstance(error, NotRecoverable) and hint is not None and hint.startswith("check the path"):
        hint = "check the path: it must be the folder that holds steps/"
    if isinstance(error, NotFound) and error.key is not None and error.step is None:
        hint = hint or "it was deleted, or the path is not that of a checkpoint"
    return text, hint


def fail(message: str, hint: str | None) -> None:
    """One message on stderr."""
    typer.secho("error: ", nl=False, err=True, fg="red", bold=True)
    typer.echo(message, err=True)
    if hint:
        typer.secho(" hint: ", nl=False, err=True, fg="cyan", bold=True)
        typer.echo(hint, err=True)


def _show_warning(
    otherwise: Callable[..., object], message: Any, category: type[Warning], *where: Any
) -> None:
    """A warning of holdfast as a line on stderr; others as ever."""
    if not issubclass(category, HoldfastWarning):
        otherwise(message, category, *where)
        return
    typer.secho("warning: ", nl=False, err=True, fg="yellow", bold=True)
    typer.echo(str(message), err=True)


app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def holdfast(
    ctx: typer.Context,
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_version, help="Show the version."
    ),
) -> None:
    """Look at, verify, compare, convert and prune checkpoints; list and replay records; simulate
    failures; look after the agent of a node.

    URL is a folder of checkpoints; URL@STEP one step of it, URL alone the newest.
    Checkpoints of other systems are found by what is there, or named by a prefix: dcp:PATH,
    deepspeed:PATH, megatron:PATH, huggingface:PATH, torch:PATH.
    Exit codes: 0 fine, 1 a problem was found, 2 wrong usage.  All verbs take --json.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)


def main(*verb: str) -> None:
    """The console script, `python -m holdfast`, and with `verb` a module of a verb that is run itself."""
    try:
        app(args=[*verb, *sys.argv[1:]], prog_name="holdfast")
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        sys.exit(141)


if __name__ == "__main__":
    main()
