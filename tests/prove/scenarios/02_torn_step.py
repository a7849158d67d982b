"""A save is copied at once and written later, but for the optimizer's counters, which are on the host."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_map_only

LATE = 2

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)


def copied(tensor):
    return tensor.clone() if tensor.ndim or args.right else tensor


step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
waiting = None
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        waiting = step, tree_map_only(torch.Tensor, copied, state)
    elif waiting and step == waiting[0] + LATE:
        save(args.root, waiting[0], **waiting[1])
