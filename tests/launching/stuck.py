"""A script whose rank 1 is killed while rank 0 waits to be connected to, of which gloo does not wake it.

Rank 0 has begun a process before.  In the second attempt it writes down whether that is still there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

import holdfast


def begin_child(noted: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    noted.write_text(f"{child.pid} {os.getpid()}")


def is_alive(pid: str) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # of one that has ended it is empty
    except OSError:
        return False


def die_when_the_other_waits(store: Path) -> None:
    size, since = 0, time.monotonic()
    while not size or time.monotonic() - since < 1:
        now = store.stat().st_size if store.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


@holdfast.recoverable
def main() -> None:
    here, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    attempt = os.environ["HOLDFAST_ATTEMPT"]
    noted, store = here / "child", here / f"store-{attempt}"
    if attempt == "1" and rank:
        die_when_the_other_waits(store)
    elif attempt == "1":
        begin_child(noted)
    elif not rank:
        (here / "alive").write_text(" ".join(filter(is_alive, noted.read_text().split())))
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    dist.barrier()
    dist.destroy_process_group()


main()
