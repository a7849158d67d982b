"""State that is added after the restore, though the restored step has its key: for example an average that
is made from the restored weights, and put into `Checkpointer.state` then.

The next call that may save first loads a module, or an object with `load_state_dict`, from that
step.  Changes that the loop has made to it in between are lost.  Other values (plain values, containers,
arrays, bare tensors) were just set by the script on purpose, so they are saved as they are.  Both give a
notice.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.base.errors import NotFound, UsageError
from holdfast.base.notices import Notices
from holdfast.base.wire import decode_msgpack
from holdfast.core.group import Group
from holdfast.live.restore.result import RestoredFrom
from holdfast.live.state.loaded import loaded_states
from holdfast.live.state.recognising import State, is_optimizer, is_stateful, stages
from holdfast.live.step_loading import load_step

ANEW = "another name, or Checkpointer(..., anew=True), begins it anew"

ABSENT = "nothing"
PLAIN = "a plain value, array or tensor"
OBJECT = "a module or an object with load_state_dict()"
OPTIMIZER = "an optimizer"


def give(
    late: frozenset[str], state: State, origin: RestoredFrom, group: Group, notices: Notices
) -> frozenset[str]:
    """Load those `late` keys of the restored step that the state has now; return the keys that have still
    not come, the same on all ranks.  UsageError if a key cannot be loaded.  Collective."""
    mine = {key: _kind(state[key]) for key in sorted(late & state.keys())}
    came = _agreed(mine, origin.step, group)
    objects = {key: state[key] for key, kind in came.items() if kind != PLAIN}
    if objects:
        _load(objects, origin, group)
        state.update(objects)
    for key in mine:
        done = (
            "was loaded from that step, and changes since the restore are lost"
            if key in objects
            else "is saved as it is now, in place of that step's value"
        )
        notices.once(
            "untaken-key",
            f"{key!r} came into the state after step {origin.step} was restored: it {done}; put it into "
            "the state before restore()",
            about=f"late {key}",
        )
    return late.difference(came)


def _agreed(mine: dict[str, str], step: int, group: Group) -> dict[str, str]:
    """Return the kinds of the keys that have come on any rank.  UsageError, on all ranks, if a key that has
    to be loaded has not come on all ranks as the same kind."""
    answers = group.all_gather(msgspec.msgpack.encode(mine))
    found = [decode_msgpack(answer, dict[str, str]) for answer in answers]
    agreed: dict[str, str] = {}
    for key in sorted({key for kinds in found for key in kinds}):
        said = [kinds.get(key, ABSENT) for kinds in found]
        if len(set(said)) > 1 and not set(said) <= {PLAIN, ABSENT}:
            other = next(rank for rank, kind in enumerate(said) if kind != said[0])
            here, there = f"{said[0]} on rank 0", f"{said[other]} on rank {other}"
            raise UsageError(
                f"{key!r}, which step {step} has, came into the state after restore() as {here}, and as "
                f"{there}",
                hint="put it into the state before restore(), on all ranks",
            )
        agreed[key] = PLAIN if PLAIN in said else said[0]
    return agreed


def _kind(value: Any) -> str:
    if is_optimizer(value):
        return OPTIMIZER
    return OBJECT if stages(value) is not None or is_stateful(value) else PLAIN


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
            f"{late}, and that step can no longer be read: {error.message}",
            hint=f"put it into the state before restore(); {ANEW}",
        ) from error
