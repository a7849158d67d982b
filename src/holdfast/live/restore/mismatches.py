"""Mismatches between a checkpoint and the live state, as values.  The error renders them as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

_TEXTS = {
    "differs": "{name}: {said}",
    "missing": "missing in the checkpoint: {name}{said}",
    "unexpected": "unexpected in the checkpoint: {name}{said}",
    "left out": "left out when saved, and not in the live model: {name}",
    "one memory": "{name} share memory here, and different values were saved of them (give each memory of "
    "its own: clone() one of them, or copy.deepcopy() what was shared)",
    "one object": "{name} are one {said} here, and were saved with different values",
    "order": "{name}: {said}: that they come in the order in which they were saved cannot be proved",
    "pattern": "only={name!r} matches no tensor that is saved and in the state ({said})",
    "said": "{said}",
}
"""The line that a user reads, by kind."""


class Mismatch(msgspec.Struct, frozen=True, array_like=True):
    """One difference between checkpoint and live state."""

    kind: str
    """A key of `_TEXTS`.  `order`: parameters without names in an unproved order; `pattern`: a pattern of
    `only=` that matches nothing; `said`: a whole line of a framework or an error."""
    name: str
    """Name of the tensor, extra, key or pattern; two names where the live state has one object."""
    said: str = ""
    """The rest of the line: a reason, a near miss."""

    @property
    def text(self) -> str:
        """The line that a user reads."""
        return _TEXTS[self.kind].format(name=self.name, said=self.said)


def differs(name: str, said: str) -> Mismatch:
    """The mismatch of two values under one name."""
    return Mismatch("differs", name, said)


@dataclass
class Problems:
    """The mismatches of one rank."""

    found: list[Mismatch] = field(default_factory=list)
    """Mismatches that refuse a load in any case."""
    missing: list[str] = field(default_factory=list)
    """Names that the checkpoint lacks."""
    unexpected: list[Mismatch] = field(default_factory=list)
    """Parts of modules and objects that the checkpoint has and the live state lacks."""
    twice: dict[str, str] = field(default_factory=dict)
    """Further names of tied weights that the checkpoint has as tensors, too, with the first names."""

    def add(self, other: Problems) -> None:
        """Add the mismatches of another comparison."""
        self.found += other.found
        self.missing += other.missing
        self.unexpected += other.unexpected

    def forget(self, names: Iterable[str]) -> None:
        """Drop the mismatches of these names: another mismatch covers them."""
        names = set(names)
        self.found = [one for one in self.found if one.name not in names]
        self.missing = [name for name in self.missing if name not in names]
