"""Of a GAN's two optimizers only the generator's is saved."""

import argparse
import os
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
os.makedirs(args.root, exist_ok=True)
path = os.path.join(args.root, "last.pt")

torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
order = torch.Generator()
loader = DataLoader(data, batch_size=8, shuffle=True, generator=order)
maker = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
judge = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
maker_optim = torch.optim.Adam(maker.parameters(), lr=1e-2)
judge_optim = torch.optim.Adam(judge.parameters(), lr=1e-2)
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    maker.load_state_dict(saved["maker"])
    judge.load_state_dict(saved["judge"])
    maker_optim.load_state_dict(saved["maker_optim"])
    if args.right:
        judge_optim.load_state_dict(saved["judge_optim"])
    step = saved["step"]
while step < 12:
    epoch, skip = divmod(step, len(loader))
    order.manual_seed(epoch)
    for x, _ in islice(loader, skip, 12 - epoch * len(loader)):
        made = maker(x[:, :4])
        loss = nn.functional.softplus(judge(made.detach())) + nn.functional.softplus(-judge(x))
        judge_optim.zero_grad()
        loss.mean().backward()
        judge_optim.step()
        maker_optim.zero_grad()
        nn.functional.softplus(-judge(made)).mean().backward()
        maker_optim.step()
        step += 1
        if step % 3 == 0:
            state = {"maker": maker.state_dict(), "judge": judge.state_dict(), "step": step}
            state["maker_optim"] = maker_optim.state_dict()
            if args.right:
                state["judge_optim"] = judge_optim.state_dict()
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
