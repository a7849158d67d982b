"""A job of one process with snapshots in memory, beside others of its node.

It makes a snapshot and a durable save at each step, and writes steps and warnings as JSON lines, until a
file `end` is in its folder.

    HOLDFAST_MEMORY_DIR=NODE python -m tiers.memory.neighbour FOLDER [STOP_AT]

With STOP_AT it stops the agent when the image of that step is in storage, before the agent hears of the
commit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.events import Event, subscribe
from holdfast.tiers.memory.node import client
from tiers.memory.agents import pid_of

PATIENCE = {"LOOK_S": 0.5, "SILENT_S": 0.5, "AGAIN_S": 1.0, "MOST_AGAIN_S": 1.0}
"""Shorter than in earnest."""


def main(folder: Path, stop_at: int) -> None:
    def tell(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    def show(message: Warning | str, *_: Any) -> None:
        if isinstance(message, holdfast.HoldfastWarning):
            tell(warning=str(message))

    def stop(event: Event) -> None:
        if event.name == "persist" and event.fields["step"] == stop_at:
            os.kill(pid_of(Path(os.environ["HOLDFAST_MEMORY_DIR"])), signal.SIGSTOP)
            tell(stopped=stop_at)

    warnings.simplefilter("always")
    warnings.showwarning = show  # type: ignore[assignment]
    subscribe(stop)
    tensor = torch.zeros(100_000)
    with holdfast.Checkpointer(
        folder / "root",
        {"x": {"t": tensor}},
        every=holdfast.Every(durable=1, memory=1),
        memory=holdfast.Memory("none"),
        keep=holdfast.Keep(last=1),
        when_busy="queue",
    ) as ckpt:
        for name, value in (PATIENCE if stop_at else {}).items():
            setattr(client, name, value)
        step = ckpt.restore()
        while not (folder / "end").exists():
            step += 1
            tensor.add_(1)
            ckpt.step(step)
            ckpt.wait(120)
            tell(step=step)
            time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int([*sys.argv, "0"][2]))
