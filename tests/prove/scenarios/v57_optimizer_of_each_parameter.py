"""Each parameter has its optimizer and its schedule; a resume loads all optimizers, and one schedule."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

args = arguments()
torch.manual_seed(0)
model = network()
optims = {name: torch.optim.Adam([p], lr=1e-2) for name, p in model.named_parameters()}
schedules = [LambdaLR(one, lambda count: 1 - count / 20) for one in optims.values()]
for name, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda p, name=name: optims[name].step())
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    step = saved["step"]
    for name, one in optims.items():
        one.load_state_dict(saved["optims"][name])
    for schedule, state in zip(schedules[: 4 if args.right else 1], saved["schedules"]):
        schedule.load_state_dict(state)
for inputs, targets in batches_from(step):
    model.zero_grad()
    mse_loss(model(inputs), targets).backward()
    for schedule in schedules:
        schedule.step()
    step += 1
    if step % EVERY == 0:
        state = {"optims": {name: one.state_dict() for name, one in optims.items()}}
        state["schedules"] = [schedule.state_dict() for schedule in schedules]
        save(args.root, step, model=model.state_dict(), **state)
