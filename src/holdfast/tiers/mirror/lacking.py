"""Whether the step that a restart begins with has to be saved anew, because one of two homes lacks it.

Records that lead on from a step come to both homes, and are useless in a home without the step.  The newest
step of both homes need not be saved anew: the first round of the run uploads it.
"""

from __future__ import annotations

from holdfast.base.errors import warn_user
from holdfast.core.checkpoint.names import read_manifest
from holdfast.core.checkpoint.notes import read_notes
from holdfast.core.group import Group
from holdfast.live.restore.candidates import Candidate
from holdfast.live.shelves import Shelf


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
