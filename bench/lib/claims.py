"""Claims: promises with a figure that README.md or docs/ make, each with the bound that figures must keep.

A script in `bench/claims` measures one subject.  It states its claims at its head, and writes a record into
`bench/results`.  A record has rows of text and one value each; the rows that a claim's pattern finds show
it, one for each case (a number of ranks, a model, a peer):

    row     durable save, 2 ranks | 0.39 s (3.85 GB/s) | dcp.save: 1.09 s (1.39 GB/s) | 2.797
    claim   Claim("A durable save takes at most half as long as dcp.save.",
                  r"^durable save, (.+?) \\|.*\\| dcp.save", at_least=2)

A claim holds if the figures of all its cases keep the bound.  A bound is what is promised or aimed at,
never what was reached: a claim that does not hold is told as one.  What has no aim has no claim.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
TRIED = ROOT / "build" / "bench"
"""Records of scripts that were only tried."""
NO_LONGER = "no longer holds"
FEW = 4
"""Figures that are shown side by side; of more, the worst is."""
Record = dict[str, Any]
Case = tuple[Any, ...]
"""What the groups of the pattern found, and a number where they found the same more than once."""


@dataclass(frozen=True)
class Claim:
    """A promise in one sentence.  `rows` searches `what | holdfast | against` of a record's rows."""

    sentence: str
    rows: str
    at_most: float | None = None
    at_least: float | None = None
    unit: str = "x"
    records: tuple[str, ...] = ()
    """Names of its records, if not the script's alone.  The newest that has a case counts."""

    @property
    def bound(self) -> str:
        sides = (("at most", self.at_most), ("at least", self.at_least))
        text = " and ".join(f"{word} {limit:g}" for word, limit in sides if limit is not None)
        return f"{text} {self.unit}".strip()

    def names(self, script: str) -> tuple[str, ...]:
        """Names of its records."""
        return self.records or (script,)

    def is_kept(self, figure: float) -> bool:
        """Whether a figure keeps the bound; one that is not a number does not."""
        low = float("-inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        return low <= figure <= high

    def _room(self, figure: float) -> float:
        """How far a figure is from the bound, as a share of it; below 0 if it misses it."""
        low = (
            [] if self.at_least is None else [(figure - self.at_least) / (abs(self.at_least) or 1)]
        )
        high = [] if self.at_most is None else [(self.at_most - figure) / (abs(self.at_most) or 1)]
        return min(low + high)

    def figures(self, records: Iterable[Record]) -> dict[Case, float]:
        """By case, the figure of the newest record that has it."""
        found: dict[Case, float] = {}
        for record in sorted(records, key=lambda r: r["started"]):
            seen: Counter[Case] = Counter()
            for row in record["rows"]:
                text = " | ".join((row["what"], row["holdfast"], row["against"]))
                if match := re.search(self.rows, text):
                    seen[match.groups()] += 1
                    found[(*match.groups(), seen[match.groups()])] = row["value"]
        return found

    def shown(self, figures: dict[Case, float]) -> str:
        """Figures as text; in bold what misses the bound."""
        values = list(figures.values())
        if len(values) > FEW:
            values = [min(values, key=self._room)]
        texts = [f"{v:.3g}" if abs(v) < 1000 else f"{v:.0f}" for v in values]
        texts = [t if self.is_kept(v) else f"**{t}**" for t, v in zip(texts, values)]
        return " / ".join(texts) + f" (worst of {len(figures)})" * (len(figures) > FEW)


@dataclass(frozen=True)
class Judged:
    """A claim, its figures now, and those of the records that are committed."""

    script: str
    claim: Claim
    now: dict[Case, float]
    committed: dict[Case, float]
    is_measured: bool = True
    """Whether there are records now."""

    @property
    def verdict(self) -> str:
        missed = [case for case, figure in self.now.items() if not self.claim.is_kept(figure)]
        if not self.now:
            return NO_LONGER if self.is_measured and self.committed else "not measured"
        if any(self.claim.is_kept(self.committed[c]) for c in missed if c in self.committed):
            return NO_LONGER
        return "does not hold" if missed else "holds"

    @property
    def line(self) -> tuple[str, ...]:
        shown = (self.claim.shown(figures) for figures in (self.now, self.committed))
        return (self.script, self.claim.sentence, self.claim.bound, *shown, self.verdict)


def scripts() -> list[str]:
    """Names of all scripts in `bench/claims`."""
    return sorted(path.stem for path in (ROOT / "bench" / "claims").glob("*.py"))


def claims_of(script: str) -> tuple[Claim, ...]:
    found: tuple[Claim, ...] = importlib.import_module(f"bench.claims.{script}").CLAIMS
    return found


def judge(script: str, claim: Claim, now: Collection[Record]) -> Judged:
    """Judge a claim by these records, beside the committed ones."""
    before = (committed(name) for name in claim.names(script))
    figures = claim.figures(now), claim.figures(r for r in before if r)
    return Judged(script, claim, *figures, is_measured=bool(now))


def judged(script: str, folder: Path = RESULTS) -> list[Judged]:
    """Judge a script's claims by the records in a folder."""
    lines = []
    for claim in claims_of(script):
        paths = [folder / f"{name}.json" for name in claim.names(script)]
        lines.append(judge(script, claim, [json.loads(p.read_text()) for p in paths if p.exists()]))
    return lines


@cache
def committed(name: str) -> Record | None:
    """Return a record as it was last committed; None if it never was, or this is no clone."""
    command = ["git", "-C", str(ROOT), "show", f"HEAD:bench/results/{name}.json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # there is no git
        return None
    return json.loads(done.stdout) if not done.returncode else None


def table(lines: Iterable[Judged]) -> str:
    """Claims as Markdown, with a last line that counts them."""
    lines = list(lines)
    text = [("script", "claim", "bound", "now", "committed", ""), ("---",) * 6]
    text += [one.line for one in lines]
    counts = Counter(one.verdict for one in lines)
    told = ", ".join(f"{verdict}: {number}" for verdict, number in counts.most_common())
    return "\n".join(f"| {' | '.join(line)} |" for line in text) + f"\n\n{told}"
