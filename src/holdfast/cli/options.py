"""Parses the arguments of a verb, declared in the signature of its function.

    def run(
        url: Annotated[str, Argument("URL", "The folder that holds the steps.")],
        keep_last: Annotated[int | None, Option("Keep the newest N steps.", "N")] = None,
    ) -> Result:

A parameter `keep_last` is the option `--keep-last`.  A bool is a flag; a list is an option that may be
given several times, or an argument of one or more words.  A parameter without a default must be given.
Every verb also has `--json` and `--help`.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin, get_type_hints

from holdfast.base.arguments import shown
from holdfast.base.errors import UsageError
from holdfast.base.suggest import did_you_mean

if TYPE_CHECKING:
    from holdfast.core.store import Store


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument."""

    metavar: str
    help: str


@dataclass(frozen=True, slots=True)
class Option:
    """An option; `name` is needed if it differs from the parameter's name."""

    help: str
    metavar: str | None = None
    name: str | None = None


class Parser:
    """The parser of one verb.  A wrong command line is a UsageError.

    Options are taken out first, wherever they stand, and the other words are the arguments.  Words after
    `--` are never options.
    """

    def __init__(self, verb: str, run: Callable[..., object], examples: Sequence[str] = ()) -> None:
        """`examples`: command lines that the help ends with."""
        self.prog = f"holdfast {verb}"
        self.examples = examples
        self.options, self.arguments = _Strict(self.prog), _Strict(self.prog)
        self.words: list[str] = []
        self.names = ["--json", "--help"]
        named = self.options.add_argument_group("Options")
        placed = self.arguments.add_argument_group("Arguments")
        hints = get_type_hints(run, include_extras=True)
        for name, parameter in inspect.signature(run).parameters.items():
            kind, declared = get_args(hints[name])
            if isinstance(declared, Option):
                self._add_option(named, name, kind, declared, parameter.default)
            else:
                self._add_argument(placed, name, kind, declared, parameter.default)
        json_help = "Print JSON, for programs."
        named.add_argument("--json", dest="as_json", action="store_true", help=json_help)
        named.add_argument("-h", "--help", action="store_true", help="Show this message and exit.")
        self.about = wrapped(inspect.getdoc(run) or "")

    def _add_argument(
        self, group: Any, name: str, kind: object, declared: Argument, default: object
    ) -> None:
        is_list, make = _element(kind)
        nargs = "+" if is_list else None if default is inspect.Parameter.empty else "?"
        help = _escaped(declared.help)
        group.add_argument(name, metavar=declared.metavar, help=help, nargs=nargs, type=make)
        self.words.append(declared.metavar)

    def _add_option(
        self, group: Any, name: str, kind: object, declared: Option, default: object
    ) -> None:
        option = declared.name or f"--{name.replace('_', '-')}"
        help = _escaped(declared.help)
        self.names.append(option)
        if kind is bool:
            group.add_argument(option, dest=name, action="store_true", help=help)
            return
        is_list, make = _element(kind)
        is_required = default is inspect.Parameter.empty
        if is_required:
            help += "  [required]"
        elif default not in (None, ""):
            help += f"  [default: {default}]"
        group.add_argument(
            option, dest=name, metavar=declared.metavar, help=help.strip(), type=make,
            default=None if is_required else default, required=is_required,
            action="append" if is_list else "store",
        )  # fmt: skip

    def asks_for_help(self, words: Sequence[str]) -> bool:
        """Tell whether no word is given at all, or --help is among the options."""
        options = words[: words.index("--")] if "--" in words else words
        return not words or "-h" in options or "--help" in options

    def help(self) -> str:
        """Return the text that `--help` shows."""
        both = argparse.ArgumentParser(
            prog=self.prog,
            usage=f"%(prog)s [OPTIONS] {' '.join(self.words)}",
            description=self.about,
            formatter_class=_Formatter,
            parents=[self.arguments, self.options],
            add_help=False,
        )
        return "\n".join([both.format_help().rstrip(), *shown_examples(self.examples)])

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the arguments for the verb's function, and `as_json`."""
        end = words.index("--") if "--" in words else len(words)
        found, rest = self.options.parse_known_args(words[:end])
        for word in rest:
            if word.startswith("-"):
                name = word.partition("=")[0]
                hint = did_you_mean(name, self.names, 1) or f"it has {', '.join(self.names)}"
                raise UsageError(f"{self.prog} has no option {shown(name)}", hint=hint)
        placed = ["--", *rest, *words[end + 1 :]]
        found, besides = self.arguments.parse_known_args(placed, found)
        if besides:
            takes = " ".join(self.words)
            self.arguments.error(f"takes {takes}, and not {shown(besides[0])} besides")
        return {name: value for name, value in vars(found).items() if name != "help"}


class _Strict(argparse.ArgumentParser):
    """A parser that accepts no abbreviations and raises its messages."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace(
            "expected one argument", "needs a value"
        )
        message = message.replace("ignored explicit argument", "takes no value, and not")
        message = message.replace("the following arguments are required: ", "needs ")
        raise UsageError(
            f"{self.prog}: {message}", hint=f"`{self.prog} --help` shows what it takes"
        )


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def add_usage(
        self, usage: Any, actions: Iterable[Any], groups: Iterable[Any], prefix: Any = None
    ) -> None:
        super().add_usage(usage, actions, groups, "Usage: ")


def shown_examples(examples: Sequence[str]) -> list[str]:
    """Return the lines that a help text ends with; none if there are no examples."""
    return ["", "Examples:", *(f"  {line}" for line in examples)] if examples else []


def wrapped(text: str, first: str = "  ", indent: str = "  ") -> str:
    """Return paragraphs wrapped to the terminal's width, with `first` and `indent` before their lines."""
    width = max(get_terminal_size().columns - 2, 30)
    parts = text.split("\n\n")
    return "\n\n".join(
        textwrap.fill(p, width, initial_indent=first, subsequent_indent=indent) for p in parts
    )


def _escaped(text: str) -> str:
    """Escape a text for argparse, which replaces `%`."""
    return text.replace("%", "%%")


def _element(kind: Any) -> tuple[bool, Callable[[str], Any]]:
    """Return whether a type is a list, and the function that makes a value from a word."""
    several = any(get_origin(k) is list for k in (kind, *get_args(kind)))
    kinds = {kind, *get_args(kind), *(e for k in get_args(kind) for e in get_args(k))}
    if int in kinds:
        return several, partial(_number, int, "whole number")
    return several, partial(_number, float, "number") if float in kinds else str


def _number(make: Callable[[str], float], what: str, text: str) -> float:
    try:
        return make(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a {what}") from None


def own_root(url: str, why: str, hint: str | None = None) -> Store:
    """Open a root of our own; UsageError for a foreign checkpoint, with `why` as the reason."""
    from holdfast.core.checkpoint.lone import root_at
    from holdfast.formats.read.detect import detect

    foreign = detect(url)
    if foreign is not None:
        raise UsageError(f"{url} is a {foreign} checkpoint, which {why}", hint=hint)
    return root_at(url)
