"""Optimizers on layouts: what comes back bit for bit, beside DCP and torch_checkpointing.

Each optimizer is trained for two steps in each of six layouts and saved by each contestant; fresh objects
load that on three layouts, what they have is gathered by torch and compared bit for bit, and on the same
layout once more after two further steps.  *refused*: an error of the contestant's own kind that says what
cannot be; *wrong*: loaded without an error, and not the same; *crash*: any other error; *needs CUDA*: it
asks for a GPU, which this machine has not; *untrained*: the optimizer cannot train in one of the layouts,
without any checkpoint.  Cells: `tests/live/optimizers`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import ROOT, report, reporting, row

CLAIMS = (
    Claim(
        "No optimizer comes back from holdfast as something else on any layout.",
        r"^wrong, beside (.+?) \|",
        at_most=0,
        unit="cells",
    ),
    Claim(
        "What cannot be restored is refused by its name.",
        r"^crash, beside (.+?) \|",
        at_most=0,
        unit="cells",
    ),
)
TESTS = ROOT / "tests"
SAVERS = ("holdfast", "dcp", "torch_checkpointing")


def main() -> None:
    """Run the matrix and write its record."""
    p = reporting(__doc__)
    p.add_argument("--root", help="an existing directory for the checkpoints (0.3 GB)")
    p.add_argument("--only", default="", help="names of optimizers, by comma")
    p.add_argument(
        "--continue", dest="begun", help="a folder of a run that was stopped: go on there"
    )
    args = p.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(TESTS))
    from live.optimizers.driving import matrix
    from live.optimizers.zoo import ZOO

    names = args.only.split(",") if args.only else list(ZOO)
    root, started = (
        args.begun or tempfile.mkdtemp(prefix="holdfast-bench-", dir=args.root),
        time.time(),
    )
    lines = matrix(Path(root), SAVERS, names, limit_s=7200)
    for line in lines:  # a record names no folder of a machine
        line["why"] = line["why"].replace(root, "ROOT").replace(f"{ROOT}/", "")
    args.begun = None
    report(CLAIMS, __doc__, args, {"lines": lines}, rows(lines), started)
    shutil.rmtree(root)


def rows(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Counts by verdict, of holdfast beside each other contestant."""
    from live.optimizers.driving import VERDICTS, counts

    found = {saver: counts(lines, saver) for saver in SAVERS}
    return [
        row(
            f"{verdict}, beside {other}",
            str(found["holdfast"][verdict]),
            str(found[other][verdict]),
            found["holdfast"][verdict],
            unit=" cells",
        )
        for other in SAVERS[1:]
        for verdict in VERDICTS
    ]


if __name__ == "__main__":
    main()
