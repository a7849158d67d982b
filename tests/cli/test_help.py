"""`--help` and `help`: what they say, that their examples can be typed, and that they import little."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

from cli.calling import call
from holdfast.cli.main import EXAMPLES, LAUNCH, parser_of
from holdfast.cli.verbs import FORMATS, VERBS
from holdfast.formats.converting import TARGET_FORMATS
from holdfast.launch import command


def examples_of(verb: str) -> tuple[str, ...]:
    if verb == LAUNCH:
        return command.EXAMPLES
    return VERBS[verb].examples


def typed(example: str) -> list[str]:
    """The words after `holdfast` of a line that a shell reads."""
    line = re.sub(r'^eval "\$\((.*?)\)"', r"\1", example).partition(" > ")[0]
    first, *words = shlex.split(line, comments=True)
    assert first == "holdfast", example
    return words


@pytest.mark.parametrize("verb", [*VERBS, LAUNCH])
def test_examples_of_a_verb_end_its_help_and_can_be_typed(verb: str) -> None:
    examples = examples_of(verb)
    assert 2 <= len(examples) <= 3
    code, out, _ = call(verb, "--help")
    assert code == 0
    assert out.endswith("\n\nExamples:\n" + "".join(f"  {one}\n" for one in examples))
    assert verb in [typed(one)[0] for one in examples]
    for example in examples:
        about, *words = typed(example)
        if about == LAUNCH:
            assert command.parser().parse_args(words).training_script
        else:
            assert parser_of(about).parse(words)


def test_examples_of_the_command_can_be_typed() -> None:
    out = call("--help")[1]
    for example in EXAMPLES:
        assert f"  {example}\n" in out
        words = typed(example)
        if words[0] == "help":
            assert words[1:] == [words[-1]] and words[-1] in VERBS
        else:
            assert parser_of(words[0]).parse(words[1:])


def test_help_of_a_verb_is_asked_for_in_two_ways() -> None:
    for verb in (*VERBS, LAUNCH):
        assert call("help", verb) == call(verb, "--help")
    assert call("help") == call("--help")
    code, _, err = call("help", "inspekt")
    assert code == 2 and "did you mean 'inspect'" in err


def test_version_is_told_with_and_without_dashes() -> None:
    code, out, err = call("version")
    assert (code, err) == (0, "") and out.startswith("holdfast ")
    assert call("--version") == (0, out, "")


def test_the_help_of_convert_names_all_formats() -> None:
    assert FORMATS.split(", ") == [*TARGET_FORMATS]


OF_EACH = {
    "holdfast", "holdfast.base", "holdfast.base.arguments", "holdfast.base.errors",
    "holdfast.base.sizes", "holdfast.base.suggest", "holdfast.base.text",
    "holdfast.base.torch_version", "holdfast.base.version", "holdfast.cli", "holdfast.cli.main",
    "holdfast.cli.options", "holdfast.cli.screen", "holdfast.cli.verbs", "holdfast.cli.words",
}  # fmt: skip
OF_RUN = {
    "holdfast.base.wire", "holdfast.launch", "holdfast.launch.command", "holdfast.launch.forkserver",
    "holdfast.launch.sockets",
}  # fmt: skip
OTHERS_OF_RUN = {"msgspec", "typing_extensions"}
"""What `holdfast run --help` imports besides: neither torch nor numpy."""


def imported_by(*words: str) -> set[str]:
    """The modules that a command imports, but for Python's own."""
    code = """
import json, sys
before = set(sys.modules)
sys.argv[:] = ["holdfast", *sys.argv[1:]]
from holdfast.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code
new = [name for name in set(sys.modules) - before
       if name.partition(".")[0] not in sys.stdlib_module_names]
print(json.dumps(new), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_what_help_imports() -> None:
    """No numpy, no torch, nothing of `core` and `formats`: help is there at once."""
    assert imported_by("--help") == OF_EACH
    for verb in ("ls", "convert", "plan", "agent"):
        assert imported_by(verb, "--help") <= OF_EACH
    loaded = imported_by("run", "--help")
    ours = {name for name in loaded if name.partition(".")[0] == "holdfast"}
    assert "holdfast.launch.command" in ours and ours <= OF_EACH | OF_RUN
    assert {name.partition(".")[0] for name in loaded - ours} <= OTHERS_OF_RUN
