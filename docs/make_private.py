"""Make the page of private places.

python docs/make_site.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from private_places import PLACES, Place

RECORDS = Path(__file__).parent / "versions"
"""What `.ci/versions.py` has written: for each version of a package, which tests failed."""
FILE, TEST = "tests/house/test_private_places.py", "test_a_place_is_there"
HEAD = """# Private places

What holdfast uses of other packages besides their public names, and why no public call does it. A name that
begins with an underscore, or lies in a module whose name does, may change with any version of its package.
`tests/house/test_private_places.py` holds the list complete, and looks for each place in the versions that
are installed. `Class()` stands for an object of a class. Versions from before "since" do without the place.

"refused" means a `UsageError` where the code begins that needs the place, and not later: `torch 2.14.0 has
no Module._parameters, which holdfast relies on`.

The last column has the versions in which the place was found. What recovery in place resets in torch,
accelerate and DeepSpeed has a table of its own, in `launch/registries.py`.
"""
COLUMNS = ["| place | used in | why | without it | found in |", "|---|---|---|---|---|"]


def write(page: Path) -> None:
    """Write the page."""
    records = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]
    lines = [HEAD]
    for package, places in groupby(sorted(PLACES, key=_order), lambda place: place.package):
        lines += [f"## {package}", "", *COLUMNS, *(_row(place, records) for place in places), ""]
    page.write_text("\n".join(lines))


def _order(place: Place) -> int:
    packages = list(dict.fromkeys(one.package for one in PLACES))
    return packages.index(place.package)


def _row(place: Place, records: Iterable[dict[str, Any]]) -> str:
    where = ", ".join(f"`{one}`" for one in place.where)
    since = f", since {place.since}" if place.since else ""
    cells = f"`{place.path}`{since}", where, place.why, place.without, versions(place, records)
    return f"| {' | '.join(cells)} |"


def versions(place: Place, records: Iterable[dict[str, Any]]) -> str:
    """The versions of a place's package in which its test has found it, and those in which it has not."""
    there, gone = [], []
    for record in records:
        of = {record["package"]: record["version"], "Python": record["python"]}
        version, tests = of.get(place.package), record["tests"]
        if version and (FILE in tests or "tests/" not in tests):
            failed = any(f"{TEST}[{place.path}]" in one for one in record["failed"])
            is_newer = any(one.endswith(f"since {place.since}") for one in record["skipped"])
            (gone if failed or (place.since and is_newer) else there).append(version)
    found, lacking = (", ".join(dict.fromkeys(one)) for one in (there, gone))
    return found + (f"; not in {lacking}" if lacking else "")
