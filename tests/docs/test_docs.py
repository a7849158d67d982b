"""The documentation is true: programs run, commands work, links lead somewhere, api.md is current.

Blocks by the line that opens them:

    ```python             executed in order, one namespace per page, in a fresh directory
    ```python torchrun    a page's such blocks make one script, run by two processes before the others
    ```console            each line `$ COMMAND` is run, and what is shown is compared: see `docs.commands`
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import warnings
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

import holdfast
from docs.commands import ROOT, SOAK_S, commands_of, run

TESTS = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNNABLE = [page for page in PAGES if page.name != "api.md"]
NUM_PROCESSES = 2
DEADLINE_S = 120


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what stands beside it, its text and the line of its fence."""

    language: str
    options: str
    text: str
    line: int


def blocks(page: Path, language: str, options: str | None = None) -> list[Block]:
    """The page's blocks of a language; of `options` alone if they are given."""
    text = page.read_text()
    found = []
    for match in re.finditer(r"^```(\w+)[ ]*(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(match[1], match[2].strip(), match[3], line))
    return [
        b for b in found if b.language == language and (options is None or b.options == options)
    ]


def pages(*languages: str) -> list[Any]:
    """The pages that have blocks of one of these languages."""
    there = [p for p in RUNNABLE if any(blocks(p, language) for language in languages)]
    return [pytest.param(p, id=p.name) for p in there]


def soaking_pages() -> list[Any]:
    """The pages with commands that take long."""
    there = [p for p in RUNNABLE if any("soak" in b.options for b in blocks(p, "console"))]
    return [pytest.param(p, id=p.name) for p in there]


@pytest.mark.distributed
@pytest.mark.parametrize("page", pages("python", "console"))
def test_programs_and_commands(page: Path, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    run_programs(page, tmp_path, monkeypatch)
    run_commands(page, monkeypatch, capfd)


@pytest.mark.soak
@pytest.mark.timeout(2 * SOAK_S)
@pytest.mark.parametrize("page", soaking_pages())
def test_commands_that_take_long(page: Path, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    run_programs(page, tmp_path, monkeypatch)
    run_commands(page, monkeypatch, capfd, soak=True)


def run_programs(page: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The page's programs in `tmp_path`, which stays the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    run_together(page, tmp_path)
    namespace: dict[str, Any] = {"__name__": "__page__"}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=holdfast.HoldfastWarning)
        warnings.filterwarnings("default", "the save of step", holdfast.HoldfastWarning)
        for block in blocks(page, "python", ""):
            padded = "\n" * block.line + block.text  # tracebacks show the page's line
            exec(compile(padded, str(page), "exec"), namespace)


def run_together(page: Path, folder: Path) -> None:
    """The page's torchrun blocks as one script, in the environment that torchrun makes."""
    parts = [b.text for b in blocks(page, "python", "torchrun")]
    if not parts:
        return
    script = folder / "page.py"
    script.write_text("\n".join(parts))
    command = [sys.executable, str(script)]
    if "import deepspeed" in script.read_text():  # without a kernel that takes long to compile
        first = f"import runpy, sys; sys.path.append({str(TESTS)!r}); import deepspeed_on_cpu"
        run = f"runpy.run_path({str(script)!r}, run_name='__main__')"
        command = [sys.executable, "-c", f"{first}; {run}"]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(NUM_PROCESSES),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(NUM_PROCESSES)
    ]
    try:
        outputs = [p.communicate(timeout=DEADLINE_S)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0] * NUM_PROCESSES, "\n".join(outputs)


def run_commands(page: Path, monkeypatch: Any, capfd: Any, *, soak: bool = False) -> None:
    """The commands of the page's console blocks; with `soak` also those that take long."""
    for block in blocks(page, "console"):
        for command in commands_of(block.text, block.options, f"{page.name}:{block.line}"):
            if command.start is None and (soak or not command.is_soak):
                run(command, monkeypatch, capfd)


def test_blocks_have_known_options() -> None:
    for page in RUNNABLE:
        for block in blocks(page, "python"):
            known = block.options in ("", "torchrun")
            assert known, f"{page.name}:{block.line}: {block.options}"


def anchor(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    text = re.sub(r"[`*]", "", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {anchor(h) for h in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", [pytest.param(p, id=p.name) for p in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if fragment:
            assert fragment in anchors(file), f"{page.name}: {target}"


def test_reference_is_up_to_date() -> None:
    path = ROOT / "docs" / "make_api.py"
    spec = spec_from_file_location("make_api", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == (ROOT / "docs" / "api.md").read_text(), "run python docs/make_api.py"


def test_the_door_is_light() -> None:
    """What a new user meets: at most 700 words, and how to install among the first 150."""
    words = (ROOT / "README.md").read_text().split()
    assert len(words) <= 700
    assert "pip install" in " ".join(words[:150])
