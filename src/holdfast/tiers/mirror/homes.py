"""The two homes of a run, its root and the one behind it, which are claimed under one number.

A manifest states the number of its run, and is the same in both homes.  So a run needs a number above all
that either home has seen: then steps of both can be compared, and no name of an attempt is used twice.

Records that lead on from a step come to both homes, and are useless in a home without the step.  So a
restart may have to save it anew.  The newest step of both homes need not be saved anew: the first round of
the run uploads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.base.errors import UsageError, warn_user
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.claiming import Claim, greatest_run, release, take_root
from holdfast.core.checkpoint.names import CLAIMED_PARTS, RootKeys, read_manifest
from holdfast.core.checkpoint.notes import read_notes
from holdfast.core.checkpoint.tidying import Keep, sweep
from holdfast.core.group import Group
from holdfast.core.store import Store, open_store
from holdfast.live.roots import require_native_root, steps_in

if TYPE_CHECKING:
    from holdfast.live.restore.candidates import Candidate
    from holdfast.live.shelves import Shelf


def check_homes(root: str, upload: str | None, upload_keep: Keep | None) -> None:
    """UsageError unless `upload` is another place than the root."""
    if upload is None:
        if upload_keep is not None:
            raise UsageError(
                "upload_keep= says which steps stay in the home behind the root: give upload=, too"
            )
        return
    require_native_root(upload)
    urls = (open_store(path).url.partition("?") for path in (root, upload))
    (one, _, options), (other, _, other_options) = urls
    one, other = (f"{url.rstrip('/')}/" for url in (one, other))
    if options == other_options and (one.startswith(other) or other.startswith(one)):
        raise UsageError(
            f"upload={upload} and the root {root} lie one inside the other, or are the same",
            hint="give upload= a place of its own, such as a bucket, or a folder on another disk",
        )


def claim_both(
    root: Store, upload: Store, group: Group, best: tuple[str, str] | None
) -> tuple[Claim, bool, str]:
    """Claim two homes, as `roots.claim_root` claims one.  Collective.

    UsageError if either is in use: two runs must not upload to one place, even from different roots.  Files
    that a dead run has begun to upload stay until this run has uploaded a step: they may be of use to it.
    """

    def take_both() -> bytes:
        keys = RootKeys(root, below=CLAIMED_PARTS)
        their_keys = RootKeys(upload, below=CLAIMED_PARTS)
        theirs, held_behind = take_root(upload, their_keys, greatest_run(root, keys), best)
        try:
            mine, held = take_root(root, keys, theirs.run - 1, best)
            if theirs.run != mine.run:
                raise UsageError(
                    f"{root.url} was taken by another run while run {theirs.run} took it",
                    hint="give each run a root of its own",
                )
        except BaseException:
            release(upload, theirs)
            raise
        if held is None or held.is_over():
            with keys:
                sweep(root, mine, 0, keys)
        crashed = any(one is not None and one.started != "closed" for one in (held, held_behind))
        return msgspec.json.encode((mine, crashed, steps_in(keys, their_keys)))

    return decode_json(group.from_rank0(take_both), tuple[Claim, bool, str])


def needs_another_save(
    taken: Candidate, root: Shelf, behind: Shelf, group: Group, *, num_replayed: int
) -> bool:
    """True if the state has to be saved to the root anew.  `taken`: the full step of the restart;
    `num_replayed`: number of records that were replayed from it.  Collective."""
    in_root = {(s.run, s.step) for s in root.saved}
    in_behind = {(s.run, s.step) for s in behind.saved}
    if taken.base == max(in_root | in_behind) or taken.base in in_root & in_behind:
        return False
    if num_replayed > 0 or taken.base not in in_root:
        return True
    return not _is_noted(taken.step, root, behind, group)


def _is_noted(step: int, root: Shelf, behind: Shelf, group: Group) -> bool:
    """True if a step of the root has labels, metrics or files, which another save would not have: then the
    step stays, and a warning says what the home behind lacks.  Collective."""
    store = root.store
    assert store is not None

    def look() -> bytes:
        notes, manifest = read_notes(store), read_manifest(store, step)
        own = manifest.metrics or manifest.attached or notes.values(manifest.run, step)
        return b"noted" if own or step in notes.pinned else b""

    is_noted = bool(group.from_rank0(look))
    if is_noted and group.rank == 0:
        warn_user(
            f"records lead on from step {step}, which {behind.place} lacks: until the next full "
            f"save is uploaded, they can be restored from {store.url} alone",
            hint=f"step {step} has labels, metrics or files, so it is not saved anew",
        )
    return is_noted
