"""Gradients that are being accumulated while a step is saved.

No checkpoint has gradients, so a restart takes its first update without those of the batches before the
save. A gradient alone proves nothing: many loops clear gradients at the start of the next iteration, long
after the optimizer's step.  A gradient counts if it was made, or written, after the last step of any
optimizer, and is not zero.  Of any optimizer, since in a GAN the generator's loss leaves gradients in the
discriminator, which are cleared before they are used.

The script may still clear such gradients: those of a skipped step, or of an evaluation that goes backward.
So the notice comes only when an optimizer has stepped with them (`KeptGradients`).

A few parameters stand for all.  The hook behind each step notes which gradients they have, and how
often these were written; a save compares.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from holdfast.base.errors import need
from holdfast.live.state.observer import calls_hooks
from holdfast.live.state.optimizer_wrappers import params_of, stepping
from holdfast.live.state.placed import local_of, memory_of
from holdfast.live.state.recognising import State
from holdfast.live.state.several import combined_parts
from holdfast.live.state.writes import Mark, times_written

need("torch", torch.Tensor, "_values")

LOOKED_AT = 2
"""Number of parameters that stand for all."""


def gradients_text(step: int) -> str:
    """The notice of a step that is saved while gradients are accumulated."""
    return (
        f"step {step} is saved while gradients are accumulated, which no checkpoint has: runs that go on "
        "from it take the next step without them"
    )


class PendingGradients:
    """The gradients of a few parameters, compared with those after the last step of an optimizer."""

    def __init__(self) -> None:
        self._params: list[Any] = []
        self._behind: list[Mark | None] = []
        """Marks of their gradients then."""
        self._before: list[Mark | None] = []
        """Marks of the gradients at the call before the last."""
        self._now: list[Mark | None] = []
        self.kept: KeptGradients | None = None
        """Gradients that were there at the last save, if there were any."""
        self._may_skip = False
        """True if a loss scaler may skip steps whose gradients overflow."""

    def choose(self, state: State) -> None:
        """Choose parameters among those of the optimizers of a state, between two steps."""
        found = [
            [p for p in params_of(part) if p.requires_grad]
            for value in state.values()
            for part in _parts(value)
        ]
        chosen = [p for params in found for p in _spread(params, max(1, LOOKED_AT // len(found)))]
        scalers = [
            v for v in state.values() for kind in type(v).__mro__ if kind.__name__ == "GradScaler"
        ]
        self._may_skip = bool(scalers)
        if [id(p) for p in chosen[:LOOKED_AT]] != [id(p) for p in self._params]:
            self._params = chosen[:LOOKED_AT]
            self.stepped()  # those that are there already are of an earlier time

    def stepped(self) -> None:
        """Note the gradients behind a step.  Called in the hook, for each step of any optimizer."""
        self._behind = [_mark(p.grad) for p in self._params]

    def look(self) -> None:
        """Note the gradients at a call of the script, where their later use depends on it."""
        if self.kept is not None and not self.kept.are_there():
            self.kept = None
        if self._may_skip:
            self._before = self._now
            self._now = [_mark(p.grad) for p in self._params]

    def keep(self, step: int) -> None:
        """Keep the marks of gradients that are pending at the save of a step."""
        pairs = [(p, behind) for p, behind in zip(self._params, self._behind) if p.grad is not None]
        self.kept = self.kept or KeptGradients(step, pairs)

    def are_accumulated(self, *, has_stepped: bool) -> bool:
        """True if there are gradients that no step has used.  `has_stepped`: since the call before; then a
        device is not made to wait for the values."""
        same = len(self._before) == len(self._params)
        before = self._before if same else [None] * len(self._params)
        for p, behind, earlier in zip(self._params, self._behind, before):
            grad, mark = p.grad, _mark(p.grad)
            if mark is None or (behind is not None and not mark.differs(behind)):
                continue
            if has_stepped and grad.device.type != "cpu":
                continue
            if self._may_skip and not _is_written_again(mark, earlier):
                continue
            values = _values(grad)
            if values is not None and values.any() and values.isfinite().all():
                return True
        return False


class KeptGradients:
    """Gradients that were there when a step was saved, until a step uses them or they are cleared.

    A script that clears gradients by `None` has others in their place then.  One that sets them to zero has
    the same ones, and what tells is how often they were written: once by each backward, so not more than
    once between two calls of the script.
    """

    def __init__(self, step: int, pairs: list[tuple[Any, Mark | None]]) -> None:
        """`pairs`: parameters with gradients, each with the mark of its gradient behind the last step."""
        self.step = step
        self._kept = [(p, weakref.ref(p.grad), _writes(p.grad)) for p, _ in pairs]
        self._is_renewed = all(b is not None and b.tensor() is not p.grad for p, b in pairs)
        """True if the script clears gradients by None."""
        self._is_added_to = False
        """True if a later backward has added to them."""

    def are_there(self) -> bool:
        """True if they may be there still, at a call of the script."""
        if any(p.grad is None or p.grad is not ref() for p, ref, _ in self._kept):
            return False
        new = [_writes(p.grad) - before for p, _, before in self._kept]
        if max(new) > 1 and not self._is_renewed:
            return False
        self._is_added_to |= max(new) > 0
        self._kept = [(p, ref, _writes(p.grad)) for p, ref, _ in self._kept]
        return True

    def are_used_by(self, optimizer: Any) -> bool | None:
        """True if a step that has ended has used them, False if it had others, None if it is the step of
        another optimizer.  What clips or unscales has written them, too."""
        own = set(map(id, params_of(optimizer)))
        if not any(id(p) in own for p, *_ in self._kept):
            return None
        self._is_renewed |= self._is_added_to
        return self.are_there() and any(map(_is_any, self._kept))


def _values(grad: Any) -> torch.Tensor | None:
    """The values of a gradient: of a sparse one, those that are there.  None of other layouts."""
    local = local_of(grad)
    if local.layout is torch.sparse_coo:
        return local._values()
    return local if local.layout is torch.strided else None


def _is_any(kept: tuple[Any, ...]) -> bool:
    """True if a gradient that was kept is not zero."""
    values = _values(kept[0].grad)
    return values is not None and bool(values.any())


def _writes(grad: Any) -> int:
    """Return the number of writes to the memory of a gradient, each of which is counted as two."""
    return times_written(memory_of(grad)) // 2


def _parts(value: Any) -> list[Any]:
    """The torch optimizers of a value whose steps call hooks."""
    if not isinstance(value, torch.optim.Optimizer):
        return []
    return [one for one in map(stepping, combined_parts(value).values()) if calls_hooks(one)]


def _spread(params: list[Any], number: int) -> list[Any]:
    """Some parameters from all over a list, those that have gradients before others."""
    having = [p for p in params if p.grad is not None] or params
    return having[:: max(1, len(having) // number)][:number]


def _mark(grad: Any) -> Mark | None:
    """A mark that tells whether a gradient is the same later, and not written."""
    return None if grad is None else Mark.of(grad)


def _is_written_again(now: Mark, before: Mark | None) -> bool:
    """True if a gradient is the same as before, and was written since."""
    return before is not None and now.tensor() is before.tensor() and now.differs(before)
