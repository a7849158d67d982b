"""Run tests with other versions of torch and of the trainers: `make versions`, or one row after the other:

    python .ci/versions.py                             all rows
    python .ci/versions.py torch==2.6.0 lightning      this version; all rows of this package

Each row gets an environment of its own, which is removed when its tests have run: torch brings 5 GB.  torch
runs the quick half of the tests; a trainer is killed and resumed as its own tests do, with the torch of
`constraints.txt`.  What came out is written to docs/versions/, from which the site's page is made.
Exit status: 1 if a test failed in any row.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ET
from collections import Counter
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

QUICK = ("-n", "3", "--dist", "loadfile", "-m", "not slow and not soak")


@dataclass(frozen=True)
class Row:
    """A version of a package, and the arguments of pytest for it."""

    package: str
    version: str
    tests: tuple[str, ...]


def _kills(trainer: str) -> tuple[str, ...]:
    file = f"tests/integrations/trainers/test_{trainer}.py"
    return "-m", "", "-k", "killed", file


ROWS = [
    *(Row("torch", version, QUICK) for version in ("2.6.0", "2.9.1", "2.13.0", NEWEST)),
    *(
        Row(package, version, _kills(trainer))
        for package, trainer, oldest in (
            ("transformers", "transformers", "4.46.0"),
            ("accelerate", "accelerate", "1.1.0"),
            ("lightning", "lightning", "2.4.0"),
            ("deepspeed", "deepspeed", "0.16.0"),
            ("megatron-core", "megatron", "0.16.0"),
            ("torchtitan", "torchtitan", "0.3.0"),
        )
        for version in (oldest, NEWEST)
    ),
]


def environment() -> dict[str, str]:
    """The variables of this process, without what ties pip to versions, or Python to an environment."""
    left_out = {"PIP_CONSTRAINT", "PYTHONPATH", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PIP_CONFIG_FILE": os.devnull}


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
    venv.create(place, with_pip=True, clear=True)
    python = place / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = place / "constraints.txt"
    pinned = "" if row.package == "torch" else (ROOT / "constraints.txt").read_text()
    wanted.write_text(f"{pinned}\n{row.package}=={row.version}\n")
    extra = "dev" if row.package == "torch" else "dev,strangers"
    words = [*pip, "--constraint", wanted, "--editable", f"{ROOT}[{extra}]", row.package]
    subprocess.run(words, env=environment(), check=True)
    return python


def run(row: Row) -> dict[str, Any]:
    """Install a version and run its tests; return what came out."""
    place = PLACE / f"{row.package}-{row.version}"
    try:
        python = install(row, place)
        report = place / "report.xml"
        words = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        begun = time.monotonic()
        hung = False
        try:
            subprocess.run([*words, *row.tests], cwd=ROOT, env=environment(), timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            hung = True
        return {
            "package": row.package,
            "version": row.version,
            "python": _output(python, "import platform; print(platform.python_version())"),
            "torch": _output(python, "import torch; print(torch.__version__)"),
            "date": datetime.now(timezone.utc).date().isoformat(),
            "tests": " ".join(row.tests),
            "seconds": round(time.monotonic() - begun),
            "hung": hung,
            **results(report),
        }
    finally:
        shutil.rmtree(place, ignore_errors=True)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="PACKAGE[==VERSION]", help="default: all rows")
    wanted = [word.partition("==") for word in parser.parse_args().rows]
    if unknown := {package for package, _, _ in wanted} - {row.package for row in ROWS}:
        parser.error(f"no rows of {', '.join(sorted(unknown))}")
    rows = [
        row
        for row in ROWS
        if not wanted or any(row.package == p and v in ("", row.version) for p, _, v in wanted)
    ]
    for (
        package,
        _,
        version,
    ) in wanted:  # a version that has no row runs the tests of the package's rows
        if version and not any((row.package, row.version) == (package, version) for row in rows):
            tests = next(row.tests for row in ROWS if row.package == package)
            rows.append(Row(package, version, tests))
    RECORDS.mkdir(exist_ok=True)
    bad = 0
    for row in rows:
        version = newest(row.package) if row.version == NEWEST else row.version
        found = run(Row(row.package, version, row.tests))
        record = RECORDS / f"{row.package}-{version}.json"
        record.write_text(json.dumps(found, indent=1) + "\n")
        is_good = found["passed"] and not found["failed"] and not found["hung"]
        bad += not is_good
        print(
            f"{row.package} {version}: {found['passed']} passed, {len(found['failed'])} failed, "
            f"{sum(found['skipped'].values())} skipped{', hung' * found['hung']}",
            flush=True,
        )
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
