"""Train a small model by the toy trainer: python train_toy.py ROOT OUT [STEP AT WHICH IT IS KILLED]"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from integrations.trainers.toy_trainer import Trainer


class Average:
    """Keeps an average of the weights, and the losses."""

    def __init__(self, model: Any) -> None:
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.losses: list[float] = []

    def on_step(self, trainer: Trainer, loss: float) -> None:
        self.losses.append(loss)
        for name, p in trainer.model.named_parameters():
            self.weights[name] = 0.9 * self.weights[name] + 0.1 * p.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "losses": self.losses}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.weights, self.losses = saved["weights"], saved["losses"]


class Save:
    """Saves every third step, and at the end of an epoch, which it waits for."""

    def on_step(self, trainer: Trainer, _: float) -> None:
        if trainer.step % 3 == 0:
            trainer.save()

    def on_epoch(self, trainer: Trainer) -> None:
        trainer.save(label="epoch")
        trainer.ckpt.wait()


class Kill:
    """Kills the process at a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, trainer: Trainer, _: float) -> None:
        if trainer.step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def main(root: str, out: str, at: str = "-1") -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(28, 4), torch.randn(28, 1))
    loader = DataLoader(
        data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    average = Average(model)
    began = Trainer(model, optim, loader, root, [average, Save(), Kill(int(at))]).fit(epochs=3)
    torch.save((model.state_dict(), optim.state_dict(), average.state_dict()), out)
    print(began)


if __name__ == "__main__":
    main(*sys.argv[1:])
