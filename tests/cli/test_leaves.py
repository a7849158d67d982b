"""`holdfast diff` in few lines: what belongs together is one, and says how many values differ."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np

from builders import FSDP_TP, build, transformer
from cli.calling import call, call_json
from holdfast.cli.diff import in_few_lines
from holdfast.store import LocalStore


def generators(seed: int) -> dict[str, object]:
    """What `Rng` keeps, without torch."""
    kind, keys, *rest = np.random.RandomState(seed).get_state()
    return {"python": random.Random(seed).getstate(), "numpy": [kind, np.asarray(keys), *rest]}


def saved(root: Path, step: int, num_ranks: int = 4) -> None:
    """A step with generators of each rank, and an optimizer of 50 groups with another rate each step."""
    groups = [{"lr": 0.1 * step, "betas": (0.9, 0.9 + step / 100)} for _ in range(50)]
    rng = [generators(100 * step + rank) for rank in range(num_ranks)]
    extras = {"optim": {"param_groups": groups}, "sched": {"last_epoch": step}}
    build(LocalStore(root), FSDP_TP, transformer(), step=step, extras=extras,
          per_rank={"rng": ("fresh", rng)})  # type: ignore[arg-type]  # fmt: skip


def test_a_generator_is_one_line(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    saved(tmp_path, 2)
    code, out, _ = call("diff", f"{tmp_path}@1", f"{tmp_path}@2")
    lines = {line.split("  ")[1]: line for line in out.splitlines() if line.startswith("  ")}
    assert code == 1
    assert "Extras: 11 differences" in out
    for rank in range(4):
        assert "623 values differ" in lines[f"rank{rank}.rng.python"]
        assert "uint32 array [624]" in lines[f"rank{rank}.rng.numpy[1]"]
        assert re.search(r"\(62\d elements differ\)", lines[f"rank{rank}.rng.numpy[1]"])
    assert lines["optim.param_groups[*].lr"].split()[1:] == ["0.1", "0.2", "(50", "times)"]
    assert "(50 times)" in lines["optim.param_groups[*].betas[1]"]
    assert lines["sched.last_epoch"].split()[1:] == ["1", "2"]


def test_all_shows_every_leaf_and_json_has_them(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    saved(tmp_path, 2)
    rows = call_json("diff", f"{tmp_path}@1", f"{tmp_path}@2")[1]["extras"]
    assert len(rows) == 4 * (623 + 1) + 50 * 2 + 1
    out = call("diff", f"{tmp_path}@1", f"{tmp_path}@2", "--all")[1]
    assert f"Extras: {len(rows):,} differences" in out
    assert all(row["path"] in out for row in rows)


def test_lines_stand_for_all_rows() -> None:
    few = [("x.betas[0]", "1", "2"), ("x.betas[1]", "3", "4")]
    assert in_few_lines(few) == [("x.betas[0], [1]", "1, 3", "2, 4")]
    assert in_few_lines([("s.lr[1]", "1", "2")]) == [("s.lr[1]", "1", "2")]
    keys = [(f"d.{i}", "1", "2") for i in range(9)]
    assert in_few_lines(keys) == keys
    ranks = [(f"rank{i}.loader.at", str(i), "0") for i in range(1, 9)]
    assert in_few_lines(ranks) == [("rank*.loader.at", "", "8 values differ, on 8 ranks")]
    both = [(f"rank{i}.rng[{j}]", "1", "2") for i in range(8) for j in range(10)]
    assert in_few_lines(both) == [("rank*.rng", "", "80 values differ, on 8 ranks")]
    groups = [(f"g[{i}].lr", str(i), "0") for i in range(1, 6)]
    assert in_few_lines(groups) == [("g[*].lr", "", "5 values differ")]
