"""What a process does that somebody kills: a training with records in a bucket, and single saves."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import xxhash

import holdfast
from system.crash.single import state_of
from tiers.records.test_exact import OPTIMIZERS, Run

DURABLE = 5
"""Steps between full saves."""
PACE_S = 0.01


def new() -> Run:
    """Without gradients that outlive a step: no checkpoint has those."""
    run = Run(OPTIMIZERS["adamw"])
    run.in_place = False
    return run


def digest(values: Any) -> str:
    """Of tensors and other values, bit for bit."""
    seen = xxhash.xxh3_64()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            seen.update(value.detach().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                seen.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            seen.update(repr(value).encode())

    add(values)
    return seen.hexdigest()


def digests(run: Run) -> dict[str, str]:
    """Of each thing that a run holds."""
    return {name: digest(value) for name, value in run.everything().items()}


def what_of(root: Path) -> dict[str, Any]:
    """The script of this life, which lies beside the root."""
    what = json.loads((root.parent / "what.json").read_text())
    os.environ.update(what["env"])
    return what


def note(root: Path, **values: Any) -> None:
    """Append a line to what the test reads."""
    with (root.parent / "notes.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")


def trains(root: Path) -> None:
    """Train with records, and note what was restored and every step, until killed or at the end."""
    what, run = what_of(root), new()
    note(root, pid=os.getpid())
    with holdfast.Checkpointer(
        what["url"],
        run.state,
        every=holdfast.Every(durable=DURABLE, delta=1),
        delta=holdfast.Delta(),
        keep=holdfast.Keep(last=2),
        on_error="raise",
        deadline_s=300,
    ) as ckpt:
        start = ckpt.restore()
        note(root, restored=start, digests=digests(run))
        for step in range(start + 1, what["until"] + 1):
            run.step(step)
            ckpt.step(step)
            if step == start + 1:
                ckpt.wait()  # the full save that records lead on from is there
            note(root, step=step)
            time.sleep(PACE_S)


def saves(root: Path) -> None:
    """Do the saves of the script, (step, value) after (step, value), behind the newest step or `back`."""
    what, state = what_of(root), state_of(0)
    note(root, pid=os.getpid())
    keep = holdfast.Keep(last=what["keep"])
    with holdfast.Checkpointer(what["url"], state, keep=keep, deadline_s=300) as ckpt:
        ckpt.restore(step=what.get("back"))
        note(root, claimed=True)
        for step, value in what["saves"]:
            state["data"].update(state_of(value)["data"])
            ckpt.save(step).wait(300)
