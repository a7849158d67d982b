"""A tier that holdfast has not: full steps on a stick, every few steps.  And a training that has it.

    python -m stick ROOT STICK STEPS KILL_AT

The last lines are `restored STEP TIER` and `state DIGEST`; at step KILL_AT the process kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

import holdfast
from holdfast.core.checkpoint.claiming import Claim
from holdfast.core.checkpoint.names import step_numbers
from holdfast.core.codec.digest import hexdigest
from holdfast.live.saving import Save
from holdfast.live.saving.durable import Durable
from holdfast.live.shelves import StoredShelf
from holdfast.live.tier import Collect, RunParts, Tier
from holdfast.session import checkpointer
from holdfast.session.tiers import Switch
from holdfast.store import open_store

EVERY = 3


class Stick(Tier):
    """Saves to a folder of its own, beside those to the root."""

    name = "stick"

    def __init__(self, run: RunParts, path: str, every: int) -> None:
        self._every = every
        self._store = open_store(path)
        self._saves = Durable(self._store, run.saver, claim=None, run=run.claim.run)
        self._saves.kind = self.name
        self.news = self._saves.news

    def due(self, step: int, every: holdfast.Every) -> bool:
        return step % self._every == 0

    def begin(self, collect: Collect, step: int, *, must: bool) -> Save:
        return self._saves.begin(collect, step, must=True)

    def there(self) -> str:
        steps = step_numbers(self._store)
        return f"step {max(steps)} on a stick" if steps else ""

    def shelf(self) -> StoredShelf:
        return StoredShelf(self._store, self._saves.group, tier=self.name)

    def settle(self, limit_s: float) -> None:
        self._saves.settle(limit_s)

    def adopt(self, claim: Claim, base: int | None) -> None:
        self._saves.run = claim.run

    def close(self, limit_s: float, *, finished: bool, is_asked: bool) -> None:
        self._saves.close(limit_s)


class StickSwitch(Switch):
    """Makes one of a path that it has, as there is no argument for it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def start(self, run: RunParts, given: Any) -> Stick:
        return Stick(run, self._path, EVERY)


def train(root: str, num_steps: int, kill_at: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer}
    with holdfast.Checkpointer(root, state, every=10) as ckpt:
        step = ckpt.restore()
        print("restored", step, step.tier)
        while step < num_steps:
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            ckpt.step(step)
            if step == kill_at:
                ckpt.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    states = [value for states in optimizer.state.values() for value in states.values()]
    tensors = [t.detach().numpy().tobytes() for t in (*model.parameters(), *states)]
    print("state", hexdigest(b"".join(tensors)))


if __name__ == "__main__":
    root, stick, steps, kill_at = sys.argv[1:]
    checkpointer.NEAR["stick"] = StickSwitch(stick)
    train(root, int(steps), int(kill_at))
