"""Run tests with other versions of torch and of the trainers: `make versions`, or one row after the other:

    python .ci/versions.py                             all rows
    python .ci/versions.py torch==2.6.0 lightning      this version; all rows of this package
    python .ci/versions.py torch==2.6.0 --again        only the tests that failed in this row's record

torch gets an environment of its own, which brings 5 GB; a trainer gets one that goes before the packages
of `.venv`.  They are removed when the tests have run, unless `--environment` names one.  torch runs the
quick half of the tests; a trainer is killed ten times, alone and on two ranks, as its own tests do.  What
came out is written to docs/versions/, with the commit, and from that the site's page is made.
Exit status: 1 if a test failed in any row.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "docs" / "versions"
PLACE = ROOT / "build" / "versions"
NEWEST = "newest"
LIMIT_S = 5400
"""Seconds that the tests of a row may take in all."""

QUICK = ("-m", "not slow and not soak")


@dataclass(frozen=True)
class Row:
    """A version of a package, and the arguments of pytest for it."""

    package: str
    version: str
    tests: tuple[str, ...]

    @property
    def record(self) -> Path:
        return RECORDS / f"{self.package}-{self.version}.json"


def _kills(trainer: str) -> tuple[str, ...]:
    file = f"tests/integrations/trainers/test_{trainer}.py"
    return "-m", "", "-k", "killed and ten", file


ROWS = [
    *(Row("torch", version, QUICK) for version in ("2.6.0", "2.9.1", "2.13.0", NEWEST)),
    *(
        Row(package, version, _kills(trainer))
        for package, trainer, oldest in (
            ("transformers", "transformers", "5.3.0"),
            ("accelerate", "accelerate", "1.1.0"),
            ("lightning", "lightning", "2.5.0"),
            ("deepspeed", "deepspeed", "0.16.0"),
            ("megatron-core", "megatron", "0.16.0"),
            ("torchtitan", "torchtitan", "0.3.0"),
        )
        for version in (oldest, NEWEST)
    ),
]


def environment() -> dict[str, str]:
    """The variables of this process, without what ties pip to versions, or Python to an environment.  The
    code that is tested is that of this checkout."""
    left_out = {"PIP_CONSTRAINT", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": str(ROOT / "src")}


def newest(package: str) -> str:
    """The newest version that the registry has."""
    words = [sys.executable, "-m", "pip", "index", "versions", package]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
    found = re.search(r"\(([^)]+)\)", done.stdout)
    if found is None:
        raise SystemExit(f"no version of {package} in: {done.stdout}")
    return found[1].partition("+")[0]


def install(row: Row, place: Path) -> Path:
    """Make an environment with this version; return its Python."""
    python = place / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = f"{row.package}=={row.version}"
    if row.package == "torch":
        venv.create(place, with_pip=True, clear=True)
        words = [*pip, wanted, "--editable", f"{ROOT}[dev]"]
    else:
        venv.create(place, with_pip=True, clear=True)
        (base,) = (ROOT / ".venv").resolve().glob("lib/python*/site-packages")
        (own,) = place.glob("lib/python*/site-packages")
        own.joinpath("base.pth").write_text(f"{base}\n")  # behind its own packages
        torch = _output(python, "import torch; print(torch.__version__)")
        place.joinpath("constraints.txt").write_text(f"torch=={torch}\n")  # it stays what it is
        words = [*pip, wanted, "--constraint", place / "constraints.txt"]
    subprocess.run(words, env=environment(), check=True)
    return python


def point(place: Path) -> None:
    """Have an environment that was made for another checkout, or copied, import this one's code."""
    pip = [
        place / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    words = [*pip, "--no-deps", "--editable", ROOT]
    subprocess.run(words, env=environment(), check=True)


def run(row: Row, place: Path, tests: Sequence[str], workers: int) -> dict[str, Any]:
    """Run tests in an environment that has a version; return what came out."""
    python, report = place / "bin" / "python", place / "report.xml"
    report.unlink(missing_ok=True)
    words = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    words += ["-n", str(workers), "--dist", "loadfile", *tests]
    begun = time.monotonic()
    pytest = subprocess.Popen(words, cwd=ROOT, env=environment(), start_new_session=True)
    try:
        pytest.wait(LIMIT_S)
        hung = False
    except subprocess.TimeoutExpired:
        os.killpg(pytest.pid, signal.SIGKILL)
        pytest.wait()
        hung = True
    return {
        "package": row.package,
        "version": row.version,
        "python": _output(python, "import platform; print(platform.python_version())"),
        "torch": _output(python, "import torch; print(torch.__version__)"),
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "tests": shlex.join(tests),
        "seconds": round(time.monotonic() - begun),
        "hung": hung,
        **results(report),
    }


def again(record: dict[str, Any], row: Row, place: Path, workers: int) -> dict[str, Any]:
    """Run the tests once more that have failed in a record; return the record with what came out now."""
    failed = record["failed"]
    marks = [word for word in row.tests if not word.startswith("tests/")]
    found = run(row, place, [*marks, *dict.fromkeys(map(_node, failed))], workers)
    skipped = Counter(record["skipped"]) + Counter(found["skipped"])
    return {
        **record,
        "passed": record["passed"] + found["passed"],
        "failed": found["failed"],
        "skipped": dict(skipped.most_common()),
        "hung": found["hung"],
        "again": [
            *record.get("again", []),
            {"commit": found["commit"], "date": found["date"], "tests": failed},
        ],
    }


def _node(failed: str) -> str:
    """The argument of pytest for a test, or a file, that is in a record."""
    place, _, name = failed.partition("::")
    if not place:  # the file could not be collected
        return f"{name.replace('.', '/')}.py"
    file, dot, of_class = place.rpartition(".Test")
    names = [f"Test{of_class}", name] if dot else [name]
    return "::".join([f"{(file if dot else place).replace('.', '/')}.py", *names])


def commit() -> str:
    """The commit that is tested; "+" behind it: with changes that are not committed."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    changed = [*git, "status", "--porcelain", "--", "src", "tests"]
    is_changed = subprocess.run(changed, capture_output=True, text=True).stdout
    return head.stdout.strip() + "+" * bool(is_changed)


def _output(python: Path, program: str) -> str:
    return subprocess.run([python, "-c", program], capture_output=True, text=True).stdout.strip()


def results(report: Path) -> dict[str, Any]:
    """Numbers and names of the tests in a report of pytest; none if it was not written."""
    if not report.exists():
        return {"passed": 0, "failed": [], "skipped": {}}
    failed, skipped, passed = [], Counter[str](), 0
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag: child for child in case}
        if "failure" in kinds or "error" in kinds:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped[kinds["skipped"].get("message", "")] += 1
        else:
            passed += 1
    return {"passed": passed, "failed": sorted(failed), "skipped": dict(skipped.most_common())}


def rows_of(words: Sequence[str]) -> list[Row]:
    """The rows that are asked for; SystemExit if a package has none."""
    if not words:
        return ROWS
    found = []
    for package, _, version in (word.partition("==") for word in words):
        of_package = [row for row in ROWS if row.package == package]
        if not of_package:
            raise SystemExit(f"no rows of {package}; there are: {', '.join(_packages())}")
        if version:  # a version that has no row runs the tests of the package's rows
            found.append(Row(package, version, of_package[0].tests))
        else:
            found += of_package
    return found


def _packages() -> list[str]:
    return list(dict.fromkeys(row.package for row in ROWS))


def done(row: Row, given: argparse.Namespace) -> dict[str, Any]:
    """Run a row and write its record; return it."""
    place = given.environment or PLACE / f"{row.package}-{row.version}"
    try:
        if not (given.environment and place.exists()):
            install(row, place)
        point(place)
        if given.again:
            found = again(json.loads(row.record.read_text()), row, place, given.workers)
        else:
            found = run(row, place, row.tests, given.workers)
    finally:
        if not given.environment:
            shutil.rmtree(place, ignore_errors=True)
    row.record.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="PACKAGE[==VERSION]", help="default: all rows")
    parser.add_argument("--again", action="store_true", help="only what failed, by the record")
    parser.add_argument("--environment", type=Path, help="made if it is not there, and not removed")
    parser.add_argument("--workers", type=int, default=3, help="tests at a time (default: 3)")
    given = parser.parse_args()
    RECORDS.mkdir(exist_ok=True)
    bad = 0
    rows = {
        (row.package, newest(row.package) if row.version == NEWEST else row.version): row.tests
        for row in rows_of(given.rows)
    }
    for (package, version), tests in rows.items():
        found = done(Row(package, version, tests), given)
        bad += not found["passed"] or bool(found["failed"]) or found["hung"]
        print(
            f"{package} {version}: {found['passed']} passed, {len(found['failed'])} failed, "
            f"{sum(found['skipped'].values())} skipped{', hung' * found['hung']}",
            flush=True,
        )
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
