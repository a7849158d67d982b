"""The result of a restore: the step, and how it was reached."""

from __future__ import annotations

from typing import Literal


class Restored(int):
    """The step that `Checkpointer.restore` reached.

    It is an integer, so that `step = ckpt.restore()` is all that most scripts need.  It is 0 both for a
    restored step 0 and if there was nothing to restore; `found` tells the two apart.
    """

    tier: Literal["memory", "durable", "upload", "source"] | None
    """Place that the full step was read from: memory of the nodes, the root, the home behind it
    (`upload=`), or the `source` that was given (also a foreign checkpoint in the root).  None if there was
    nothing."""
    replayed: int
    """The number of recorded steps that were done again after the full step."""
    exactness: str
    """`bit-exact`, or how far a step that was made from gradients on the host may be from the device's."""

    def __new__(
        cls,
        step: int,
        tier: Literal["memory", "durable", "upload", "source"] | None = None,
        replayed: int = 0,
        exactness: str = "bit-exact",
    ) -> Restored:
        restored = super().__new__(cls, step)
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
            f"exactness={self.exactness!r})"
        )

    def __str__(self) -> str:
        return int.__repr__(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)
