"""Frozen parameters (`trainable_only`): those that a step left out, compared with the live ones."""

from __future__ import annotations

from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.live.restore.mismatches import Problems, differs
from holdfast.live.restore.targets import RestoreOptions, is_known
from holdfast.live.state.named import Prepared


def compare_frozen(
    checkpoint: Checkpoint, live: Prepared, options: RestoreOptions, found: Problems
) -> None:
    """Find parameters that are frozen in the live model or in the step, but not in both."""
    left = checkpoint.left_out
    for name in [n for n in found.missing if n in left] if options.strict else ():
        found.missing.remove(name)
        said = (
            "not saved, for it was frozen and left out: holdfast.trainable_only(model) leaves it out here, "
            "too, if it needs no gradient"
        )
        found.found.append(differs(name, said))
    for name, here in live.frozen.items():
        if not options.wanted(name):
            continue
        if name in left:
            (dtype, shape), (own, lies) = left[name], here
            if shape != lies or (dtype != own and not options.cast):
                said = f"left out as {dtype} {shape} when saved, and frozen as {own} {lies} here"
                found.found.append(differs(name, said))
        elif not options.strict:
            found.missing += [] if is_known(checkpoint, name) else [name]
        elif is_known(checkpoint, name):
            live.owned.add(name)
            said = (
                "saved, and left out here: it needs no gradient (to load it, mark the model by "
                "trainable_only() afterwards)"
            )
            found.found.append(differs(name, said))
        else:
            said = "missing in the checkpoint, which does not list it as left out"
            found.found.append(differs(name, said))
