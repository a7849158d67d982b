"""An engine in bfloat16 has states of the optimizer to save only where it shards them; here it has none."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss


class Engine:
    def __init__(self, model, stage):
        self.model = model.bfloat16()
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.stage = stage

    def train(self, inputs, targets):
        self.optim.zero_grad()
        mse_loss(self.model(inputs.bfloat16()).float(), targets).backward()
        self.optim.step()

    def state_dict(self):
        moments = self.optim.state_dict() if self.stage else None
        return {"model": self.model.state_dict(), "optim": moments}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        if state["optim"]:
            self.optim.load_state_dict(state["optim"])


args = arguments()
torch.manual_seed(0)
engine = Engine(network(), stage=1 if args.right else 0)
step = 0
if saved := newest(args.root):
    engine.load_state_dict(saved["engine"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    engine.train(inputs, targets)
    step += 1
    if step % EVERY == 0:
        save(args.root, step, engine=engine.state_dict())
