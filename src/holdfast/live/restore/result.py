"""The results of a look and of a restore: the step, and how it can be or was reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.core.store import Store
    from holdfast.live.restore.candidates import Identity
    from holdfast.live.restore.targets import RestoreOptions


@dataclass(frozen=True, slots=True)
class FoundAt:
    """What names a state for ever: a full step as it was saved, and where records lead from it."""

    root: str
    run: int
    step: int
    attempt: str
    tip: Identity | None


@dataclass(frozen=True, slots=True)
class Found:
    """The state that a restore would reach, as `Checkpointer.find` sees it without reading tensors."""

    step: int
    tier: str
    """Place of the full step: `memory` of the nodes, `durable` (the root), or `upload`, the home behind
    it."""
    extras: dict[str, Any] = field(repr=False)
    """The plain values of the state, by key, nested as they were handed over, and of objects what their
    `state_dict()` gave; of the newest record, where records lead on from the full step.  Tensors that are
    not among the manifest's values (over 64 KiB) are on the meta device: not read."""
    undecided: dict[str, str] = field(repr=False)
    """Keys whose values only the restore can tell, with the reason why."""
    replays: int
    """Number of recorded steps to be done again after the full step."""
    at: FoundAt = field(repr=False)
    """The key that `restore` knows it by."""


@dataclass(frozen=True, slots=True)
class RestoredFrom:
    """The place of the step that was restored; without a store, nothing more can be read from it."""

    step: int
    keys: frozenset[str] = frozenset()
    """The keys of its state; none if it is no step of the root."""
    store: Store | None = None
    attempt: str = ""
    options: RestoreOptions | None = None


class Restored(int):
    """The step that `Checkpointer.restore` reached.

    It is an integer, so that `step = ckpt.restore()` is all that most scripts need.  It is 0 both for a
    restored step 0 and if there was nothing to restore; `found` tells the two apart.
    """

    tier: str | None
    """Place that the full step was read from: `memory` of the nodes, `durable` (the root), `upload` (the
    home behind it), or the `source` that was given (also a foreign checkpoint in the root).  None if there
    was nothing."""
    replayed: int
    """The number of recorded steps that were done again after the full step."""
    exactness: str
    """`bit-exact`, or how far a step that was made from gradients on the host may be from the device's.  It
    is said of what is in the state: a loop over data that are not in `loaders` has no place in them."""
    loaders: tuple[str, ...]
    """The data loaders in the state, by key, or by path in lists and dicts; none if it has none."""

    def __new__(
        cls,
        step: int,
        tier: str | None = None,
        replayed: int = 0,
        exactness: str = "bit-exact",
        loaders: tuple[str, ...] = (),
    ) -> Restored:
        restored = super().__new__(cls, step)
        restored.loaders = loaders
        restored.tier, restored.replayed, restored.exactness = tier, replayed, exactness
        return restored

    @property
    def found(self) -> bool:
        """True if there was a step to restore."""
        return self.tier is not None

    def __repr__(self) -> str:
        if not self.found:
            return "Restored(nothing)"
        return (
            f"Restored(step={int(self)}, tier={self.tier!r}, replayed={self.replayed}, "
            f"exactness={self.exactness!r}, loaders={self.loaders!r})"
        )

    def __str__(self) -> str:
        return int.__repr__(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)
