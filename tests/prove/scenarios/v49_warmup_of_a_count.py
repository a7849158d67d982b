"""A warm-up by hand writes the rate over the restored one, from a count of the steps of this process."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss


class Trainer:
    def __init__(self, right):
        torch.manual_seed(0)
        self.model = network()
        self.optim = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.right, self.step, self.warm = right, 0, 0

    def restore(self, saved):
        self.model.load_state_dict(saved["model"])
        self.optim.load_state_dict(saved["optim"])
        self.step = saved["step"]
        if self.right:
            self.warm = saved["step"]

    def train(self, root):
        for inputs, targets in batches_from(self.step):
            self.warm += 1
            self.optim.param_groups[0]["lr"] = 1e-2 * min(1.0, self.warm / 8)
            self.optim.zero_grad()
            mse_loss(self.model(inputs), targets).backward()
            self.optim.step()
            self.step += 1
            if self.step % EVERY == 0:
                state = {"model": self.model.state_dict(), "optim": self.optim.state_dict()}
                save(root, self.step, **state)


args = arguments()
trainer = Trainer(args.right)
if saved := newest(args.root):
    trainer.restore(saved)
trainer.train(args.root)
