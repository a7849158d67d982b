"""Values that hold unknown objects: instances of classes that no table has.

Such a value is left out with a warning; other tensors and values are read.  If it holds tensors (a whole
module, an optimizer with objects), or if a run needs it (a module's or an optimizer's own state), the
file is refused with the class's name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from holdfast.base.errors import FormatError, warn_user
from holdfast.base.text import listed
from holdfast.formats.read.merged_ranks import Shards
from holdfast.formats.read.torchfile import Storage, TensorRef
from holdfast.formats.read.unpickle import OpaqueInstance, contents_of

_MOST_TOLD = 10
_OPTIMIZERS = {"state", "param_groups"}
"""Keys of an optimizer's state_dict."""


def known_parts(
    trees: Sequence[Any], files: Sequence[str], needed: Collection[str] = ()
) -> list[Any]:
    """Return the trees of a checkpoint's files without values that hold unknown objects in any of them;
    warn about these once.

    FormatError if such a value holds tensors, is `needed`, or is a whole tree.
    """
    found: dict[Any, str] = {}
    for tree, file in zip(trees, files):
        seen: set[int] = set()
        if not isinstance(tree, dict):
            if (name := unknown_in(tree, file, seen)) is not None:
                raise not_data(name, file)
            continue
        for key, value in tree.items():
            name = unknown_in((key, value), file, seen)
            if name is not None and (key in needed or is_needed([key], tree)):
                raise not_data(name, file)
            if name is not None:
                found.setdefault(key, name)
    warn_left_out({_shown(key): name for key, name in found.items()}, files)
    return [
        {key: value for key, value in tree.items() if key not in found}
        if isinstance(tree, dict)
        else tree
        for tree in trees
    ]


def is_needed(path: Sequence[Any], tree: Mapping[Any, Any] | None = None) -> bool:
    """True if a run needs the value at a path: part of a module's or an optimizer's state."""
    parts = [part for part in path if isinstance(part, str)]
    is_optimizers = tree is None or tree.keys() >= _OPTIMIZERS
    return any(part.endswith("_extra_state") for part in parts) or (
        is_optimizers and not _OPTIMIZERS.isdisjoint(parts)
    )


def unknown_in(value: Any, place: str, seen: set[int]) -> str | None:
    """Return the class name of an unknown object in a value; None if there is none.

    FormatError if there are tensors beside it.
    `seen`: ids of objects in other values of the same pickle, none of which holds a tensor.
    """
    name, has_tensors, todo = None, False, [value]
    while todo:
        node = todo.pop()
        if isinstance(node, OpaqueInstance):
            name = name or node.name
        has_tensors = has_tensors or isinstance(node, (TensorRef, Storage, Shards))
        todo += contents_of(node, seen)
    if name is not None and has_tensors:
        raise not_data(name, place)
    return name


def warn_left_out(found: Mapping[str, str], files: Sequence[str]) -> None:
    """Warn about left-out values; `found`: the unknown class by key."""
    if not found:
        return
    values = listed((f"{key:.60} ({name:.100})" for key, name in found.items()), _MOST_TOLD)
    warn_user(f"{listed(files, 1)}: left out, for they hold what is not known to be data: {values}")


def _shown(key: Any) -> str:
    if isinstance(key, OpaqueInstance):
        return key.name
    return key if isinstance(key, str) else f"a {type(key).__name__}"


def not_data(name: str, place: str) -> FormatError:
    return FormatError(f"it names {name}, which is not known to be data", key=place)
