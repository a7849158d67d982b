"""The averaged weights are in the model while it is evaluated, and that is when it is saved."""

from contextlib import contextmanager

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@contextmanager
def averaged(model, average):
    """The model with the weights of its average."""
    own = [parameter.data for parameter in model.parameters()]
    for parameter, mean in zip(model.parameters(), average.module.parameters()):
        parameter.data = mean.data
    yield
    for parameter, data in zip(model.parameters(), own):
        parameter.data = data


def main():
    args = arguments()
    torch.manual_seed(0)
    model = network()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    step = 0
    if saved := newest(args.root):
        for name, value in (("model", model), ("optim", optim), ("average", average)):
            value.load_state_dict(saved[name])
        step = saved["step"]

    def checkpoint():
        states = {"model": model.state_dict(), "average": average.state_dict()}
        save(args.root, step, **states, optim=optim.state_dict())

    for inputs, targets in batches_from(step):
        optim.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optim.step()
        average.update_parameters(model)
        step += 1
        if step % EVERY == 0:
            with averaged(model, average), torch.no_grad():
                loss = mse_loss(model(inputs), targets)
                if not args.right:
                    checkpoint()
            print(f"step {step}: {loss:.3f}")
            if args.right:
                checkpoint()


if __name__ == "__main__":
    main()
