"""State that comes after the restore, though the restored step has it: an average that is made from the
restored weights, say, and put into `Checkpointer.state` then.

It is given what that step has of it at the next call that may save, before anything is saved.  Whatever the
loop has done to it in between is lost, which is told.  Plain numbers and texts have nothing that could be
given: the script has set them, so it is told what the step had.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.errors import NotFound, UsageError
from holdfast.group import Group
from holdfast.notices import Notices
from holdfast.restore.reading import load_step
from holdfast.restore.result import RestoredFrom
from holdfast.state.live import State, is_optimizer, loaded_states
from holdfast.wire import decode_msgpack

ONCE_MORE = (
    "put it into the state before restore(), or call restore() once more now that it is there"
)


ANEW = "another name, or Checkpointer(..., anew=True), begins it anew"


def give(
    late: frozenset[str], state: State, origin: RestoredFrom, group: Group, notices: Notices
) -> frozenset[str]:
    """Put what the restored step has into those of its keys that have come since; return those that have
    not.  UsageError if it cannot be.  Collective."""
    came = _agreed(sorted(late & state.keys()), origin.step, group)
    objects = {key: state[key] for key in came if not _is_plain(state[key])}
    if objects:
        _load(objects, origin, group)
        state.update(objects)
    for key in came:
        done = (
            "has been given what that step has of it, and what was done to it since is lost"
            if key in objects
            else "is saved as it is now, in the place of what that step has"
        )
        notices.once(
            "untaken-key",
            f"{key!r} came into the state after step {origin.step} was restored: it {done}; put it into "
            "the state before restore()",
            about=f"late {key}",
        )
    return late.difference(came)


def _agreed(mine: list[str], step: int, group: Group) -> list[str]:
    """Return the keys that have come on all ranks.  UsageError if they are not the same."""
    answers = group.all_gather(msgspec.msgpack.encode(mine))
    found = [decode_msgpack(answer, list[str]) for answer in answers]
    for key in sorted({key for keys in found for key in keys}):
        lack = [rank for rank, keys in enumerate(found) if key not in keys]
        if lack:
            raise UsageError(
                f"{key!r}, which step {step} has, came into the state after restore() on some ranks, and "
                f"not on rank {lack[0]}",
                hint="put it into the state before restore(), on all ranks",
            )
    return mine


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def _load(objects: State, origin: RestoredFrom, group: Group) -> None:
    names = ", ".join(map(repr, objects))
    late = f"{names} came into the state after step {origin.step} was restored, which has it"
    if any(map(is_optimizer, objects.values())):
        raise UsageError(
            f"{late}: an optimizer is restored together with its model, not alone",
            hint=f"put it into the state before restore(), or call restore() once more now; {ANEW}",
        )
    try:
        if origin.store is None or origin.options is None:
            raise NotFound("it was in memory, or reached by records")
        with loaded_states.noted():
            load_step(
                origin.store, group, origin.step, objects, origin.options, attempt=origin.attempt
            )
            loaded_states.ask()
    except NotFound as error:
        raise UsageError(
            f"{late}, and that cannot be read any more: {error.message}",
            hint=f"put it into the state before restore(); {ANEW}",
        ) from error
