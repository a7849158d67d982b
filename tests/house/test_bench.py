"""Each claim in `bench/claims` has a bound, and a committed record that has its figures."""

from __future__ import annotations

import json
from typing import Any

import pytest

import zygote
from bench.lib.claims import RESULTS, ROOT, Claim, Judged, claims_of, judged, scripts, table
from bench.lib.common import reporting

HELP = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
name, sys.argv[1:] = sys.argv[1], ["--help"]
runpy.run_module(name, run_name="__main__")
"""
UNMEASURED = {"gpu"}
"""No figure was taken on a GPU."""
CLAIM = Claim("A save takes half as long.", r"^save, (.+?) \|", at_least=2)


def record(started: str, **figures: float) -> dict[str, Any]:
    rows = [
        {"what": f"save, {case}", "holdfast": "", "against": "", "value": figure, "unit": " x"}
        for case, figure in figures.items()
    ]
    return {"started": started, "rows": rows}


def verdict(now: dict[str, float], committed: dict[str, float], *, is_measured: bool = True) -> str:
    figures = (CLAIM.figures([record("2026", **those)]) for those in (now, committed))
    return Judged("save", CLAIM, *figures, is_measured=is_measured).verdict


@pytest.mark.parametrize("script", scripts())
def test_a_script(script: str) -> None:
    """Its claims are sentences with a bound, in the unit of the rows that show them."""
    ran = zygote.run(["-c", HELP, f"bench.claims.{script}"])
    assert ran.returncode == 0, ran.stderr
    claims = claims_of(script)
    assert claims
    for claim in claims:
        assert claim.sentence[0].isupper()
        assert claim.sentence.endswith(".")
        assert (claim.at_most, claim.at_least) != (None, None)
    if script in UNMEASURED:
        return
    lines = judged(script)
    for line in lines:
        assert line.now, f"no record has a row for: {line.claim.sentence}"
        units = {row["unit"].split()[:1] == line.claim.unit.split() for row in rows_of(line)}
        assert units == {True}, f"another unit than {line.claim.unit}: {line.claim.sentence}"
    assert f"| {script} | {claims[0].sentence} | {claims[0].bound} |" in table(lines)


def rows_of(line: Judged) -> list[dict[str, Any]]:
    """Rows of its records that show a claim."""
    paths = [RESULTS / f"{name}.json" for name in line.claim.names(line.script)]
    records = [json.loads(path.read_text()) for path in paths if path.exists()]
    return [row for r in records for row in r["rows"] if line.claim.figures([r | {"rows": [row]}])]


def test_verdicts() -> None:
    """A claim no longer holds where a case misses the bound that kept it as committed."""
    assert verdict({"a": 2.0, "b": 3.0}, {}) == "holds"
    assert verdict({"a": 2.0, "b": 1.9}, {"b": 1.8}) == "does not hold"
    assert verdict({"a": 2.0, "b": 1.9}, {"a": 1.0, "b": 2.1}) == "no longer holds"
    assert verdict({"a": float("nan")}, {"a": 2.0}) == "no longer holds"
    assert verdict({}, {"a": 2.0}) == "no longer holds", "its rows are gone from the record"
    assert verdict({}, {"a": 2.0}, is_measured=False) == "not measured"
    assert verdict({}, {}) == "not measured"


def test_the_newest_record_that_has_a_case_counts() -> None:
    older, newer = record("2026-01", a=1.0, b=2.0), record("2026-02", a=3.0)
    assert CLAIM.figures([newer, older]) == {("a", 1): 3.0, ("b", 1): 2.0}


def test_what_misses_the_bound_is_bold() -> None:
    assert CLAIM.shown({("a", 1): 1.0, ("b", 1): 2.5}) == "**1** / 2.5"
    assert CLAIM.shown({(n, 1): 2.0 + n for n in range(5)}) == "2 (worst of 5)"
    both = Claim("A share.", r"^save", at_least=0.8, at_most=1.25)
    assert (
        both.shown({(n,): v for n, v in enumerate((1, 1.2, 0.5, 1, 0.9))}) == "**0.5** (worst of 5)"
    )


@pytest.mark.parametrize("options", [[], ["--root", "/disk", "--rounds", "2", "--small"]])
def test_options_for_all_reach_scripts_that_only_compute(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They say that it changes nothing there."""
    args = reporting("A script.").parse_args(options)
    assert (args.root, args.small) == (None, False)
    assert capsys.readouterr().out.count("changes nothing") == len(
        [o for o in options if "--" in o]
    )
