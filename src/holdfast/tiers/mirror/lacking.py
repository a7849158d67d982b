"""Whether a step that a restart has taken has to be saved anew, since one of two homes lacks it.

Records that lead on from a step come to both homes, and are of no use in one that has not the step.  The
newest step of both is uploaded anyway, by the first round of the run.
"""

from __future__ import annotations

from holdfast.base.errors import warn_user
from holdfast.core.checkpoint.names import read_manifest
from holdfast.core.checkpoint.notes import read_notes
from holdfast.core.group import Group
from holdfast.live.restore.candidates import Candidate
from holdfast.live.shelves import Shelf


def is_lacking(
    taken: Candidate, root: Shelf, behind: Shelf, group: Group, *, num_replayed: int
) -> bool:
    """True if the root has to save the step anew.  `num_replayed`: number of recorded steps that were done
    again after it.  Collective."""
    here = {(s.run, s.step) for s in root.saved}
    there = {(s.run, s.step) for s in behind.saved}
    if taken.base == max(here | there) or taken.base in here & there:
        return False
    if num_replayed > 0 or taken.base not in here:
        return True
    return not _is_noted(taken.step, root, behind, group)


def _is_noted(step: int, root: Shelf, behind: Shelf, group: Group) -> bool:
    """True if a step of the root has labels, metrics or files, which another save of it would not have:
    then it stays, and it is told what the home behind lacks.  Collective."""
    store = root.store
    assert store is not None

    def look() -> bytes:
        notes, manifest = read_notes(store), read_manifest(store, step)
        own = manifest.metrics or manifest.attached or notes.values(manifest.run, step)
        return b"noted" if own or step in notes.pinned else b""

    is_noted = bool(group.from_rank0(look))
    if is_noted and group.rank == 0:
        warn_user(
            f"records lead on from step {step}, which {behind.place} has not: until the next full "
            f"save is uploaded, they are of use with {store.url} alone",
            hint="it has labels, metrics or files, so it is not saved anew",
        )
    return is_noted
