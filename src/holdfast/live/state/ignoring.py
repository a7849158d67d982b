"""`holdfast.ignore`: the user's declarations that entries need not be saved.

A save holds every entry of the `state_dict()` of a module or an optimizer, or fails with the names of
entries that it cannot hold.  Such names may be given up, one by one or by pattern.  The mark is on the
object itself, not in the state: the code that builds the object may set it, and it dies with the object.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from holdfast.base.arguments import text_of, unfit
from holdfast.base.entry import public
from holdfast.base.errors import UsageError
from holdfast.base.suggest import did_you_mean
from holdfast.base.text import listed

T = TypeVar("T")

_marks: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()
trainable_marks: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
"""Modules of which only what is trained is saved; see `holdfast.live.state.trainable`."""


@public
def ignore(obj: T, *patterns: str) -> T:
    """Neither save nor restore what the `state_dict()` of a module or optimizer has under these names.

    Parameters, buffers, states and groups are always saved; this is about what there is beyond them.
    Returns the object.

    `patterns` are names as the object's own `state_dict()` has them, or patterns as of `only=`
    (`"layers.*.codebook"`).  Of a module inside the model that is handed over, names begin at that module.
    Further calls add patterns.  One that matches nothing is a UsageError at the first save.
    """
    if not isinstance(obj, (nn.Module, Optimizer)):
        hint = "what other objects shall not save, their state_dict() leaves out"
        raise unfit("ignore", "obj", obj, "a module or an optimizer", hint=hint)
    for pattern in patterns or ("",):
        text_of(pattern, "ignore", "patterns", "a name or pattern such as 'layers.*.codebook'")
    _marks[obj] = tuple(dict.fromkeys((*_marks.get(obj, ()), *patterns)))
    return obj


class Ignored:
    """The patterns on some objects, and which of them have matched.  `objects`: with the names that theirs
    begin with."""

    def __init__(self, objects: Iterable[tuple[str, Any]]) -> None:
        self._patterns = [(at, id(obj), p) for at, obj in objects for p in _marks.get(obj, ())]
        self._used: set[tuple[int, str]] = set()
        """Patterns that have matched, by object: it may be there under several names, of which
        one is asked for."""

    @staticmethod
    def any() -> bool:
        """True if anything was declared of any object."""
        return bool(_marks)

    def has(self, name: str) -> bool:
        """True if a name is given up; notes which patterns have matched."""
        hits = {
            (obj, pattern)
            for at, obj, pattern in self._patterns
            if (not at or name.startswith(f"{at}."))
            and fnmatchcase(name[len(at) + 1 if at else 0 :], pattern)
        }
        self._used |= hits
        return bool(hits)

    def check(self, what: str, names: Iterable[str]) -> None:
        """UsageError for patterns that have matched none of `names`."""
        unused = [(at, p) for at, obj, p in self._patterns if (obj, p) not in self._used]
        if not unused:
            return
        at, pattern = unused[0]
        known = [n[len(at) + 1 if at else 0 :] for n in names]
        where = f"{what}.{at}" if at else what
        raise UsageError(
            f"ignore({where}, {pattern!r}) matches nothing that would not be saved anyway; there is "
            + (listed(map(repr, known), 5) or "nothing of that kind"),
            hint=did_you_mean(pattern, known)
            or "take the pattern away, or write the name as it is there",
        )
