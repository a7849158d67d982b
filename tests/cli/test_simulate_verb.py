"""`holdfast simulate`: its table, its JSON, its drawing, traces, and what it says of mistakes."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli import calling

STRATEGIES = ["checkpoint", "async", "memory copy", "holdfast", "in place", "shrinking"]
HOLDFAST = 3
"""Its place; the first four are restarted."""


def call(*args: object) -> tuple[int, str, str]:
    return calling.call("simulate", *args)


def call_json(*args: object) -> Any:
    code, found = calling.call_json("simulate", *args)
    assert code == 0
    return found


def test_the_table() -> None:
    code, out, _ = call(100_000, 10, "--days", 3)
    assert code == 0
    assumed, found = out.split("3 days\n")
    assert "one in 50,000 h of a device, exponential" in assumed and "180 s, beside" in assumed
    rows = found.splitlines()[1:13]
    assert [name for row in rows for name in STRATEGIES if name in row] == STRATEGIES * 2
    assert rows[0].split()[:2] == ["10", "0"] and rows[6].split()[0] == "100,000"
    assert "durable" in rows[9] and "memory" in rows[9]


def test_json() -> None:
    found = call_json(10_000, "--days", 2, "--seed", 3, "--estimate")
    assert found["asked"]["estimate"] and found["assumed"][0]["devices"] == 10_000
    assert [row["strategy"] for row in found["runs"]] == STRATEGIES
    for row in found["runs"]:
        parts = ("training_s", "saving_s", "lost_s", "recovering_s", "fewer_s")
        assert sum(row[part] for part in parts) == pytest.approx(2 * 86400) == row["wall_s"]
        assert row["effective"] == pytest.approx(row["training_s"] / row["wall_s"])
    assert "estimated" in found["runs"][HOLDFAST]["changes"][-1]
    assert call_json(10_000, "--days", 2, "--seed", 3, "--estimate") == found
    assert call_json(10_000, "--days", 2, "--seed", 4, "--estimate") != found


def test_large_states_want_records() -> None:
    """Where a snapshot does not fit beside a step, holdfast keeps records, and loses least."""
    rows = call_json(100_000, "--days", 3, "--state", "32GB", "--record", "320MB", "--storage", "10TB",
                     "--node-storage", "10GB")["runs"]  # fmt: skip
    assert rows[HOLDFAST]["frequencies"]["delta"] == 1
    assert rows[HOLDFAST]["effective"] > max(row["effective"] for row in rows[:HOLDFAST])


def test_what_recovery_in_place_is_worth() -> None:
    """By options alone: quicker from failure to training, and no waiting for nodes where it shrinks."""
    asked = (100_000, "--days", 3, "--detect-s", 1, "--enter-s", 2, "--repair-s", 3600, "--standby")
    *_, restart, in_place, shrinking = call_json(*asked, 99)["runs"]
    sooner_s = restart["recovering_s"] - in_place["recovering_s"]
    assert sooner_s / restart["failures"] == pytest.approx(180 - 3, rel=0.15)  # some begin anew
    assert in_place["effective"] == shrinking["effective"] and shrinking["fewer_s"] == 0
    *_, waits, shrinks = call_json(*asked, 0)["runs"]
    assert waits["fewer_s"] == 0 < shrinks["fewer_s"]
    assert 2 * waits["effective"] < shrinks["effective"] < shrinking["effective"]


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("hours,kind\n10,process\n3.5,node\n20,process\n")
    rows = call_json(64, "--trace", path)["runs"]
    assert [(row["failures"], row["wall_s"]) for row in rows] == [(3, 21 * 3600)] * len(STRATEGIES)
    assert call_json(64, "--trace", path, "--days", 0.5)["runs"][0]["failures"] == 2
    assert f"as in {path}; 33% of them" in call(64, "--trace", path)[1]


def test_a_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "drawn.svg"
    code, out, _ = call(10, 1000, "--days", 1, "--plot", path)
    assert code == 0 and out.endswith(f"Drawn: {path}\n")
    assert "<svg" in path.read_text()


def test_a_drawing_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    code, out, err = call(10, "--plot", tmp_path / "x.png")
    assert (code, out) == (2, "")
    assert "--plot needs matplotlib" in err and "pip install matplotlib" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0,), "devices 0"),
        ((10, "--days", 0), "--days 0"),
        ((10, "--state", "2 gigs"), "--state '2 gigs': not a size"),
        ((10, "--overhead", 3), "Auto(overhead=3.0)"),
        ((10, "--shape", 0), "--shape 0: must be from 0.1 to 10"),
        ((10, "--step-s", -1), "step_s -1: must be positive"),
        ((10, "--node-share", 2), "node_share 2"),
        ((10, "--standby", -1), "standby_nodes -1"),
        ((10, "--trace", "no.csv"), "cannot read the trace no.csv: No such file"),
        ((10, "--plot", "no/such/folder.svg"), "--plot no/such/folder.svg"),
        ((10, "--plot", "x.docx"), "--plot x.docx"),
        ((10**9,), "too many to simulate"),
    ],
)
def test_usage(args: tuple[Any, ...], message: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call(*args)
    assert code == 2 and message in err, err


def test_an_empty_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("hours,kind\n")
    code, _, err = call(64, "--trace", path)
    assert code == 2 and "has no failure" in err


def test_without_torch() -> None:
    code = """
import sys
from holdfast.cli.main import main
try:
    main()
except SystemExit as end:
    loaded = sorted({"torch", "rich", "matplotlib"} & set(sys.modules))
    print("LOADED", loaded, end.code, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "simulate", "10"], capture_output=True, text=True, check=False
    )
    assert "LOADED [] 0" in done.stderr, done.stderr
