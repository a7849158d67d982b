"""The documentation is true: programs run, commands work, links lead somewhere, the reference is whole.

Blocks by the line that opens them:

    ```python             executed in order, one namespace per page, in a fresh directory
    ```python bucket      the same beside a server of S3, which has the bucket "bucket"
    ```python trainer     with packages of the extra `strangers`, by `make soak`
    ```python torchrun    a page's such blocks make one script, run by two processes before the others
    ```console            each line `$ COMMAND` is run, and what is shown is compared: see `docs.commands`
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import holdfast
import zygote
from capabilities import FSDP2_ON_CPUS
from core.store.objects.servers import S3_ENV, Moto
from docs.commands import ROOT, SOAK_S, commands_of, run
from holdfast.cli.main import LAUNCH
from holdfast.cli.verbs import VERBS
from ports import free_port

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
SRC = ROOT / "src" / "holdfast"
ROOMS = sorted(p.name for p in SRC.iterdir() if (p / "__init__.py").exists())
HISTORY = DOCS / "decisions"
NUM_PROCESSES = 2
DEADLINE_S = 400


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what stands beside it, its text and the line of its fence."""

    language: str
    options: str
    text: str
    line: int


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


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
    there = [p for p in PAGES if any(blocks(p, language) for language in languages)]
    return [pytest.param(p, id=name_of(p)) for p in there]


def soaking_pages() -> list[Any]:
    """The pages with commands that take long."""
    there = [p for p in PAGES if any("soak" in b.options for b in blocks(p, "console"))]
    return [pytest.param(p, id=name_of(p)) for p in there]


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
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run_commands(page, monkeypatch, capfd, soak=True)


def pages_with_trainers() -> list[Any]:
    there = [p for p in PAGES if blocks(p, "python", "trainer")]
    return [pytest.param(p, id=name_of(p)) for p in there]


@pytest.mark.soak
@pytest.mark.parametrize("page", pages_with_trainers())
def test_programs_with_trainers(page: Path, tmp_path: Path, monkeypatch: Any) -> None:
    run_programs(page, tmp_path, monkeypatch, trainers=True)


def run_programs(page: Path, tmp_path: Path, monkeypatch: Any, *, trainers: bool = False) -> None:
    """The page's programs in `tmp_path`, which stays the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    run_together(page, tmp_path)
    namespace: dict[str, Any] = {"__name__": "__page__"}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=holdfast.HoldfastWarning)
        for expected in ("the save of step", r"'model': trainable_only\(\) leaves out"):
            warnings.filterwarnings("default", expected, holdfast.HoldfastWarning)
        with serving(page, tmp_path, monkeypatch):
            wanted = ("", "bucket", "trainer") if trainers else ("", "bucket")
            for block in [b for b in blocks(page, "python") if b.options in wanted]:
                padded = "\n" * block.line + block.text  # tracebacks show the page's line
                exec(compile(padded, str(page), "exec"), namespace)


@contextmanager
def serving(page: Path, folder: Path, monkeypatch: Any) -> Iterator[None]:
    """A server of S3, if the page has programs that want one."""
    if not blocks(page, "python", "bucket"):
        yield
        return
    for name, value in S3_ENV.items():
        monkeypatch.setenv(name, value)
    (folder / "server").mkdir()
    with Moto(folder / "server") as server:
        server.client().create_bucket(Bucket="bucket")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield


def run_together(page: Path, folder: Path) -> None:
    """The page's torchrun blocks as one script, in the environment that torchrun makes."""
    parts = [b.text for b in blocks(page, "python", "torchrun")]
    if not parts:
        return
    script = folder / "page.py"
    script.write_text("\n".join(parts))
    if "fully_shard(" in script.read_text():
        FSDP2_ON_CPUS.require()
    command = [str(script)]
    if "import deepspeed" in script.read_text():  # without a kernel that takes long to compile
        run = f"runpy.run_path({str(script)!r}, run_name='__main__')"
        command = ["-c", f"import runpy; import deepspeed_on_cpu; {run}"]
    port, printed = free_port(), [folder / f"page-{rank}.txt" for rank in range(NUM_PROCESSES)]
    processes = [
        zygote.start(
            command,
            out=printed[rank],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(NUM_PROCESSES),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(NUM_PROCESSES)
    ]
    try:
        codes = [p.wait(DEADLINE_S) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert codes == [0] * NUM_PROCESSES, "\n".join(path.read_text() for path in printed)


def run_commands(page: Path, monkeypatch: Any, capfd: Any, *, soak: bool = False) -> None:
    """The commands of the page's console blocks; with `soak` also those that take long."""
    for block in blocks(page, "console"):
        for command in commands_of(block.text, block.options, f"{name_of(page)}:{block.line}"):
            if command.start is None and (soak or not command.is_soak):
                run(command, monkeypatch, capfd)


def test_blocks_have_known_options() -> None:
    for page in PAGES:
        for block in blocks(page, "python"):
            known = block.options in ("", "torchrun", "bucket", "trainer")
            assert known, f"{name_of(page)}:{block.line}: {block.options}"


def anchor(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    text = re.sub(r"[`*]", "", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {
        anchor(h) for h in re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)
    }


@pytest.mark.parametrize("page", [pytest.param(p, id=name_of(p)) for p in PAGES])
def test_links_lead_somewhere(page: Path, site: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() and page.is_relative_to(DOCS):  # made for the site
            file = site / file.relative_to(DOCS)
        assert file.exists(), f"{name_of(page)}: {target}"
        if fragment:
            assert fragment in anchors(file), f"{name_of(page)}: {target}"


def named_code(text: str) -> set[str]:
    """Paths of the code that a page names: `live/step_loading.py`, `live/kinds`, `tests/late`."""
    first = "|".join([*ROOMS, "bench", "examples", "src", "tests"])
    found = re.findall(rf"(?<![\w/.-])((?:{first})/[\w./-]*\w)", text)
    return {path for path in found if Path(path).suffix in ("", ".py")}


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=name_of(p)) for p in PAGES if HISTORY not in p.parents]
)
def test_code_that_a_page_names_is_there(page: Path) -> None:
    """Decisions are left out: they name the code of their day."""
    found = named_code(page.read_text())
    gone = [path for path in found if not ((ROOT / path).exists() or (SRC / path).exists())]
    assert gone == []


def test_modules_that_the_design_names_without_their_folder_are_there() -> None:
    modules = {path.name for path in SRC.rglob("*.py")}
    named = re.findall(r"(?<![\w/.-])\w+\.py\b", (DOCS / "design.md").read_text())
    assert named and set(named) <= modules


def test_the_reference_has_every_public_name(site: Path) -> None:
    pages = [p.read_text() for p in (site / "reference" / "api").glob("*.md")]
    headings = {h for p in pages for h in re.findall(r"^## `(\S+)`$", p, re.MULTILINE)}
    parts = {"__version__", "compression", "dcp", "errors", "events", "extend", "integrations"}
    parts |= {"sources", "store", "testing"}
    assert {f"holdfast.{name}" for name in holdfast.__all__} - headings == {
        f"holdfast.{name}" for name in {*parts, "HoldfastError"}
    }
    (errors,) = (p for p in pages if p.startswith("# Errors\n"))
    kinds = [k for k, v in vars(holdfast.errors).items() if isinstance(v, type)]
    assert [k for k in kinds if k.endswith("Error") and f"| `{k}` |" not in errors] == []


def test_the_reference_has_a_page_for_each_command(site: Path) -> None:
    """With its usage, an example that the tests run, and each option in a table."""
    for verb in (*VERBS, LAUNCH):
        text = (site / "reference" / "cli" / f"{verb}.md").read_text()
        assert f"\nUsage: holdfast {verb} " in text
        assert f"\n```console\n$ holdfast {verb} " in text, verb
        assert "| `-h, --help` |" in text, verb
    prune = (site / "reference" / "cli" / "prune.md").read_text()
    assert "| `--keep-last N` | Keep the newest N steps. |" in prune
    assert "| `URL` | The folder that holds the steps. |" in prune


def test_the_reference_has_arguments_as_tables(site: Path) -> None:
    """Each argument of a Checkpointer has its type, its default and what the docstring says of it."""
    text = (site / "reference" / "api" / "saving.md").read_text()
    (part,) = re.findall(r"^## `holdfast.Checkpointer`$(.*?)^###", text, re.MULTILINE | re.DOTALL)
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", part, re.MULTILINE))
    assert list(rows) == list(inspect.signature(holdfast.Checkpointer).parameters)
    assert [name for name, row in rows.items() if not row.rpartition("|")[2].strip()] == []
    assert rows["keep"] == " `Keep` or `None` | Which steps stay. "
    assert "default `600.0`" in rows["deadline_s"]
    assert "`keep`: which steps stay" not in part  # it is said once
    assert "Collective; blocks." in part.partition("| argument |")[0]


def test_pictures_of_the_site_are_there_and_light(site: Path) -> None:
    pictures = sorted((site / "pictures").iterdir())
    shown = {
        (page.parent / target).resolve()
        for page in DOCS.rglob("*.md")
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())
    }
    assert {p.relative_to(DOCS / "pictures").as_posix() for p in shown} | {"demo.png"} == {
        p.name for p in pictures
    }
    assert sum(p.stat().st_size for p in pictures) < 1_000_000


def test_the_door_is_light() -> None:
    """What a new user meets: at most 700 words, and how to install among the first 150."""
    words = (ROOT / "README.md").read_text().split()
    assert len(words) <= 700
    assert "pip install" in " ".join(words[:150])
