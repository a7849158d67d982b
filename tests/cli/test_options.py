"""What is typed becomes the arguments of a verb's function, or an error that says what was expected."""

from __future__ import annotations

import shlex
from typing import Annotated

import pytest

from cli.calling import call
from holdfast.cli.options import Argument, Option, Parser
from holdfast.cli.verbs import VERBS
from holdfast.errors import UsageError


def run(
    first: Annotated[str, Argument("A", "The first.")],
    to: Annotated[int, Option("Where to, 100% sure.", "STEP")],
    second: Annotated[int | None, Argument("[B]", "The second.")] = None,
    let: Annotated[list[str] | None, Option("May be repeated.", "NAME=N")] = None,
    rate: Annotated[float, Option("A number.", "X")] = 0.5,
    from_: Annotated[str | None, Option("Another name.", "FORMAT", "--from")] = None,
    dry_run: Annotated[bool, Option("A flag.")] = False,
) -> None:
    """Try it."""


DEFAULT = {"first": "a", "to": 3, "second": None, "let": None, "rate": 0.5, "from_": None,
           "dry_run": False, "as_json": False}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("a --to 3", {}),
        ("--to=3 a", {}),
        ("a --to 3 --json", {"as_json": True}),
        ("--to 3 --dry-run a", {"dry_run": True}),
        ("a --to 3 7", {"second": 7}),
        ("a --let x=1 --to 3 --let y=2", {"let": ["x=1", "y=2"]}),
        ("a --to -1 --rate -2.5", {"to": -1, "rate": -2.5}),
        ("a --to 3 --from=", {"from_": ""}),
        ("--to 3 -- --json", {"first": "--json"}),
        ("--to 3 -- -a 5", {"first": "-a", "second": 5}),
        ("'' --to 3", {"first": ""}),
    ],
)
def test_words_become_arguments(words: str, changed: dict[str, object]) -> None:
    assert Parser("try", run).parse(shlex.split(words)) == DEFAULT | changed


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("a", "holdfast try: needs --to", "`holdfast try --help` shows what it takes"),
        ("--to 3", "holdfast try: needs A", "`holdfast try --help` shows what it takes"),
        ("a --to x", "holdfast try: --to: 'x' is not a whole number", "--help"),
        ("a --to 1.5", "holdfast try: --to: '1.5' is not a whole number", "--help"),
        ("a --to 3 --rate ''", "holdfast try: --rate: '' is not a number", "--help"),
        ("a x --to 3", "holdfast try: [B]: 'x' is not a whole number", "--help"),
        ("a --to", "holdfast try: --to: needs a value", "--help"),
        ("a --to 3 --dry-run=2", "holdfast try: --dry-run: takes no value, and not '2'", "--help"),
        ("a --to 3 --dry-rnu", "holdfast try has no option '--dry-rnu'", "mean '--dry-run'?"),
        ("a --to 3 --dry", "holdfast try has no option '--dry'", "mean '--dry-run'?"),
        ("a --to 3 -z", "holdfast try has no option '-z'", "it has --json, --help, --to, --let"),
        ("a --ot 3 --to 3", "holdfast try has no option '--ot'", "did you mean '--to'?"),
    ],
)
def test_what_does_not_fit(words: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as told:
        Parser("try", run).parse(shlex.split(words))
    assert told.value.message == message
    assert hint in (told.value.hint or "")


def test_a_list_of_arguments_may_have_options_between() -> None:
    def several(
        of: Annotated[list[int], Argument("N...", "")], x: Annotated[int, Option("", "X")] = 0
    ) -> None:
        """Try it."""

    parser = Parser("try", several)
    assert parser.parse(["1", "--x", "5", "2", "3"]) == {"of": [1, 2, 3], "x": 5, "as_json": False}
    with pytest.raises(UsageError, match="needs N"):
        parser.parse(["--x", "5"])


def test_too_many_arguments() -> None:
    code, _, err = call("ls", "a", "b")
    assert code == 2 and "holdfast ls: takes URL, and not 'b' besides" in err


def test_options_of_the_command_itself() -> None:
    code, _, err = call("versoin")
    assert code == 2 and "did you mean 'version'" in err
    code, _, err = call("--versoin")
    assert code == 2 and "holdfast has no option '--versoin'" in err and "'--version'" in err
    assert call("-h")[0] == 0 and call()[0] == 2 and call("-h")[1] == call()[1]


def test_help_says_how_a_verb_is_called() -> None:
    page = Parser("try", run).help()
    assert page.startswith("Usage: holdfast try [OPTIONS] A [B]\n\n  Try it.\n")
    for line in ("--to STEP", "Where to, 100% sure. [required]", "[default: 0.5]", "--from FORMAT"):
        assert line in page


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_fits_on_80_columns(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = [verb] if verb else []
    code, out, err = call(*words, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: {' '.join(['holdfast', *words])} [OPTIONS] ")
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= 80
    for other in () if verb else VERBS:
        assert f"\n  {other} " in out
    assert call(*words, "-h")[1] == out
