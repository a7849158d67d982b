"""A script that records some steps and ends without `close()`.

    python -m tiers.mirror.ends_recorded PLACE [away | hangs]

A record file has eight steps, so at the end the writer still holds the last; nothing was uploaded before.
With `away` the home behind cannot be written to at the end, with `hangs` it does not answer.
"""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path

import torch

import holdfast
from holdfast.base import threads
from holdfast.store import LocalStore
from holdfast.tiers.mirror import records


def hang(*_: object) -> None:
    threading.Event().wait()


def main() -> None:
    place, what = Path(sys.argv[1]), sys.argv[2:]
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = holdfast.Checkpointer(
        place / "root",
        {"model": model, "optim": optimizer},
        every=holdfast.Every(durable=100, delta=1),
        delta=holdfast.Delta(batch=8, upload_every_s=3600),
        upload=place / "behind",
    )
    ckpt.restore()
    for step in range(1, 6):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        save = None if step > 1 else ckpt.save(1)
        ckpt.step(step)
    while save is not None and not save.uploaded:
        threading.Event().wait(0.01)
    if what == ["away"]:
        shutil.rmtree(place / "behind" / "log", ignore_errors=True)
        (place / "behind" / "log").write_text("nothing can be made here")
    if what == ["hangs"]:
        threads.EXIT_S = records.EXIT_S = 1.0
        LocalStore.create = hang  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main()
