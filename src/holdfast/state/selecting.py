"""Patterns that choose by name: what a load takes (`only=`), and whose rules are declared (`on_resize=`).

What matches nothing is misspelled: taken as it is, a load would load nothing and a rule would hold for
nothing, without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.errors import UsageError
from holdfast.near import near


def patterns_of(only: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """The patterns of `only=`.  UsageError if there are none, or one is no text."""
    if only is None:
        return None
    given = [only] if isinstance(only, str) else only
    texts = list(given) if isinstance(given, Iterable) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise UsageError(
            f"only={only!r}: must be a pattern of tensor names, or a list of some",
            hint="only='model.h.0.*'; leave it out to load everything",
        )
    return tuple(texts)


def check_on_resize(on_resize: dict[str, str], keys: Iterable[str]) -> None:
    """UsageError for a rule of a key that the state does not have."""
    known = [name for key in keys for name in (key, f"{key}.common")]
    for key in on_resize:
        if key not in known:
            raise UsageError(
                f"on_resize={{{key!r}: ...}}: the state has no key {key!r}",
                hint=near(key, known) or f"its keys are {', '.join(map(repr, known[::2]))}",
            )
