"""`holdfast VERB ...`: finds the verb, runs it, and turns errors into messages and exit codes.

`verbs` says how each is called.  Exit codes: 0 fine, 1 a problem was found, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from holdfast.base.errors import (
    HoldfastError,
    HoldfastWarning,
    NotFound,
    NotRecoverable,
    UsageError,
)
from holdfast.base.suggest import did_you_mean
from holdfast.base.version import __version__
from holdfast.cli.options import Parser, shown_examples, wrapped
from holdfast.cli.screen import deliver, say, say_lines
from holdfast.cli.verbs import VERBS
from holdfast.cli.words import style

LAUNCH = "run"
"""The verb that takes torchrun's options, and starts the processes of a training."""
ABOUT = """\
Look at, verify, compare, convert, copy, prune and pin checkpoints; list and replay records; simulate \
failures; manage the agent of a node; launch a training that recovers in place.

URL is a folder of checkpoints; URL@STEP is one step of it, URL alone the newest step. Checkpoints of \
other systems are recognised by their files, or named by a prefix: dcp:PATH, deepspeed:PATH, \
megatron:PATH, huggingface:PATH, torch:PATH.

Exit codes: 0 fine, 1 a problem was found, 2 wrong usage, 130 interrupted by Ctrl-C. All verbs but run \
take --json."""
EXAMPLES = (
    "holdfast ls runs/gpt",
    "holdfast inspect runs/gpt@1000",
    "holdfast help convert",
)
_CALL = re.compile(r"^[a-z_.]*\((.*?=.*?)\): must be ", re.DOTALL)
"""Start of an error for an argument: a user of the command line knows the argument, not the Python call."""


def main(*verb: str) -> None:
    """Run the console script, or `python -m holdfast`; with `verb`, `python -m` of that verb's module."""
    words = [*verb, *sys.argv[1:]]
    try:
        sys.exit(_launch(words[1:]) if words[:1] == [LAUNCH] else run(words))
    except BrokenPipeError:  # the reader of our output has closed it
        sys.stderr.close()
        sys.exit(141)
    except KeyboardInterrupt:
        say(f"interrupted{_later(words)}", file=sys.stderr)
        sys.exit(130)


def run(words: Sequence[str]) -> int:
    """Run a command line, and return the exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", HoldfastWarning)
        warnings.showwarning = partial(_show_warning, warnings.showwarning)
        try:
            return _run(words)
        except HoldfastError as error:
            print_error(*explained(error))
            return 2 if isinstance(error, UsageError) else 1


def _run(words: Sequence[str]) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        say_lines(overview())
        return 0 if words else 2
    if words[0] in ("--version", "version"):
        say(f"holdfast {__version__}{_beside()}")
        return 0
    verb = words[0]
    if verb == LAUNCH:
        return _launch(words[1:])
    if verb.startswith("-"):
        hint = did_you_mean(verb, ("--version", "--help"), 1) or "`holdfast --help` lists the verbs"
        raise UsageError(f"holdfast has no option {verb!r}", hint=hint)
    if verb not in VERBS:
        raise UsageError(
            f"there is no verb {verb!r}; there are {', '.join((*VERBS, LAUNCH))}",
            hint=did_you_mean(verb, (*VERBS, LAUNCH, "help", "version")),
        )
    parser = parser_of(verb)
    if parser.asks_for_help(words[1:]):
        say_lines(parser.help())
        return 2 if len(words) == 1 else 0
    options = parser.parse(words[1:])
    as_json = options.pop("as_json")
    return deliver(VERBS[verb].run(**options), as_json)


def _later(words: Sequence[str]) -> str:
    """Return what is spared if a command that was interrupted is called again."""
    if words[:1] == ["convert"] and not any("://" in word for word in words):
        return "; the same command goes on where it was"
    if words[:1] in (["convert"], ["copy"]):
        return "; the same command goes on with the files that are not written yet"
    return ""


def _beside() -> str:
    """Return the versions that a bug report needs, without importing torch."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        torch = "no torch"
    return f" (Python {platform.python_version()}, {torch}, {platform.platform()})"


def _launch(words: Sequence[str]) -> int:
    """Run a script on several ranks, as torchrun does, and recover it in place.  (It is called before
    anything else begins, since it forks the processes of the training.)"""
    status: int = importlib.import_module("holdfast.launch.command").main(words)
    return status


def parser_of(verb: str) -> Parser:
    """Return the parser of one of `VERBS`."""
    return Parser(verb, VERBS[verb].run, VERBS[verb].examples)


def overview() -> str:
    """Return the help of the command: each verb with the first sentence of its own help."""
    width = max(map(len, VERBS)) + 4
    verbs = []
    for verb in (*VERBS, LAUNCH):
        function = _launch if verb == LAUNCH else VERBS[verb].run
        about = " ".join((inspect.getdoc(function) or "").split())
        first = about.partition(". ")[0].rstrip(".") + "."
        verbs.append(wrapped(first, f"  {verb:<{width - 2}}", " " * width))
    options = "  --version   Show the version.\n  -h, --help  Show this message and exit."
    return "\n".join(
        ["Usage: holdfast [OPTIONS] VERB [ARGS]...", "", wrapped(ABOUT), "", "Options:", options, "",
         "Verbs:", *verbs, "", wrapped("`holdfast help VERB` shows what a verb takes."),
         *shown_examples(EXAMPLES)]
    )  # fmt: skip


def explained(error: HoldfastError) -> tuple[str, str | None]:
    """Return message and hint of an error for a user of the command line."""
    hint, error.hint = error.hint, None
    text = _CALL.sub(r"\1: must be ", str(error))
    if isinstance(error, NotRecoverable) and hint is not None and hint.startswith("check the path"):
        hint = "check the path: it must be the folder that holds steps/"
    if isinstance(error, NotFound) and error.key is not None and error.step is None:
        hint = hint or "it was deleted, or the path is not that of a checkpoint"
    return text, hint


def print_error(message: str, hint: str | None) -> None:
    """Print an error and its hint on stderr."""
    say(f"{style('error:', 'red', 'bold')} {message}", file=sys.stderr)
    if hint:
        say(f"{style(' hint:', 'cyan', 'bold')} {hint}", file=sys.stderr)


def _show_warning(
    otherwise: Callable[..., object], message: Any, category: type[Warning], *where: Any
) -> None:
    """Print a warning of holdfast as a line on stderr, other warnings as Python does."""
    if issubclass(category, HoldfastWarning):
        say(f"{style('warning:', 'yellow', 'bold')} {message}", file=sys.stderr)
    else:
        otherwise(message, category, *where)


if __name__ == "__main__":
    main()
