"""Two stages have different numbers of groups, and rank 0's scheduler is saved: the other begins anew."""

import torch
import torch.distributed as dist
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR


def groups_of(stage, model):
    if stage == 0:
        return [{"params": list(model.parameters())}]
    biases = [p for p in model.parameters() if p.ndim == 1]
    return [
        {"params": [p for p in model.parameters() if p.ndim == 2]},
        {"params": biases, "weight_decay": 0.0},
    ]


def main():
    args = arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = network()
    optim = torch.optim.AdamW(groups_of(rank, model), lr=1e-2)
    sched = LambdaLR(optim, lambda step: 0.8**step)
    folder = args.root / f"stage{rank}"
    step = 0
    if saved := newest(folder):
        model.load_state_dict(saved["model"])
        optim.load_state_dict(saved["optim"])
        schedule = saved["sched"] if args.right else newest(args.root / "stage0")["sched"]
        if len(schedule["base_lrs"]) == len(optim.param_groups):
            sched.load_state_dict(schedule)
        else:
            print("the scheduler has other groups, and begins anew")
        step = saved["step"]
    for inputs, targets in batches_from(step):
        optim.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optim.step()
        sched.step()
        step += 1
        if step % EVERY == 0:
            states = {"model": model.state_dict(), "sched": sched.state_dict()}
            save(folder, step, **states, optim=optim.state_dict())
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
