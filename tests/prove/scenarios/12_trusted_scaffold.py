"""The checkpoint has no optimizer, and states that were made to be loaded are taken for loaded ones."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss


def make_states(optim):
    for group in optim.param_groups:
        lr, group["lr"] = group["lr"], 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optim.step()
        group["lr"] = lr
    optim.zero_grad()


def main():
    args = arguments()
    torch.manual_seed(0)
    model = network()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    if saved := newest(args.root):
        model.load_state_dict(saved["model"])
        make_states(optim)
        if "optim" in saved:
            optim.load_state_dict(saved["optim"])
        step = saved["step"]
    for inputs, targets in batches_from(step):
        optim.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optim.step()
        step += 1
        if step % EVERY == 0:
            state = {"optim": optim.state_dict()} if args.right else {}
            save(args.root, step, model=model.state_dict(), **state)


if __name__ == "__main__":
    main()
