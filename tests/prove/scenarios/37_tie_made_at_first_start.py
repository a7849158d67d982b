"""The head is tied to the embedding where weights are initialised, which a resume leaves out."""

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


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)

    def initialise(self):
        nn.init.normal_(self.embed.weight, std=0.5)
        self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(self.embed(words))


torch.manual_seed(0)
words = torch.randint(16, (64,))
data = TensorDataset(words, (3 * words + 1) % 16)
order = torch.Generator()
loader = DataLoader(data, batch_size=8, shuffle=True, generator=order)
model = Words()
step = 0
if not os.path.exists(path):
    model.initialise()
else:
    if args.right:
        model.initialise()
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    step = saved["step"]
optim = torch.optim.SGD(model.parameters(), lr=0.5)
torch.manual_seed(1)
while step < 12:
    epoch, skip = divmod(step, len(loader))
    order.manual_seed(epoch)
    for x, y in islice(loader, skip, 12 - epoch * len(loader)):
        loss = nn.functional.cross_entropy(model(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        if step % 3 == 0:
            torch.save({"model": model.state_dict(), "step": step}, path + ".new")
            os.replace(path + ".new", path)
