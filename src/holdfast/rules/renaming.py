"""Renames: from one program's names to another's, one to one, and back.

>>> from holdfast.rules import RuleSet
>>> rules = RuleSet.parse("rename h.{n}.{x:**} -> layers.{n}.{x}")
>>> rules.renamed(["h.0.ln.weight"])
{'h.0.ln.weight': 'layers.0.ln.weight'}
>>> rules.renamed_back(["layers.0.ln.weight"])
{'layers.0.ln.weight': 'h.0.ln.weight'}
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import RuleError
from holdfast.near import near
from holdfast.rules.statements import Rename

KEEP = "rename {x:**} -> {x}  as the last one keeps all other names"


def first(renames: Sequence[Rename], name: str) -> tuple[Rename, str] | None:
    """The first rename that matches, and the new name."""
    for rename in renames:
        captures = rename.old.match(name)
        if captures is not None:
            return rename, rename.new.filled(captures)
    return None


def renamed(renames: Sequence[Rename], names: Sequence[str], path: str) -> dict[str, str]:
    """New names by old ones; without renames names stay.

    RuleError if a name has no rename, a rename no name, or two names become one.
    """
    if not renames:
        return {name: name for name in names}
    found: dict[str, str] = {}
    owner: dict[str, str] = {}
    used: set[int] = set()
    for name in names:
        match = first(renames, name)
        if match is None:
            raise _unmatched(name, [r.old.text for r in renames], path)
        rename, new = match
        if owner.setdefault(new, name) != name:
            raise rename.span.error(f"both {owner[new]!r} and {name!r} would be called {new!r}")
        found[name] = new
        used.add(id(rename))
    for rename in renames:
        if id(rename) not in used and not rename.optional:
            hint = near(rename.old.text, names)
            raise rename.old.span.error("this rename is used by no name", hint)
    return found


def renamed_back(renames: Sequence[Rename], names: Sequence[str], path: str) -> dict[str, str]:
    """The old names of new ones.  RuleError if there is none, or more than one."""
    if not renames:
        return {name: name for name in names}
    return {name: _back(renames, name, path) for name in names}


def _back(renames: Sequence[Rename], name: str, path: str) -> str:
    """Undo the first rename that can have made the name; later ones that can must be more general."""
    olds: dict[str, Rename] = {}
    for rename in renames:
        captures = rename.new.match(name)
        if captures is not None:
            old = rename.old.filled(captures)
            if first(renames, old) == (rename, name):
                olds.setdefault(old, rename)
    if not olds:
        raise _unmatched(name, [r.new.text for r in renames], path)
    (found, by), *others = olds.items()
    for old, rename in others:
        if not rename.new.covers(by.new) or by.new.covers(rename.new):
            raise rename.span.error(f"{name!r} may have been {found!r} or {old!r}")
    return found


def _unmatched(name: str, texts: Sequence[str], path: str) -> RuleError:
    return RuleError(f"{path}: no rename matches {name!r}", hint=near(name, texts) or KEEP)
