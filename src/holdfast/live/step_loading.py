"""Reading one step into the live state, on all ranks: from storage, or from foreign files."""

from __future__ import annotations

import os

import msgspec

from holdfast.base.errors import FormatError, NotFound, NotRecoverable, warn_user
from holdfast.base.events import emit
from holdfast.base.storage_deadlines import bounded, opening
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.lone import as_root
from holdfast.core.checkpoint.names import (
    AND_LOG,
    MOST_TRIES,
    NOTES_KEY,
    TOP_NAMES,
    Known,
    Saved,
    check_step,
    manifest_key,
    read_head,
    seen,
    step_numbers,
    steps_text,
)
from holdfast.core.checkpoint.naming import read_named
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.peers import raise_on_all
from holdfast.core.checkpoint.recorded import is_recorded, last_recorded
from holdfast.core.checkpoint.unproved import tell_passed_over
from holdfast.core.format.manifest import Manifest, decode_manifest
from holdfast.core.group import Group
from holdfast.core.store import LocalStore, Store, as_one_operation, open_store, split_prefix
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.restore_into_state import restore
from holdfast.live.roots import open_shared, patience_s
from holdfast.live.saving.exactness import BIT_EXACT, REPLICA
from holdfast.live.state.recognising import State
from holdfast.live.state.rng import Rng, is_of_rng


def located(address: str, step: int | str | None, group: Group) -> tuple[str, int | None]:
    """The root in an address such as `runs/gpt@best`, and the number of the step that it or `step` names,
    as rank 0 sees it; None: the newest.  Collective if a word or an address names it.  NotFound."""
    if "@" not in address and not isinstance(step, str):
        return address, step
    from holdfast.formats.read import addresses

    def look() -> bytes:
        url, number = bounded(
            lambda: addresses.located(address, step), "look at", address, patience_s(group)
        )
        return msgspec.json.encode((url != address, number))

    is_split, number = decode_json(group.from_rank0(look), tuple[bool, int | None])
    parts = addresses.parts_of(address) if is_split else None  # ranks may have other paths to it
    return (parts[0] if parts else address), number


def load_named(
    address: str,
    named: int | str | None,
    group: Group,
    state: State,
    options: RestoreOptions,
    *,
    verify: bool,
) -> tuple[str, int | None, int]:
    """Load the step that an address or `named` names; return the root, the number that was named (None: the
    newest), and the number that was loaded.  If that step is deleted meanwhile and its name has moved to
    another one, that is loaded.  Collective."""
    url, step = located(address, named, group)
    loaded = read_named(
        step,
        lambda: located(address, named, group)[1],
        lambda number: load_from(url, group, state, number, options, verify=verify),
    )
    return url, step, loaded


def load_from(
    url: str,
    group: Group,
    state: State,
    step: int | None,
    options: RestoreOptions,
    *,
    verify: bool = True,
) -> int:
    """Load a step, or the newest, of whatever lies at `url`; returns its number."""
    found = group.from_rank0(lambda: detected(url, group)).decode()
    if found:  # rank 0 decides: ranks may see a file system differently
        from holdfast.formats.read.detect import open_as

        with raise_on_all(group, step or 0), opening(patience_s(group)):
            foreign = open_as(found, url, step)
        others = _others_generators(foreign, state, options)
        if not others:
            restore(foreign, state, group, options)
            return foreign.step
        if group.rank == 0:
            warn_user(
                f"{foreign.store.url}: what is under {others[0]!r} was not written by holdfast, so it is "
                "not put back: random numbers are fresh"
            )
        fitting = {key: value for key, value in state.items() if key not in others}
        try:
            restore(foreign, fitting, group, options)
        finally:
            state.update(fitting)  # plain values are set in the dict that was restored
        return foreign.step
    store = as_root(open_shared(url, group))
    if group.size > 1:
        from holdfast.live.saving.same_root import check_listed

        check_listed(group, store, step)
    if step is None:
        return load_newest(store, url, group, state, options, verify=verify)
    load_step(store, group, step, state, options, verify=verify)
    return step


def _others_generators(foreign: Checkpoint, state: State, options: RestoreOptions) -> list[str]:
    """Return the keys of each `Rng` that is to be restored, and for which the files have something else."""
    extras = foreign.manifest.extras
    keys = [key for key, value in state.items() if isinstance(value, Rng) and options.wanted(key)]
    names = [*extras, *foreign.names()] if keys else []
    return [
        key
        for key in keys
        if any(n == key or n.startswith(f"{key}.") for n in names)
        and not is_of_rng(extras.get(key))
    ]


def load_newest(
    store: Store, url: str, group: Group, state: State, options: RestoreOptions, *, verify: bool
) -> int:
    """Load the newest step of a root; returns its number.  Collective.

    A run that saves there meanwhile may delete a step that is being read.  Then the newest is another one,
    and that is loaded: every rank has the same error, and rank 0 sees for all what is there now.
    """
    failed: NotFound | None = None
    gone: list[Saved] = []
    for _ in range(MOST_TRIES):
        steps, _ = saved_steps(store, group)
        if not steps:
            raise _nothing_there(store, url) from failed
        if failed is not None and steps[-1] in gone:
            raise failed  # it is there, and lacks a file
        newest = steps[-1]
        if group.rank == 0:
            tell_passed_over(store.url, steps, newest.step)
        try:
            load_step(store, group, newest.step, state, options, verify=verify)
            return newest.step
        except NotFound as error:
            failed = error
            gone.append(newest)
            emit("load.again", step=newest.step, error=str(error))
    raise NotFound(
        f"the newest step in {store.url} was deleted while it was read, {len(gone)} times, at last step "
        f"{gone[-1].step}",
        step=gone[-1].step,
        hint="keep more steps where they are saved: keep=holdfast.Keep(last=3)",
    ) from failed


def _nothing_there(store: Store, url: str) -> NotRecoverable:
    from holdfast.formats.read.detect import near_path

    return NotRecoverable(
        f"no checkpoint in {store.url}",
        hint=near_path(url) or "check the path; `holdfast ls` lists steps",
    )


def foreign_format(url: str) -> str | None:
    """Return the foreign format that a prefix names or that lies there; None if it is ours, or nothing."""
    if split_prefix(url) is None and _is_own(url):
        return None
    from holdfast.formats.read.detect import detect

    return detect(url)


def _is_own(url: str) -> bool:
    store = open_store(url)
    if not isinstance(store, LocalStore):
        return False
    try:
        with os.scandir(store.root) as entries:
            return all(e.name in TOP_NAMES or e.name.startswith(".") for e in entries)
    except FileNotFoundError:
        return True  # there is nothing
    except OSError:
        return False  # whoever reads it says what is wrong


def detected(url: str, group: Group) -> bytes:
    """The foreign format that lies at `url`, empty if there is none.  Deadline."""
    return bounded(lambda: (foreign_format(url) or "").encode(), "look at", url, patience_s(group))


def tell_unused_records(url: str, group: Group, step: int) -> None:
    """HoldfastWarning if a root of another run has records behind the full step that was taken: only that
    run's own restarts replay them.  Collective."""

    def look() -> bytes:
        store = None if foreign_format(url) else open_store(url)
        if store is None:
            return b"0"
        saved = read_head(store, step, manifest_key(step))
        return str(last_recorded(store.list("log/"), saved.run if saved else 0, step)).encode()

    last = int(group.from_rank0(lambda: bounded(look, "look at", url, patience_s(group))))
    if last:
        warn_user(
            f"step {step} of {url} is its newest full one; its records, up to step {last}, are not used: "
            f"`holdfast replay {url} DST --to {last}` makes a full step of them, to begin with instead"
        )


def load_step(
    store: Store,
    group: Group,
    step: int,
    state: State,
    options: RestoreOptions,
    *,
    verify: bool = True,
    attempt: str = "",
) -> Manifest:
    """Load one step, with the same manifest on every rank, which is returned; read again if it was replaced
    meanwhile, which with an `attempt` is NotFound."""
    manifest = shared_manifest(store, group, step)
    while True:
        if attempt not in ("", manifest.attempt):
            raise NotFound(f"step {step} in {store.url} was saved again since find()", step=step)
        try:
            restore(Checkpoint(store, manifest, verify=verify), state, group, options)
            return manifest
        except NotFound:
            before, manifest = manifest, shared_manifest(store, group, step)
            if manifest.attempt == before.attempt:
                raise


def shared_manifest(store: Store, group: Group, step: int) -> Manifest:
    """The manifest of a step, the same on every rank.  Collective."""
    try:
        manifest = decode_manifest(manifest_bytes(store, group, step), manifest_key(step))
    except FormatError as error:
        error.step = step
        raise
    check_step(manifest, step)
    return manifest


def manifest_bytes(store: Store, group: Group, step: int) -> bytes:
    """Rank 0 reads it for all: ranks may see a file system differently."""

    def read() -> bytes:
        try:
            return store.get(manifest_key(step))
        except NotFound:
            have = steps_text(step_numbers(store))
            hint = (
                f"it is recorded: `holdfast replay {store.url} DST --to {step}` makes it a full one"
            )
            raise NotFound(
                f"no step {step} in {store.url}; steps there: {have}",
                hint=hint if is_recorded(store, step) else None,
            ) from None

    return group.from_rank0(read)


def saved_steps(
    store: Store, group: Group, known: Known | None = None, *, records: bool = False
) -> tuple[list[Saved], list[str]]:
    """Every step, oldest to newest, as rank 0 sees them, who remembers them as `known`; and on rank 0, with
    `records`, the keys of the log, by the same listing.

    The beginnings of all manifests are read: what is known of them may be old.
    """
    log: list[str] = []

    def see() -> list[Saved]:
        keys = seen(store, below=AND_LOG if records else ["steps/"])
        log.extend(keys.below("log/") if records else ())
        if known is not None and NOTES_KEY in keys.keys:
            known.has_notes = True
        return keys.saved

    def look() -> bytes:
        saved = as_one_operation(store, see, "look at")
        if known is not None:
            known.learn(saved)
        return msgspec.json.encode(saved)

    return decode_json(group.from_rank0(look), list[Saved]), log


def tell_exactness(manifest: Manifest) -> str:
    """Return how exact a step is.  An event if it was made from gradients; a warning if it is not known to
    be bit-exact."""
    exactness = manifest.software.get(REPLICA)
    if exactness is None:
        return BIT_EXACT
    emit("restore.from_replica", step=manifest.step, exactness=exactness)
    if not exactness.startswith(BIT_EXACT):
        warn_user(
            f"step {manifest.step} was made from gradients on the host, not copied from the device: "
            f"{exactness}"
        )
    return exactness
