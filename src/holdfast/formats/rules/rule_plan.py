"""The share of a step that each rank of a mesh would store by rules; reads only the manifest.

Rules name parameters.  A tensor `model.h.0.weight` is parameter `h.0.weight`, and so is the optimizer state
`optim.h.0.weight.exp_avg`.  A state whose shape differs from its parameter's (a counter, a factored moment)
has no layout: each rank keeps it whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from holdfast.core.format.dtypes import DTYPES
from holdfast.core.format.manifest import MODEL_STATES, Manifest, TensorEntry, owner_of
from holdfast.core.layout import Mesh
from holdfast.formats.rules import Layout, RuleSet
from holdfast.formats.rules.layout import ShapeLayout


@dataclass(frozen=True)
class RuledTensor:
    """A tensor, its parameter, and its layout; None if it is kept whole."""

    entry: TensorEntry
    parameter: str
    layout: Layout | None

    @property
    def follows(self) -> bool:
        """True if it has its parameter's layout or is a counter, so that reports omit it."""
        return self.layout is not None or not self.entry.shape

    @property
    def itemsize(self) -> int:
        return DTYPES[self.entry.dtype].bytes


@dataclass(frozen=True)
class Share:
    """One rank's share: bytes with padding, and the number of tensors that it has parts of."""

    rank: int
    num_tensors: int
    bytes: int
    padding_bytes: int


@dataclass(frozen=True)
class RulePlan:
    """The tensors of a step by rules, over a mesh."""

    manifest: Manifest
    rules: RuleSet
    mesh: Mesh
    tensors: tuple[RuledTensor, ...]

    @staticmethod
    def of(manifest: Manifest, rules: RuleSet, mesh: Mesh) -> RulePlan:
        """Plan a step.  RuleError if names and rules do not match, or ranks would not hold all once."""
        shapes = {
            parameter_of(t): t.shape for t in manifest.tensors if t.state in MODEL_STATES
        } or {parameter_of(t): t.shape for t in manifest.tensors if t.shape}
        whole = {t.name: t.shape for t in manifest.tensors}
        tied = {_without_key(a): whole[to] for a, to in manifest.aliases.items() if to in whole}
        rules.check({**tied, **shapes}, mesh)
        found = []
        for t in manifest.tensors:
            name = parameter_of(t)
            other = t.state not in MODEL_STATES and t.shape != shapes.get(name)
            layout = None if other else rules.layout(name, t.shape, mesh, state=_state(t))
            found.append(RuledTensor(t, name, layout))
        return RulePlan(manifest, rules, mesh, tuple(found))

    def share(self, rank: int) -> Share:
        """The share of a rank."""
        tensors = total = padding = 0
        for (alike, itemsize), count in self._kinds.items():
            view = alike.view(alike.at(rank))
            real = alike.real(alike.at(rank))
            tensors += count * bool(real)
            total += count * view.size * itemsize
            padding += count * (view.size - real) * itemsize
        whole = [r for r in self.tensors if r.layout is None]
        total += sum(_bytes(r) for r in whole)
        return Share(rank, tensors + len(whole), total, padding)

    @cached_property
    def _kinds(self) -> Counter[tuple[ShapeLayout, int]]:
        """Number of tensors of each layout and item size."""
        return Counter((r.layout.alike, r.itemsize) for r in self.tensors if r.layout is not None)


def parameter_of(t: TensorEntry) -> str:
    """The parameter's name, without the key of the state and the name of an optimizer state."""
    return _without_key(owner_of(t.name, t.state))


def _without_key(name: str) -> str:
    return name.split(".", 1)[-1]


def _state(t: TensorEntry) -> str:
    return "param" if t.state in MODEL_STATES else t.state


def _bytes(ruled: RuledTensor) -> int:
    size = ruled.itemsize
    for n in ruled.entry.shape:
        size *= n
    return size
