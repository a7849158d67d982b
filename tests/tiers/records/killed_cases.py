"""What a process does in `test_killed_at_random`: it trains with records until somebody kills it."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import torch

import holdfast
from tiers.records.test_exact import OPTIMIZERS, Mastered, Run

DURABLE = 7
"""Steps between full saves."""


def new(name: str, kind: str) -> Run:
    if kind == "masters":
        return Mastered(OPTIMIZERS[name], torch.bfloat16)
    return Run(OPTIMIZERS[name], torch.bfloat16 if kind == "bfloat16" else torch.float32)


def trains(root: Path) -> None:
    """What `what.json` beside the root says; the last step is in `step` there."""
    what = json.loads((root.parent / "what.json").read_text())
    run, draw = new(what["name"], what["kind"]), random.Random(what["seed"])
    last = os.open(root.parent / "step", os.O_WRONLY | os.O_CREAT, 0o600)
    with holdfast.Checkpointer(
        root,
        run.state,
        every=holdfast.Every(durable=DURABLE, delta=1),
        delta=holdfast.Delta(batch=what["batch"]),
        on_error="raise",
    ) as ckpt:
        for number in range(1, 100_000):
            run.step(number)
            ckpt.step(number)
            os.pwrite(last, number.to_bytes(8, "little"), 0)
            if number == 3:
                ckpt.wait()  # the full save that records lead on from is there
                threading.Thread(target=_die, args=[draw.uniform(0.0, 0.4)], daemon=True).start()
            time.sleep(0.002)


def _die(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)
