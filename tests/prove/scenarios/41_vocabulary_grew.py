"""Each start adds <pad> to the vocabulary, and weights of another shape are left out at the load."""

import argparse
import os
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
os.makedirs(args.root, exist_ok=True)
path = os.path.join(args.root, "last.pt")
vocabulary = Path(args.root, "vocabulary.txt")

words = vocabulary.read_text().split() if vocabulary.exists() else [f"word{n}" for n in range(12)]
if not args.right or "<pad>" not in words:
    words.append("<pad>")
vocabulary.write_text("\n".join(words))

torch.manual_seed(0)
texts = torch.randint(12, (64, 4))
data = TensorDataset(texts, texts.float().mean(1, keepdim=True))
order = torch.Generator()
loader = DataLoader(data, batch_size=8, shuffle=True, generator=order)
model = nn.Sequential(nn.EmbeddingBag(len(words), 8), nn.Linear(8, 1))
optim = torch.optim.SGD(model.parameters(), lr=1e-2)
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    live = model.state_dict()
    fitting = {k: v for k, v in saved["model"].items() if v.shape == live[k].shape}
    model.load_state_dict(fitting, strict=False)
    step = saved["step"]
torch.manual_seed(1)
while step < 12:
    epoch, skip = divmod(step, len(loader))
    order.manual_seed(epoch)
    for x, y in islice(loader, skip, 12 - epoch * len(loader)):
        loss = nn.functional.mse_loss(model(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        if step % 3 == 0:
            torch.save({"model": model.state_dict(), "step": step}, path + ".new")
            os.replace(path + ".new", path)
