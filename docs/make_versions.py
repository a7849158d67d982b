"""Make the table of versions tested.

python docs/make_site.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "versions"
"""What `make versions` has written, a file for each version."""
TESTED = {
    "torch": ("2.13.0", "everything; 2.6 and newer is supported"),
    "transformers": ("5.24.0", "`Trainer`, models, names of files"),
    "accelerate": ("1.15.0", "`Accelerator`, wrappers"),
    "peft": ("0.21.2", "adapters"),
    "lightning": ("2.6.6", "`Trainer`, Fabric"),
    "torchtitan": ("0.3.0", "checkpoint manager, containers of optimizers"),
    "deepspeed": ("0.19.8", "engines, files, `ds_to_universal`"),
    "megatron-core": ("0.16.1", "models, optimizers, `torch_dist` files"),
    "torch-checkpointing": ("0.1.1", "files"),
    "torchao": ("0.18.0", "quantised weights, low-bit optimizers"),
    "bitsandbytes": ("0.50.2", "quantised layers, 8-bit optimizers"),
    "pytorch-optimizer": ("4.1.0", "optimizers"),
    "torchdata": ("0.11.0", "`StatefulDataLoader`"),
    "safetensors": ("0.8.0", "files"),
    "obstore": ("0.12.1", "buckets"),
}
"""Packages of others: the version that the tests ran with, and what they do with it.
`tests/system/strangers/test_versions.py` compares."""
LACKS = re.compile(r"^(?:Skipped: )?this \w+ has no (.+)")
"""The reason of a test that was skipped for what `tests/capabilities.py` has not found in torch."""


def write(page: Path) -> None:
    """Write the page."""
    rows = [f"| {name} | {version} | {use} |" for name, (version, use) in TESTED.items()]
    head = "# Versions tested\n\nOn Python 3.11, by `make test` and `make soak`.\n"
    columns = ["| package | version | what is tested with it |", "|---|---|---|"]
    page.write_text("\n".join([head, *columns, *rows, "", *others()]))


def others() -> list[str]:
    """The lines on other versions: those of torch by the quick half of the tests, those of trainers by
    their kills."""
    records = [json.loads(path.read_text()) for path in RECORDS.glob("*.json")]
    records.sort(
        key=lambda one: (one["package"], [int(n) for n in re.findall(r"\d+", one["version"])])
    )
    if not records:
        return []
    head = (
        "## Other versions\n\n`make versions` runs tests with each in an environment of its own. Records, "
        "with the commit and the reason of each skipped test, are in `docs/versions`.\n"
    )
    columns = [
        "| package | version | date | passed | skipped | of these, since this version lacks | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    return [head, *columns, *map(_row, records), ""]


def _row(one: dict[str, Any]) -> str:
    failed = f"{len(one['failed'])}: {', '.join(one['failed'])}" if one["failed"] else "none"
    cells = (
        one["package"],
        one["version"],
        one["date"],
        one["passed"],
        sum(one["skipped"].values()),
        ", ".join(_lacking(one["skipped"])) or "nothing",
        failed,
    )
    return f"| {' | '.join(map(str, cells))} |"


def _lacking(skipped: dict[str, int]) -> list[str]:
    """What tests were skipped for that only other versions can do, with their numbers."""
    whys = ((LACKS.search(why), number) for why, number in skipped.items())
    return [f"{why[1]} ({number})" for why, number in whys if why]
