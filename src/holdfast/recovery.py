"""Which step to restore: a pure choice over what there is.

Candidates come newest first.  A step that turns out to be damaged is passed over, aloud, and the next is
tried; what the user did wrong (a state that does not fit) is not passed over, because an older step
would not fit either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.errors import (
    Corrupt,
    FormatError,
    HoldfastError,
    NotFound,
    NotRecoverable,
    Unavailable,
    UnsupportedVersion,
)

PASSED_OVER = (Corrupt, FormatError, NotFound)
STOPS = (UnsupportedVersion, Unavailable)


def newest_good(
    candidates: Sequence[int],
    attempt: Callable[[int], None],
    passed_over: Callable[[int, HoldfastError], None],
) -> int:
    """Try each step in order until `attempt` succeeds; 0 if there are no candidates.

    NotRecoverable, with the reason for every candidate, if none can be used.
    """
    reasons: dict[int, str] = {}
    for step in candidates:
        try:
            attempt(step)
            return step
        except PASSED_OVER as error:
            if isinstance(error, STOPS):
                raise
            reasons[step] = str(error)
            passed_over(step, error)
    if not reasons:
        return 0
    lines = "\n".join(f"  step {s}: {why}" for s, why in reasons.items())
    raise NotRecoverable(
        f"none of {len(reasons)} step(s) can be restored:\n{lines}",
        reasons,
        hint="`holdfast verify` says what is damaged; restore the files from a copy",
    )
