"""The best loss and the patience are in the pickle, and a resume takes the step alone from it."""

import dataclasses
import os
import pickle

import torch
from parts import EVERY, arguments, batches_from, network
from torch.nn.functional import mse_loss


@dataclasses.dataclass
class Progress:
    step: int = 0
    best: float = float("inf")
    bad: int = 0


args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.SGD(model.parameters(), lr=0.3)
progress = Progress()
path = args.root / "last.pkl"
if path.exists():
    saved = pickle.loads(path.read_bytes())
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    kept = saved["progress"]
    progress = Progress(**kept) if args.right else Progress(kept["step"])
for inputs, targets in batches_from(progress.step):
    loss = mse_loss(model(inputs), targets)
    optim.zero_grad()
    loss.backward()
    optim.step()
    progress.step += 1
    progress.bad = 0 if loss.item() < progress.best else progress.bad + 1
    progress.best = min(progress.best, loss.item())
    if progress.bad == 2:
        optim.param_groups[0]["lr"] /= 2
    if progress.step % EVERY == 0:
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        with open(args.root / "unfinished", "wb") as file:
            pickle.dump({**state, "progress": dataclasses.asdict(progress)}, file)
        os.replace(args.root / "unfinished", path)
