"""Drives the matrix: one process for the layout of one, a pair of processes for all others, twice each.

save, 1 rank -> save, 2 ranks -> load, 2 ranks -> load, 1 rank
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from system.distributed.launch import TESTS, launch

PHASES = (("save", 1), ("save", 2), ("load", 2), ("load", 1))
VERDICTS = ("equal", "refused", "wrong", "crash", "needs CUDA", "untrained")
Line = dict[str, Any]
"""`cell` (optimizer, source, target, saver), `verdict`, `why`."""


def matrix(
    root: Path, savers: Sequence[str], optimizers: Sequence[str], limit_s: float
) -> list[Line]:
    """Run all cells; `limit_s` is for one launch."""
    found = []
    for phase, ranks in PHASES:
        lines = root / f"{phase}-{ranks}.jsonl"
        while not (root / f"{phase}-{ranks}.ended").exists():
            before = _length(lines)
            output = _launched(phase, ranks, root, savers, optimizers, limit_s)
            if not (root / f"{phase}-{ranks}.ended").exists() and _length(lines) == before:
                _blame(root / f"{phase}-{ranks}.began", lines, output)
        found += [json.loads(line) for line in lines.read_text().splitlines()]
    return [line for line in found if len(line["cell"]) == 4]


def _launched(
    phase: str,
    ranks: int,
    root: Path,
    savers: Sequence[str],
    optimizers: Sequence[str],
    limit_s: float,
) -> str:
    args = [phase, str(root), ",".join(savers), ",".join(optimizers)]
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torchao compiles its steps, for minutes
    if ranks > 1:
        ran = launch("live.optimizers.cells", ranks, *args, timeout_s=limit_s, forked=False)
        return "\n".join(ran.output.values())
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "live.optimizers.cells", *args]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=limit_s, check=False
    )
    return done.stderr


def _length(lines: Path) -> int:
    return len(lines.read_text().splitlines()) if lines.exists() else 0


def _blame(began: Path, lines: Path, output: str) -> None:
    """Write down that the cell that was under way ended its process, or never ended."""
    assert began.exists(), output[-3000:]
    cell = json.loads(began.read_text())
    began.unlink()
    with lines.open("a") as file:
        line = {"cell": cell, "verdict": "crash", "why": f"the process ended: {output[-300:]}"}
        file.write(json.dumps(line) + "\n")


def counts(lines: Sequence[Line], saver: str) -> dict[str, int]:
    """Cells of a saver by verdict."""
    verdicts = [line["verdict"] for line in lines if line["cell"][3] == saver]
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS}
