"""Optimizers and layouts in docs/strangers.md, from the record of `bench/claims/optimizer_matrix.py`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[3] / "bench/results/optimizer_matrix.json"
SAVERS = {
    "holdfast": "holdfast",
    "dcp": "`dcp.save`, `dcp.load` with `get_state_dict`",
    "torch_checkpointing": "torch_checkpointing 0.1.1 with `get_state_dict`",
}
VERDICTS = ("equal", "refused", "wrong", "crash", "needs CUDA")


def section() -> str:
    """Counts of each saver, and by optimizer what became of its cells."""
    record = json.loads(RECORD.read_text())["found"]
    lines = [line for line in record["lines"] if line["verdict"] != "untrained"]
    names = list(dict.fromkeys(line["cell"][0] for line in record["lines"]))
    head = (
        f"## {len(names)} optimizers on six layouts\n\n"
        "Trained for two steps on one process, DDP, FSDP2, tensor parallelism, both, and pipeline stages; "
        "saved, and loaded by fresh objects on three layouts each. *Equal*: all that was gathered is the "
        "same bit for bit, on the same layout two steps later, too. Cells that the optimizer itself cannot "
        "train are left out (`bench/claims/optimizer_matrix.py`)."
    )
    rows = ["| | equal | refused | wrong | crash | needs CUDA |", "|---|---|---|---|---|---|"]
    for saver, words in SAVERS.items():
        found = counted(lines, saver)
        rows.append(f"| {words} | {' | '.join(str(found[v]) for v in VERDICTS)} |")
    return "\n\n".join([head, "\n".join(rows), "\n".join(by_optimizer(lines, names))])


def counted(lines: list[dict[str, Any]], saver: str, name: str | None = None) -> Counter[str]:
    """Cells of a saver, or of one optimizer with it, by verdict."""
    return Counter(
        line["verdict"]
        for line in lines
        if line["cell"][3] == saver and name in (None, line["cell"][0])
    )


def by_optimizer(lines: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Rows of a table: equal cells of all tried, by saver."""
    rows = ["| equal of | holdfast | DCP | torch_checkpointing |", "|---|---|---|---|"]
    for name in names:
        cells = []
        for saver in SAVERS:
            found = counted(lines, saver, name)
            cells.append(f"{found['equal']} of {found.total()}")
        if any(cell != "0 of 0" for cell in cells):
            rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows
