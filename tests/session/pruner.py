"""A run that keeps one step.  It saves step 1, then another one for each line that it reads, and answers
when the one before is gone.

Each commit moves the label, for a label that moves later leaves the step before to the next commit: the
copy of a step ends when the label is given.

    python -m session.pruner ROOT
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch

import holdfast
from holdfast.events import Event, listen

LIMIT_S = 120.0


def folders(root: Path) -> list[Path]:
    return [path for path in root.glob("steps/*") if path.is_dir()]


def main(root: Path) -> None:
    given = threading.Semaphore(0)

    def hold(event: Event) -> None:
        if event.name == "snapshot.copy":
            given.acquire(timeout=LIMIT_S)

    with listen(hold):
        train(root, given)


def train(root: Path, given: threading.Semaphore) -> None:
    live = {"model": {"w": torch.zeros(1000)}}
    keep = holdfast.Keep(last=1, best=("loss", 1))
    with holdfast.Checkpointer(root, live, keep=keep) as ckpt:
        for step in range(1, 100):
            live["model"]["w"].fill_(step)
            ckpt.save(step, metrics={"loss": 1.0 / step})
            ckpt.pin(step, "good")
            given.release()
            ckpt.wait(LIMIT_S)
            until = time.monotonic() + LIMIT_S
            while len(found := folders(root)) > 1:  # files go after their manifest
                assert time.monotonic() < until, f"{found} are there still"
                time.sleep(0.01)
            print(step, flush=True)
            if not sys.stdin.readline():
                return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
