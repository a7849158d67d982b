"""FSDP2 on parameters of one element and of five rows, saved by holdfast: nothing is wrong here."""

import argparse
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()


class OddShapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.second = nn.Linear(5, 1)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        self.seen += len(x)
        return self.second(self.first(x).tanh()) * self.scale


dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(128, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
sampler = DistributedSampler(data)
seeds = torch.Generator()
loader = DataLoader(data, batch_size=8, sampler=sampler, generator=seeds)
model = OddShapes()
fully_shard(model)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optim": optim}
with holdfast.Checkpointer(args.root, state, every=3) as ckpt:
    step = int(ckpt.restore())
    while step < 12:
        epoch, skip = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        seeds.manual_seed(epoch)
        for x, y in islice(loader, skip, 12 - epoch * len(loader)):
            loss = nn.functional.mse_loss(model(x), y)
            optim.zero_grad()
            loss.backward()
            optim.step()
            step += 1
            ckpt.step(step)
dist.destroy_process_group()
