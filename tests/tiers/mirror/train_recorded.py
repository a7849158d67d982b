"""A training that records every step, with two homes.

    python -m tiers.mirror.train_recorded PLACE STEPS DURABLE UPLOAD_EVERY_S [hold]

Writes a line for each step that was reached, with a digest of the state: {"step", "digest"}, and first what
it began with: {"restored", "tier", "replayed", "digest"}.  With `hold` full steps are not uploaded beyond
the first, as if their upload took long.
"""

from __future__ import annotations

import json
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.core.codec.digest import hexdigest
from holdfast.tiers.mirror import behind as home_behind


def digest_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    states = [v for s in optimizer.state.values() for v in s.values()]
    tensors = [*model.parameters(), *states]
    return hexdigest(b"".join(t.detach().numpy().tobytes() for t in tensors))


def tell(place: Path, line: dict[str, Any]) -> None:
    with (place / "told.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")


def hold() -> None:
    copy = home_behind.transfer_files

    def held(files: Any, target: Any, wanted: Any, **options: Any) -> int:
        if files.manifest.step > 10:
            threading.Event().wait()
        return copy(files, target, wanted, **options)

    home_behind.transfer_files = held


def main() -> None:
    place, num_steps, durable, every_s = (
        Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]),
    )  # fmt: skip
    if sys.argv[5:] == ["hold"]:
        hold()
    warnings.simplefilter("error")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with holdfast.Checkpointer(
        place / "root",
        {"model": model, "optim": optimizer},
        every=holdfast.Every(durable=durable, delta=1),
        delta=holdfast.Delta(upload_every_s=every_s),
        keep=holdfast.Keep(last=1),
        upload=place / "behind",
        upload_keep=holdfast.Keep(last=2),
    ) as ckpt:
        restored = ckpt.restore()
        told = {"restored": int(restored), "tier": restored.tier, "replayed": restored.replayed}
        tell(place, {**told, "digest": digest_of(model, optimizer)})
        for step in range(int(restored) + 1, num_steps + 1):
            torch.manual_seed(step)
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step)
            tell(place, {"step": step, "digest": digest_of(model, optimizer)})
            threading.Event().wait(0.005)


if __name__ == "__main__":
    main()
