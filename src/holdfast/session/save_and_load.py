"""`save` and `load`: one save or load without a `Checkpointer`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.base.arguments import (
    choice_of,
    flag_of,
    named_step_of,
    path_of,
    patterns_of,
    rules_of,
    seconds_of,
    step_of,
)
from holdfast.base.entry import public
from holdfast.base.errors import HoldfastError, UsageError
from holdfast.base.events import emit
from holdfast.core.checkpoint.claiming import newest_claim, once_attempt, runs_of_steps
from holdfast.core.checkpoint.names import CLAIMED_PARTS, RootKeys, read_head
from holdfast.core.checkpoint.recorded import segments_in
from holdfast.core.checkpoint.tidying import sweep
from holdfast.core.group import Group, meet
from holdfast.core.store import Store
from holdfast.live.collecting import collect
from holdfast.live.roots import open_shared, require_native_root, sweep_host
from holdfast.live.saving import Saver
from holdfast.live.saving.durable import Durable
from holdfast.live.state.encoding import RESIZE_RULES
from holdfast.live.state.recognising import State, check_keys

if TYPE_CHECKING:
    from holdfast.live.saving.attaching import Attached, FileSource


@public
def save(
    path: str | os.PathLike[str],
    state: State,
    *,
    step: int,
    replicas: Literal["once", "trust"] = "once",
    files: Mapping[str, FileSource] | None = None,
    deadline_s: float = 600.0,
) -> None:
    """Save the state once, as step `step`, replacing a step of that number; block until it is durable.

    `replicas="trust"`: do not compare the ranks' copies of a tensor.  `files`: small files that are kept
    beside the step, as in `Checkpointer`; rank 0 reads them, and if one cannot be read, nothing is saved.
    `deadline_s` bounds every wait for a rank or for storage.  Collective.  RankErrors if a rank failed;
    UsageError if records lead on from that step; LayoutError if copies of a tensor differ between ranks.
    """
    url = path_of(path, "save", "path")
    choice_of(replicas, ("once", "trust"), "save", "replicas")
    require_native_root(url)
    check_keys(state)
    step, deadline_s = step_of(step, "save"), seconds_of(deadline_s, "save", "deadline_s")
    if files is not None:
        from holdfast.live.saving.attaching import AttachedFiles

        files = AttachedFiles(files, "save")
    group = meet(deadline_s, "save()")
    store = open_shared(url, group)
    sweep_host(store)
    run, attempt = msgspec.json.decode(
        group.from_rank0(lambda: msgspec.json.encode(begin_once(store, step)))
    )
    saver = Saver(group, deadline_s=deadline_s, replicas=replicas)
    durable = Durable(store, saver, claim=None, run=run, attempt=attempt)
    try:
        added = None if not files else _read_together(files, group)
        durable.begin(lambda: collect(state), step, must=True, attached=added).wait()
    finally:
        durable.close()
        saver.close()
        group.close()


def _read_together(files: Mapping[str, FileSource], group: Group) -> Attached | None:
    """Read the files, on rank 0 only; raise its error on every rank."""
    from holdfast.live.saving.attaching import attached

    found: list[Attached | None] = [None]

    def fail(error: BaseException) -> None:
        raise error

    def read() -> bytes:
        found[0] = attached(files, None, None, "save", fail, reads=True)
        return b""

    group.from_rank0(read)
    return found[0]


def begin_once(
    store: Store, step: int, *, goes_on: bool = False, of_run: int | None = None
) -> tuple[int, str]:
    """Tidy up before a save that takes no claim; return its run, and the name of its attempt.  Called by
    the process that commits it.  UsageError if records lead on from that step.

    `goes_on`: the save belongs to a training, of run `of_run`.  Unless a run is at work in the root, it
    then begins another run if its step is below the newest, or if `of_run` is not the newest run.
    """
    keys = RootKeys(store, below=CLAIMED_PARTS)
    held = newest_claim(store, keys.below("claims/"))
    run = max([held.run if held else 0, *runs_of_steps(store, keys)])
    if segments_in(keys.below("log/"), step) and _records_lead_on(keys, step):
        raise UsageError(
            f"records in {store.url} lead on from its step {step}: from another state they would lead "
            "elsewhere",
            hint="save under another number, or in a root of its own",
        )
    is_free = held is None or held.is_over()
    if goes_on and is_free and keys.saved and of_run != run:
        run += 1
    elif goes_on and is_free and max(keys.manifests, default=step) > step:
        run += any(one.run == run and one.step > step for one in keys.saved)
    try:
        with keys:
            sweep(store, keys=keys)
    except HoldfastError as error:
        emit("sweep.failed", error=str(error))
    return run, once_attempt()


def _records_lead_on(keys: RootKeys, step: int) -> bool:
    """True if records lead on from the step that the save replaces, or past its number."""
    from holdfast.tiers.records.log import leads_on

    key = keys.manifests.get(step)
    there = None if key is None else read_head(keys.store, step, key)
    return leads_on(keys.store, step, there.run if there and there.is_proved else None)


@public
def load(
    path: str | os.PathLike[str],
    state: State,
    *,
    step: int | str | None = None,
    only: str | Sequence[str] | None = None,
    cast: bool = False,
    strict: bool = True,
    on_resize: dict[str, str] | None = None,
    verify: bool = True,
    deadline_s: float = 600.0,
) -> int:
    """Load a step (by default the newest) into the live objects of `state`, in place; return its number.

    `path`: a root, or a foreign checkpoint; it and `step` name the step as in `holdfast.open`: a number, a
    label, `"best"`, `"newest"`, or `runs/gpt@1000`.  If the step of a word is deleted meanwhile, the one
    that it names by then is loaded.  Only the keys of `state` are loaded: `{"model": model}` loads weights
    alone.  `only`: patterns of tensor names (`model.h.0.*`), each of which must match some.  `cast`:
    convert dtypes.
    `strict=False`: values that the checkpoint lacks stay as they are.  `on_resize`: as in `Checkpointer`.
    `verify=False`: digests are not compared.  Collective; blocks, for other ranks and for an operation of
    storage at most `deadline_s`.  NotRecoverable if there is no step; NotFound if there is no such step or
    label; StateMismatch before anything is touched.
    """
    from holdfast.live.restore.targets import RestoreOptions
    from holdfast.live.step_loading import load_named

    url = path_of(path, "load", "path")
    named = None if step is None else named_step_of(step, "load")
    check_keys(state)
    patterns = None if only is None else patterns_of(only, "load", "only")
    for name, flag in (("cast", cast), ("strict", strict), ("verify", verify)):
        flag_of(flag, "load", name)
    rules = rules_of(on_resize, RESIZE_RULES, state, "load", "on_resize")
    options = RestoreOptions(patterns, cast, strict, rules)
    group = meet(seconds_of(deadline_s, "load", "deadline_s"), "load()")
    try:
        return load_named(url, named, group, state, options, verify=verify)[2]
    finally:
        group.close()
