"""From the last rank's start to its state: out of the nodes' memory, against storage.

A training of which all processes died left a snapshot in memory and the same step on disk.  New processes
then restore it: each contestant from a barrier on, with process groups, model and optimizer in place.
memory    Checkpointer.restore(), each rank on a node of its own, from that node's shared memory
lost      the same when one node has lost its memory: its image is rebuilt from the others (2 ranks: a
          copy; more: parity)
storage   Checkpointer.restore() without a memory tier, files out of the page cache
dcp       torch.distributed.checkpoint.load, files out of the page cache
bare      the images read from shared memory into other memory and digested, by as many threads, nothing
          else: how fast this machine's memory lets anybody verify so many bytes
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import (
    Job,
    main,
    over_ranks,
    ranks_of,
    ratio,
    row,
    seconds,
    shared_memory,
    slowest,
    take_turns,
)
from bench.lib.files import evict, files_below

CLAIMS = (
    Claim(
        "A restore from memory takes a quarter of the time of one from storage.",
        r"^restore from memory, (\d ranks?) \|.*\| from storage",
        at_least=4,
    ),
    Claim(
        "A restore from memory takes a quarter of dcp.load's time.",
        r"^restore from memory, (\d ranks?) \|.*\| dcp.load",
        at_least=4,
    ),
)


def work(job: Job) -> dict[str, Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import xxhash

    import holdfast
    from bench.lib.state import State
    from holdfast.core.checkpoint.reading import BLOCK_CHUNKS, threads_here
    from holdfast.core.codec.digest import CHUNK_BYTES
    from holdfast.errors import HoldfastError
    from holdfast.tiers.memory.node import messages as w
    from holdfast.tiers.memory.node.client import Client

    shm = shared_memory()
    here = shm / f"node{job.rank}"
    os.environ["HOLDFAST_MEMORY_DIR"] = str(here)
    os.environ["LOCAL_RANK"] = "0"  # the first, and only, rank of its node
    state = State(job.size, small=job.args.small)
    expected = state.checksums()
    dcp.save(state.for_dcp(), checkpoint_id=job.root / "dcp")

    def checkpointer(memory: bool) -> Any:
        return holdfast.Checkpointer(
            job.root / "holdfast",
            state.for_holdfast(),
            every=holdfast.Every(memory=1) if memory else None,
            memory=holdfast.Memory("auto" if job.size > 1 else "none", budget="64GB")
            if memory
            else None,
            on_error="raise",
        )

    def leave(ckpt: Any) -> None:
        """As a crash does: what is in memory stays, and what is on its way to it is given up."""
        with suppress(HoldfastError):
            ckpt.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)

    first = checkpointer(True)
    first.save(1).wait()
    dist.barrier()  # rank 0 leaves no other waiting for its answer
    leave(first)
    Client().ask(w.Stop())
    kept = shm / "kept" / f"node{job.rank}"  # what every contestant finds again
    shutil.copytree(here, kept, ignore=shutil.ignore_patterns("agent.*"))

    def from_memory(lose: bool) -> float:
        shutil.rmtree(here)
        if lose and job.rank == job.size - 1:
            here.mkdir(mode=0o700)
        else:
            shutil.copytree(kept, here)
        return restore(True)

    def restore(memory: bool) -> float:
        state.wipe()
        if job.rank == 0:
            evict(files_below(job.root / "holdfast"))
        ckpt = checkpointer(memory)
        took = slowest(ckpt.restore)
        assert state.checksums() == expected
        leave(ckpt)
        if memory:
            Client().ask(w.Stop())
        dist.barrier()
        return took

    def load_dcp(_: int) -> float:
        state.wipe()
        if job.rank == 0:
            evict(files_below(job.root / "dcp"))
        took = slowest(lambda: dcp.load(state.for_dcp(), checkpoint_id=job.root / "dcp"))
        assert state.checksums() == expected
        return took

    block_bytes = BLOCK_CHUNKS * CHUNK_BYTES
    image = max(kept.rglob("*"), key=lambda path: path.stat().st_size)  # mine; none is larger
    buffer = bytearray(image.stat().st_size)
    threads = threads_here()
    pool = ThreadPoolExecutor(threads)

    def verify(fd: int, number: int) -> None:
        for at in range(number * block_bytes, len(buffer), threads * block_bytes):
            block = memoryview(buffer)[at : at + block_bytes]
            os.preadv(fd, [block], at)
            for start in range(0, len(block), CHUNK_BYTES):
                xxhash.xxh3_64_intdigest(block[start : start + CHUNK_BYTES])

    def bare(_: int) -> float:
        with open(image, "rb") as file:
            return slowest(
                lambda: list(pool.map(lambda number: verify(file.fileno(), number), range(threads)))
            )

    turns = {
        "bare": bare,
        "memory": lambda _: from_memory(False),
        "storage": lambda _: restore(False),
        "dcp": load_dcp,
    }
    if job.size > 1:
        turns["lost"] = lambda _: from_memory(True)
    try:
        found = take_turns(turns, job.args.rounds)
    finally:
        dist.barrier()
        if job.rank == 0:
            shutil.rmtree(shm, ignore_errors=True)
    return {"bytes": over_ranks(state.local_bytes, "SUM"), "samples": found}


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for ranks, f in found.items():
        s = f["samples"]
        for name in ("memory", "lost"):
            if name not in s:
                continue
            who = f"restore from memory{', a node lost' * (name == 'lost')}, {ranks_of(ranks)}"
            others = {"storage": "from storage, cold", "dcp": "dcp.load, cold"}
            if name == "memory":
                others["bare"] = "read and digested, nothing else"
            for other, note in others.items():
                out.append(
                    row(who, seconds(s, name, f["bytes"]), f"{note} {seconds(s, other, f['bytes'])}",
                        ratio(s, other, name))
                )  # fmt: skip
    return out


if __name__ == "__main__":
    main(CLAIMS, __doc__, work, rows, rounds=5, ranks="1,2,4")
