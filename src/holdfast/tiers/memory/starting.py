"""The start of the memory tier: which job this run is, and an agent on every node."""

from __future__ import annotations

import os

from holdfast.base.address import own_address
from holdfast.base.errors import UsageError, warn_user
from holdfast.core.checkpoint.peers import raise_on_all
from holdfast.live.saving.durable import Durable
from holdfast.live.tier import RunParts
from holdfast.tiers.memory.job import is_of_another_root, job_of, last_run
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
