"""Conversion into a bucket: files are put at their final keys, as a bucket has no rename.

The file that makes them a checkpoint comes last: the manifest, DCP's `.metadata`, an index.  Until then a
mark beside them identifies the conversion:

    holdfast-conversion.json            first, gone at the end
    __0_0.distcp, __0_1.distcp          each whole or not there at all
    .metadata                           last but for the mark

The same conversion, started again, writes the missing files; another one first deletes the unfinished
files that the mark names.  A step of holdfast's own needs no mark: its files are in an attempt of their
own, and its manifest commits them.  A target of one file appears as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from holdfast.base.errors import Exists, HoldfastError, NotFound, UsageError
from holdfast.core.checkpoint.consolidating import Consolidation
from holdfast.core.checkpoint.listing import attempt_of
from holdfast.core.checkpoint.names import FOLDERS, step_prefix
from holdfast.core.checkpoint.outfiles import Outfile
from holdfast.core.store import Store, get_small, open_store, put_over
from holdfast.core.store.contract import size_at
from holdfast.formats.read.folder import MARK, joined
from holdfast.formats.write.file_plans import ONE_FILE, Planned

CONVERSION_PREFIX = "convert-"
"""Prefix of the attempts of conversions."""


def bucket_for(target: str, to: str, identity: str, step: int) -> BucketTarget:
    """Return the target at a URL; for a format of one file, the folder above it."""
    place, mark, query = target.partition("?")
    above, _, name = place.rstrip("/").rpartition("/")
    if to not in ONE_FILE:
        return BucketTarget(open_store(target), to, identity, step)
    if not name or above.endswith("/"):
        such = f"{place.rstrip('/')}/weights{ONE_FILE[to][0]}{mark}{query}"
        raise UsageError(f"{target} names no file", hint=f"such as {such}")
    return BucketTarget(open_store(above + mark + query), to, identity, step)


@dataclass(frozen=True)
class BucketTarget:
    """The target of a conversion in a bucket."""

    store: Store
    to: str
    identity: str
    step: int

    def begin(self, files: Sequence[Outfile], last: Sequence[str], source: str) -> bool:
        """Continue an interrupted conversion with the same arguments, or clear its output.

        True if the result exists already.  UsageError if the target exists, or lies in a folder of the
        root at the URL `source`.
        """
        self._check_outside(source)
        if self.to == "universal":
            return self._begin_step()
        if self.to in ONE_FILE:
            there = (f.path for f in files if size_at(self.store, f.path) is not None)
            taken = next(there, None)
            if taken is not None:
                what = f"{joined(self.store.url, taken)} exists"
                raise UsageError(what, hint="give a URL where nothing is yet")
            return False
        self._begin_marked({f.path for f in files} | {*last})
        return False

    def missing(self, files: Sequence[Outfile]) -> list[Outfile]:
        """The files that do not exist at their full length."""
        prefix = step_prefix(self.step) if self.to == "universal" else ""
        if self.to in ONE_FILE:  # the folder above may hold anything
            return [f for f in files if size_at(self.store, f.path) != f.bytes]
        sizes = dict(self.store.entries(prefix))
        return [f for f in files if sizes.get(f.path) != f.bytes]

    def end(self, plan: Planned | Consolidation, files: Sequence[Outfile]) -> None:
        """Put the files that make the result a checkpoint, unless they exist, and delete the mark."""
        lost = self.missing(files)
        if lost:
            what = f"{lost[0].path} was not written"
            raise HoldfastError(what, hint="convert again: it goes on")
        if isinstance(plan, Consolidation):
            plan.commit(self.store)
            return
        for path, data in plan.last:
            self.store.put(path, data)
        if self.to not in ONE_FILE:
            self.store.delete(MARK)

    def clear(self, files: Sequence[Outfile]) -> None:
        """Delete written files, as the source has changed."""
        for file in files:
            self.store.delete(file.path)

    def _begin_step(self) -> bool:
        """True if this conversion has committed the step already."""
        mine, step = f"{CONVERSION_PREFIX}{self.identity}", self.step
        there = attempt_of(self.store, step)
        if there is not None and there != mine:
            what = f"{self.store.url} has a step {step} already"
            raise UsageError(what, hint="nothing is overwritten: give another root")
        if there is not None:
            return True
        if not any(self.store.list(f"{folder}/") for folder in FOLDERS) and self.store.list():
            what = f"{self.store.url} is no root of holdfast's"
            raise UsageError(what, hint="give a path that is not there yet")
        prefix = step_prefix(step)
        for key in self.store.list(f"{prefix}{CONVERSION_PREFIX}"):  # abandoned conversions
            if not key.startswith(f"{prefix}{mine}/"):
                self.store.delete(key)
        return False

    def _begin_marked(self, mine: set[str]) -> None:
        keys, mark = self.store.list(), msgspec.json.encode({"conversion": self.identity})
        seen = get_small(self.store, MARK) if MARK in keys else None
        if seen is None and keys:
            raise UsageError(f"{self.store.url} exists", hint="give a URL where nothing is yet")
        try:
            if seen != mark:
                put_over(self.store, MARK, mark, seen)
        except (Exists, NotFound):
            what = f"another conversion has begun to write into {self.store.url}"
            raise UsageError(what, hint="wait for it, or stop it") from None
        for key in keys:
            if key != MARK and (seen != mark or key not in mine):
                self.store.delete(key)

    def _check_outside(self, source: str) -> None:
        here, root = (url.partition("?")[0].rstrip("/") for url in (self.store.url, source))
        inside = here.removeprefix(f"{root}/").split("/")[0] if here.startswith(f"{root}/") else ""
        if inside in FOLDERS:
            what = f"{here} lies in {inside}/ of the root {root}, where holdfast keeps its files"
            raise UsageError(what, hint="give a URL outside of it")
