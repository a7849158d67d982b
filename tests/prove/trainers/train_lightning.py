"""Lightning's Trainer with a ModelCheckpoint, which resumes by `fit(ckpt_path="last")`.

The loader has a state, which Lightning saves and restores in mid-epoch.
"""

# ruff: noqa: N812
from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small import ACCUMULATE, BATCH, EVERY, STEPS, Language, Texts, arguments
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.integrations.lightning import strategy


class Training(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Language()

    def training_step(self, texts: torch.Tensor, number: int) -> torch.Tensor:
        return self.model(texts)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = CosineAnnealingLR(optimizer, STEPS)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main() -> None:
    args = arguments()
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy("auto", args.root) if args.by == "holdfast" else "auto",
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATE,
        callbacks=[
            ModelCheckpoint(f"{args.root}/paths", every_n_train_steps=EVERY, save_last=True)
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = StatefulDataLoader(Texts(), BATCH, shuffle=True)
    path = "newest" if args.by == "holdfast" else "last"
    trainer.fit(Training(), loader, ckpt_path=path)


if __name__ == "__main__":
    main()
