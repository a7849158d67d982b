"""A critic makes two steps for each of the generator; its optimizer is not loaded."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
maker, critic = torch.nn.Linear(4, 8), network()
slow = torch.optim.Adam(maker.parameters(), lr=1e-3)
quick = torch.optim.Adam(critic.parameters(), lr=4e-3)
step = 0
if saved := newest(args.root):
    maker.load_state_dict(saved["maker"])
    critic.load_state_dict(saved["critic"])
    slow.load_state_dict(saved["slow"])
    step = saved["step"]
    if args.right:
        quick.load_state_dict(saved["quick"])
for inputs, targets in batches_from(step):
    quick.zero_grad()
    mse_loss(critic(inputs) - critic(maker(targets).detach()), targets).backward()
    quick.step()
    if step % 2:
        slow.zero_grad()
        mse_loss(critic(maker(targets)), targets).backward()
        slow.step()
    step += 1
    if step % EVERY == 0:
        state = {"maker": maker.state_dict(), "critic": critic.state_dict()}
        save(args.root, step, **state, slow=slow.state_dict(), quick=quick.state_dict())
