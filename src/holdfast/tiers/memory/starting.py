"""The start of the memory tier: which job this run is, and an agent on every node."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress

import msgspec

from holdfast.base.address import own_address
from holdfast.base.errors import (
    AgentUnreachable,
    Exists,
    FormatError,
    HoldfastError,
    StoreError,
    UsageError,
    warn_user,
)
from holdfast.base.events import emit
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.claiming import newest_claim
from holdfast.core.checkpoint.peers import raise_on_all
from holdfast.core.group import Group
from holdfast.core.store import LocalStore, Store, get_small, open_store
from holdfast.core.store.oserrors import translated
from holdfast.live.saving.durable import Durable
from holdfast.live.tier import RunParts
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.client import Client
from holdfast.tiers.memory.options import Memory
from holdfast.tiers.memory.tier import MemoryTier


def start(run: RunParts, options: Memory) -> MemoryTier:
    """Return the memory tier of a run.  Collective."""
    if (options.feed == "gradient" or options.recomputes) and not {*run.state()} - {"rng"}:
        knob = 'feed="gradient"' if options.feed == "gradient" else 'redundancy="recompute"'
        raise UsageError(
            f"Memory({knob}) needs the state when the Checkpointer is made, and it is empty",
            hint="hand model and optimizer over to Checkpointer(), or choose another way for memory=",
        )
    host = os.environ.get("HOLDFAST_HOST") or own_address()
    run.saver.carry_up_to(options.carry_bytes)
    job = _job_in_memory(options, run.durable, host)
    with raise_on_all(run.group, 0):
        return MemoryTier(run.saver, run.durable, options, job=job, host=host, state=run.state)


def _job_in_memory(options: Memory, durable: Durable, host: str) -> str:
    """Return the job of the root.  Collective; called before any rank says hello.

    The root gets a new job if agents know its job from another root, of which it is a copy, or know of
    later runs than the root does: then it was put back from a backup.
    """
    store, group = durable.store, durable.group
    job, client = job_of(store, group), Client(deadline_s=group.deadline_s)
    with raise_on_all(group, 0):
        client.start(host, tls=options.tls)
        last, copied = last_run(client, job), is_of_another_root(client, job, store)
    last = group.all_max(last)
    if group.any(copied):
        return job_of(store, group, anew=True)
    if last < durable.run:
        return job
    if group.rank == 0:
        warn_user(
            f"{store.url} was put back from a backup: this is run {durable.run}, but memory has snapshots "
            f"of runs up to {last}; they are not used (`holdfast agent clean --job {job}` frees them)"
        )
    return job_of(store, group, anew=True)


JOB_KEY = "job.json"


class JobFile(msgspec.Struct, frozen=True):
    """`job.json` in a root."""

    job: str
    root: str


def job_of(store: Store, group: Group, *, anew: bool = False) -> str:
    """Return the identity of the job of a root, the same over all restarts.  Collective.

    It is drawn at random when the root is first used.  It is drawn again if the root is a copy of the one
    that `job.json` was written for, or with `anew`: snapshots in memory then belong to another job.
    """

    def find() -> bytes:
        fresh = msgspec.json.encode(JobFile(secrets.token_hex(8), _identity(store)))
        with suppress(Exists):
            store.put(JOB_KEY, fresh, if_absent=True)
        seen = _own_file(store, fresh)
        if anew or _read_job(store).root != _identity(store):
            emit("job.redrawn", root=store.url)
            with suppress(Exists):  # another process has just drawn one
                store.put(JOB_KEY, fresh, replacing=seen)
        return _read_job(store).job.encode()

    return group.from_rank0(find).decode()


def last_run(client: Client, job: str) -> int:
    """Return the newest run of a job that this node's agent has met; 0 if it knows of none."""
    try:
        return int(client.ask(w.Ask(job), w.Held).run)
    except AgentUnreachable:  # it has just left, for it held nothing
        return 0


def is_of_another_root(client: Client, job: str, store: Store) -> bool:
    """True if this node's agent knows a job from another root, which still exists.

    Then this root is a copy whose directory has the same inode number, as the topmost directories of
    volumes may have.
    """
    with suppress(HoldfastError):
        known = {one.job: one.root for one in client.ask(w.Status(), w.AgentReport).jobs}
        root = known.get(job, "?")
        if root not in ("?", store.url):
            other = open_store(root)
            return _read_job(other).job == job and newest_claim(other) != newest_claim(store)
    return False


def _own_file(store: Store, fresh: bytes) -> bytes:
    """Return the content of `job.json`, and keep other users from reading it.

    A file that this user may not read is of another user's training, whose agents keep nothing for this
    one: `fresh` takes its place.
    """
    if not isinstance(store, LocalStore):
        return get_small(store, JOB_KEY)
    with suppress(OSError):
        file = os.open(os.path.join(store.root, JOB_KEY), os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.fchmod(file, 0o600)
        finally:
            os.close(file)
    try:
        return get_small(store, JOB_KEY)
    except StoreError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
    store.delete(JOB_KEY)
    with suppress(Exists):
        store.put(JOB_KEY, fresh, if_absent=True)
    return get_small(store, JOB_KEY)


def _read_job(store: Store) -> JobFile:
    data = get_small(store, JOB_KEY)
    try:
        found = decode_json(data, JobFile)
    except msgspec.DecodeError:
        found = JobFile("", "")
    if re.fullmatch(r"[0-9a-f]{16}", found.job) is None:
        raise FormatError(f"{data[:40]!r} names no job", key=JOB_KEY, hint="delete that file")
    return found


def _identity(store: Store) -> str:
    """Return what tells a root from its copies: the inode number of its directory, which is the same
    on all hosts; the URL of a root that is no directory."""
    if not isinstance(store, LocalStore):
        return store.url
    with translated("look at", "", store.root):
        return str(os.stat(store.root).st_ino)
