"""Batches are drawn at random places of a text, without a loader, by a generator that begins anew."""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
os.makedirs(args.root, exist_ok=True)
path = os.path.join(args.root, "ckpt.pt")

torch.manual_seed(1337)
text = torch.randint(16, (500,)).cumsum(0) % 16
model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)


def get_batch():
    places = torch.randint(len(text) - 9, (8,))
    x = torch.stack([text[n : n + 8] for n in places])
    y = torch.stack([text[n + 1 : n + 9] for n in places])
    return x, y


step = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
    if args.right:
        torch.set_rng_state(saved["generator"])
while step < 12:
    x, y = get_batch()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optim.zero_grad(set_to_none=True)
    loss.backward()
    optim.step()
    step += 1
    if step % 3 == 0:
        state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
        state["generator"] = torch.get_rng_state()
        torch.save(state, path + ".new")
        os.replace(path + ".new", path)
