"""The body is unfrozen late, so its group is the second one; a resume builds it as the first."""

import torch
from parts import EVERY, arguments, batches_from, newest, save
from torch.nn.functional import mse_loss

UNFROZEN = 2

args = arguments()
torch.manual_seed(0)
body = torch.nn.Linear(8, 8)
head = torch.nn.Linear(8, 8)
groups = {"head": list(head.parameters()), "body": list(body.parameters())}
optim = torch.optim.AdamW([{"params": groups["head"]}], lr=1e-2)
step = 0
if saved := newest(args.root):
    body.load_state_dict(saved["body"])
    head.load_state_dict(saved["head"])
    order = ("head", "body") if args.right else ("body", "head")
    optim = torch.optim.AdamW([{"params": groups[name]} for name in order], lr=1e-2)
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    if step == UNFROZEN:
        optim.add_param_group({"params": groups["body"]})
    optim.zero_grad()
    mse_loss(head(body(inputs).tanh())[:, :4], targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        states = {"body": body.state_dict(), "head": head.state_dict()}
        save(args.root, step, **states, optim=optim.state_dict())
