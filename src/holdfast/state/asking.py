"""Asking modules for their `state_dict()`: which ones are asked, and how.

Most modules have nn.Module's own way to save and no hooks: what they have is known without asking.  One
with a `_save_to_state_dict` of its own is asked for its own entries alone; one with hooks or another
`state_dict` for the whole, for these see and may change what submodules have.

What a module says is asked anew each time: a hook may have more to say from one call to the next, and
nothing but the call itself tells so.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, cast

from torch import nn

from holdfast.state.live import parts_of
from holdfast.state.wrappers import parts

HARMLESS = ("torch.distributed.", "torch.nn.utils.", "holdfast.")
"""Modules of Python whose state-dict hooks add no content, and may communicate."""


def asked(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Submodules whose state_dict() may have something of its own, with what their names begin with."""
    few = {part for part in parts_of(root) if not _is_plain_one(part) and _has_own_way(part)}
    if few <= {root}:
        yield from (("", part) for part in few)
        return
    for prefix, part in parts(root):
        if part in few:
            few.remove(part)
            yield prefix, part


def _is_plain_one(part: nn.Module) -> bool:
    """True if a module saves as nn.Module does: without hooks or methods of its own for it."""
    if part._state_dict_hooks or part._state_dict_pre_hooks:
        return False
    own, kind = part.__dict__, cast("Any", type(part))
    return _is_plain(kind) and "state_dict" not in own and "_save_to_state_dict" not in own


@cache
def _is_plain(kind: type[nn.Module]) -> bool:
    """True if modules of a class have nn.Module's own way to save."""
    ways = (kind.state_dict, kind._save_to_state_dict)
    return ways == (nn.Module.state_dict, nn.Module._save_to_state_dict)


def _has_own_way(part: nn.Module) -> bool:
    """True if a module has a way of its own to save: itself alone, or all in it."""
    own = type(part)._save_to_state_dict is not nn.Module._save_to_state_dict
    return own or "_save_to_state_dict" in part.__dict__ or asks_whole(part)


def asks_whole(part: nn.Module) -> bool:
    """True if its whole state_dict() is needed: hooks and an overridden one see submodules' entries."""
    if type(part).state_dict is not nn.Module.state_dict or "state_dict" in part.__dict__:
        return True
    hooks = (*part._state_dict_hooks.values(), *part._state_dict_pre_hooks.values())
    return any(not _origin(hook).startswith(HARMLESS) for hook in hooks)


def _origin(hook: Any) -> str:
    return getattr(hook, "__module__", None) or ""


def entries_of(part: nn.Module) -> Mapping[str, Any]:
    """Entries of a module's state_dict(), as variables; submodules' too if it may change these."""
    if asks_whole(part):
        try:
            inspect.signature(part.state_dict).bind(keep_vars=True)
        except TypeError:
            return part.state_dict()
        return part.state_dict(keep_vars=True)
    found: OrderedDict[str, Any] = OrderedDict()
    found._metadata = OrderedDict()  # type: ignore[attr-defined]
    part._save_to_state_dict(found, "", True)
    return found
