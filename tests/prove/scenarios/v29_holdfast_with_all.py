"""holdfast with dropout, a scheduler, an average and a loader that knows its place: nothing is wrong."""

import argparse

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
loader = StatefulDataLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 12)
state = {"model": model, "ema": ema, "optim": optim, "sched": sched, "loader": loader}
with holdfast.Checkpointer(args.root, state, every=3) as ckpt:
    restored = ckpt.restore()
    step = int(restored)
    amid = bool(restored.found) and step % 8 > 0
    while step < 12:
        batches = iter(loader)
        if amid:
            ckpt.restore_rng()
            amid = False
        for x, y in batches:
            loss = nn.functional.mse_loss(model(x), y)
            optim.zero_grad()
            loss.backward()
            optim.step()
            sched.step()
            ema.update_parameters(model)
            step += 1
            ckpt.step(step)
            if step == 12:
                break
