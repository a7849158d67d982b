"""Names of experts: a rank numbers its own from 0, files and holdfast number those of all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable

_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,9})(\..*)")


def is_expert(name: str) -> bool:
    """True if a parameter is an expert's."""
    return _EXPERT.fullmatch(name) is not None


def globally(names: Iterable[str], rank: int) -> dict[str, str]:
    """Map an expert-parallel rank's own names to names with the experts' numbers among all ranks.

    `names` are all of the rank's: every rank has equally many experts of a layer.
    """
    matches = {name: _EXPERT.fullmatch(name) for name in names}
    local: dict[str, set[str]] = {}
    for match in filter(None, matches.values()):
        local.setdefault(match[1], set()).add(match[2])
    return {
        name: f"{m[1]}{rank * len(local[m[1]]) + int(m[2])}{m[3]}" if m else name
        for name, m in matches.items()
    }


def of_rank(names: Iterable[str], rank: int, ranks: int) -> list[str]:
    """Return those of `names`, numbered among all ranks, that are of one rank's experts."""
    matches = [m for m in map(_EXPERT.fullmatch, names) if m]
    numbers: dict[str, set[int]] = {}
    for m in matches:
        numbers.setdefault(m[1], set()).add(int(m[2]))
    return [m[0] for m in matches if int(m[2]) * ranks // len(numbers[m[1]]) == rank]
