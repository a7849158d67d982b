"""A loop as in PyTorch's recipe "Saving and loading a general checkpoint", which saves after each epoch.

The recipe's dict has the model, the optimizer, the epoch and the loss; here the scheduler is beside them.
"""

from __future__ import annotations

import os

import torch
from small import BATCH, STEPS, Language, Texts, arguments
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

import holdfast


def main() -> None:
    args = arguments()
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    loader = DataLoader(Texts(), BATCH, shuffle=True)
    path = os.path.join(args.root, "checkpoint.tar")
    first = step = 0
    if args.by == "holdfast":
        state = {"model": model, "optim": optimizer, "sched": scheduler}
        ckpt = holdfast.Checkpointer(args.root, state)
        step = ckpt.restore()
        first = step // len(loader)
    elif os.path.exists(path):
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        scheduler.load_state_dict(checkpoint["scheduler_state_dict"])
        first = checkpoint["epoch"] + 1
    model.train()
    for epoch in range(first, STEPS // len(loader)):
        for texts in loader:
            optimizer.zero_grad()
            loss = model(texts)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
        if args.by == "holdfast":
            ckpt.save(step)
        else:
            torch.save(
                {
                    "epoch": epoch,
                    "model_state_dict": model.state_dict(),
                    "optimizer_state_dict": optimizer.state_dict(),
                    "scheduler_state_dict": scheduler.state_dict(),
                    "loss": loss.item(),
                },
                path,
            )
    if args.by == "holdfast":
        ckpt.close()


if __name__ == "__main__":
    main()
