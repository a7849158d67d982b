"""Makes every call on a disk that is frozen meanwhile; what became of each goes to stdout, a line each.

    python -m system.disks.calls_on_a_frozen_disk MOUNT

It says `ready` when the disk may be frozen, and goes on when it is told so on stdin.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

import holdfast
import holdfast.session.save_and_load
from holdfast.base.storage_deadlines import opening
from holdfast.store import be_patient

LIMIT_S = 2.0


def tell(name: str, call: Callable[[], object]) -> None:
    began = time.monotonic()
    try:
        call()
        how = ["", ""]
    except Exception as error:
        is_ours = isinstance(error, holdfast.HoldfastError)
        how = [type(error).__name__ if is_ours else f"foreign: {error!r}", str(error)]
    print(json.dumps([name, *how, time.monotonic() - began]), flush=True)


def state() -> dict[str, dict[str, torch.Tensor]]:
    return {"data": {"w": torch.zeros(1000)}}


def main(mount: str) -> None:
    a, b, c = (f"{mount}/{name}" for name in "abc")
    for root in (a, b):
        holdfast.save(root, state(), step=1)
    saving, closing = (holdfast.Checkpointer(root, state(), deadline_s=60) for root in (a, b))
    for one in (saving, closing):
        one.restore()
    saving._notices.on_error = "raise"
    be_patient(saving._tiers.store, LIMIT_S)
    print("ready", flush=True)
    sys.stdin.readline()
    save = saving.save(2)
    tell("Save.wait(timeout)", lambda: save.wait(0.5))
    tell("Save.wait", save.wait)
    tell("wait", saving.wait)
    tell("restore", saving.restore)
    tell("close", saving.close)
    closing.save(2)
    tell("close(timeout)", lambda: closing.close(LIMIT_S))
    tell("Checkpointer", lambda: holdfast.Checkpointer(c, state(), deadline_s=LIMIT_S))
    tell("save", lambda: holdfast.save(c, state(), step=1, deadline_s=LIMIT_S))
    tell("load", lambda: holdfast.load(a, state(), deadline_s=LIMIT_S))
    with opening(LIMIT_S):
        tell("steps", lambda: holdfast.steps(a))
        tell("open", lambda: holdfast.open(a).read("data.w"))


if __name__ == "__main__":
    main(sys.argv[1])
