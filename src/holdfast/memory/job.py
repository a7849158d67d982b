"""Which job a root belongs to: what is in memory is known by it."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress

import msgspec

from holdfast.errors import Exists, FormatError
from holdfast.events import emit
from holdfast.group import Group
from holdfast.store import LocalStore, Store

JOB_KEY = "job.json"


class JobFile(msgspec.Struct, frozen=True):
    """`job.json` in a root."""

    job: str
    root: str


def job_of(store: Store, group: Group) -> str:
    """The identity of the job that keeps its state in a root, over all restarts.  Collective.

    Drawn at random when the root is first used, and anew where `job.json` lies in a copy of the root: what
    another root's run left in memory is another job's.
    """

    def find() -> bytes:
        fresh = msgspec.json.encode(JobFile(secrets.token_hex(8), _identity(store)))
        with suppress(Exists):
            store.put(JOB_KEY, fresh, if_absent=True)
        if _read_job(store).root != _identity(store):
            emit("job.redrawn", root=store.url)
            store.put(JOB_KEY, fresh)
        return _read_job(store).job.encode()

    return group.from_rank0(find).decode()


def _read_job(store: Store) -> JobFile:
    data = store.get(JOB_KEY)
    try:
        found = msgspec.json.decode(data, type=JobFile)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = JobFile("", "")
    if re.fullmatch(r"[0-9a-f]{16}", found.job) is None:
        raise FormatError(f"{data[:40]!r} names no job", key=JOB_KEY, hint="delete that file")
    return found


def _identity(store: Store) -> str:
    """What tells a root from its copies: the number of its directory, which all hosts see alike."""
    return str(os.stat(store.root).st_ino) if isinstance(store, LocalStore) else store.url
