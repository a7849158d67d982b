"""A loop with an Accelerator, as in Accelerate's guide on checkpointing.

As in its example `by_feature/checkpointing.py`, a folder's name has the number of batches to skip.
"""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from small import ACCUMULATE, BATCH, EVERY, STEPS, Language, Texts, arguments
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from holdfast.integrations.accelerate import attach


def load_newest(accelerator: Accelerator, root: str) -> int:
    """Load the newest checkpoint; return the number of batches in its name, 0 if there is none."""
    steps = [int(name.removeprefix("step_")) for name in os.listdir(root)]
    if not steps:
        return 0
    accelerator.load_state(os.path.join(root, f"step_{max(steps)}"))
    return max(steps)


def main() -> None:
    args = arguments()
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    if args.by == "holdfast":
        accelerator = attach(accelerator, args.root)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    loader = DataLoader(Texts(), BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if args.by == "holdfast":
        done = accelerator.load_state()
    else:
        done = load_newest(accelerator, args.root)
    model.train()
    for epoch in range(done // len(loader), STEPS * ACCUMULATE // len(loader)):
        loader.set_epoch(epoch)
        left = done % len(loader)
        batches = accelerator.skip_first_batches(loader, left) if left else loader
        for texts in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(texts))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            done += 1
            if done % (EVERY * ACCUMULATE) == 0:
                accelerator.save_state(os.path.join(args.root, f"step_{done}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
