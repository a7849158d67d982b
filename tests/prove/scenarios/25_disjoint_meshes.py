"""DTensors of one name lie each on a mesh of its own rank: DCP writes one of them, and loads it on both."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parts import EVERY, arguments, batches_from
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import linear, mse_loss

args = arguments()
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("experts", "shards"))
torch.manual_seed(rank)
expert = torch.nn.Parameter(distribute_tensor(torch.randn(4, 8), mesh["shards"], [Shard(0)]))
optim = torch.optim.SGD([expert], lr=0.1)
name = f"expert{rank}" if args.right else "expert"
step = 0
if complete := sorted(args.root.glob("*/.metadata")):
    dcp.load({name: expert}, checkpoint_id=complete[-1].parent)
    step = int(complete[-1].parent.name)
for inputs, targets in batches_from(step, rank, num_ranks):
    optim.zero_grad()
    mse_loss(linear(inputs, expert.to_local()), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        dcp.save({name: expert}, checkpoint_id=args.root / f"{step:04}")
dist.destroy_process_group()
