"""Every command that README and docs print is run (by `test_docs`), or says why it is not."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import zygote
from docs.commands import (
    ELSEWHERE,
    NOT_RUN,
    PROMPT,
    ROOT,
    Command,
    commands_of,
    matches,
    run,
    shape,
)
from docs.test_docs import PAGES, blocks, name_of

LANGUAGES = ("python", "console", "text", "json", "ebnf")
"""Programs, commands, and what is only read."""


def all_commands() -> list[Command]:
    return [
        command
        for page in PAGES
        for block in blocks(page, "console")
        for command in commands_of(block.text, block.options, f"{name_of(page)}:{block.line}")
    ]


def test_each_is_run_or_listed_with_a_reason() -> None:
    """And what is listed is printed somewhere."""
    found = all_commands()
    assert len([c for c in found if c.start is None]) > 25
    assert {c.start for c in found} - {None} == {*NOT_RUN, *ELSEWHERE}


def test_what_runs_elsewhere_is_run_there() -> None:
    for test in set(ELSEWHERE.values()):
        assert "commands_of(" in (ROOT / "tests" / test).read_text(), "of the page, not of a copy"


def collected(target: str, *paths: str) -> str:
    """The tests among these files that a target of the Makefile runs."""
    planned = ["make", "--dry-run", "--directory", str(ROOT), target]
    done = subprocess.run(planned, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (marked, *_) = re.findall(r"-m pytest .*-m (?:\"(.*?)\"|(\w+))", done.stdout)
    told = ["-m", "pytest", "--collect-only", "-q", "-m", "".join(marked), *paths]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return zygote.run(told, cwd=ROOT, env=env).stdout


def test_what_is_not_run_is_run_anyway() -> None:
    """`make test` runs all tests but those marked `soak`, and so this one; `make soak` the others."""
    assert set(NOT_RUN) == {"make test", "pytest tests/system/distributed/test_ucp.py"}
    assert "::test_what_is_not_run_is_run_anyway" in collected("test", __file__)
    ucp = collected("soak", "tests/system/distributed/test_ucp.py")
    assert "::test_two_ranks" in ucp and "deselected" not in ucp


def test_commands_are_in_console_blocks_alone() -> None:
    """In other blocks nobody would run them."""
    starts = re.compile(
        r"(\$ .*|(?:make|pip|pytest|holdfast|torchrun|python|sbatch|srun|kubectl) .*)"
    )
    for page in PAGES:
        languages = re.findall(r"^```(\w*)", page.read_text(), re.MULTILINE)
        assert not set(languages) & {"bash", "sh", "shell", "sh-session"}, name_of(page)
        for block in blocks(page, "text"):
            for line in block.text.splitlines():
                assert not starts.fullmatch(line), f"{name_of(page)}:{block.line}: {line}"


def test_console_blocks_have_known_options() -> None:
    for page in PAGES:
        for block in blocks(page, "console"):
            assert re.fullmatch(r"(exit=\d)?( ?soak)?", block.options), (
                f"{name_of(page)}:{block.line}"
            )


def test_every_fence_is_that_of_a_block_that_is_looked_at() -> None:
    """None is indented, of other marks or of a language that nobody runs."""
    for page in PAGES:
        text = page.read_text()
        fences = re.findall(r"^.*(?:```|~~~).*$", text, re.MULTILINE)
        known = [b for language in LANGUAGES for b in blocks(page, language)]
        opening = {text.splitlines()[b.line - 1] for b in known}
        assert {f for f in fences if f != "```"} == opening, name_of(page)
        assert len(fences) == 2 * len(known), name_of(page)


def test_what_serves_is_stopped_and_held_to_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    run(command("holdfast agent run  # why"), monkeypatch, capfd)
    with pytest.raises(AssertionError, match="here: holdfast agent run"):
        run(command("holdfast agent run", exit=3), monkeypatch, capfd)


def command(text: str, *output: str, exit: int = 0) -> Command:
    return Command(text, list(output), exit, False, "here")


def test_a_command_that_does_other_things_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(command("echo 'took 3.5 s' >&2; echo b", "took 17 s", "b"), monkeypatch, capfd)
    run(command("holdfast ls none", exit=1), monkeypatch, capfd)
    for wrong in (
        command("true", "a line"),
        command("echo a", "b"),
        command("echo a; echo b", "a"),
        command("false"),
        command("holdfast ls none"),
        command("holdfast ls none", "steps there are", exit=1),
    ):
        with pytest.raises(AssertionError, match="here: "):
            run(wrong, monkeypatch, capfd)


def test_shapes() -> None:
    a, b = (
        "→    40  144 kB  durable  just now    1  1 rank   16   1  complete  newest",
        "→  4,000  1.4 MB  durable  11 s ago  12  1 rank  160  21  complete  newest",
    )
    assert shape([a]) == shape([b]) == ["→ N N durable AGE N N rank N N complete newest"]
    assert shape(["good  step 4 of file:///home/me/x: 1 tensor"]) == [
        "good step N of PLACE: N tensor"
    ]
    assert shape(["model.0.weight"]) == ["model.0.weight"] != shape(["model.1.weight"])
    assert shape(["rank at", "", "  "]) == ["rank at"]
    assert matches(["...", "b"], ["a", "a", "b"]) and not matches(["...", "b"], ["a", "b", "c"])
    assert not matches(["a"], ["a", "b"]) and not matches(["a", "b"], ["a"])
    assert matches(["one … three"], ["one (two) three"]) and not matches(["one … three"], ["one"])


def test_blocks_are_read(tmp_path: Path) -> None:
    text = "$ one \\\n    --two   # why\nout 1\n\nout 2\n$ three\n"
    first, second = commands_of(text, "exit=1 soak", "x:1")
    assert (first.text, first.output, first.exit, first.is_soak) == (
        "one --two # why", ["out 1", "out 2"], 1, True,
    )  # fmt: skip
    assert (second.text, second.output) == ("three", [])
    with pytest.raises(AssertionError, match="begins with a command"):
        list(commands_of(f"out\n{PROMPT}one\n", "", "x:1"))
