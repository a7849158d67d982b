"""Train a small GPT on one process or many, and survive whatever happens to them.

    python examples/train.py --root runs/gpt
    torchrun --nproc-per-node 4 examples/train.py --root runs/gpt --tp 2    # FSDP2 x 2, TP x 2
    holdfast run --nproc-per-node 4 --spares 1 examples/train.py --root runs/gpt --tp 2

Stop it, kill it, start it again with another number of processes or another --tp: it goes on from
its newest good step; under `holdfast run` a lost rank costs its own process alone. The lines marked
`holdfast` are all that this takes; the rest is an ordinary torch training script. With `torchrun
--max-restarts` and gloo, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: torch 2.13 cannot restart without it.
"""

import argparse
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpt
import text
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  its usual name
import witness
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import holdfast  # holdfast


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on Python's own source, with holdfast.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--root", default="runs/gpt", help="where the checkpoints are")
    option("--every", type=int, default=20, help="steps between checkpoints")
    option("--keep", type=int, default=3, help="checkpoints to keep")
    option("--records", action="store_true", help="also record every step, to lose none")
    option("--steps", type=int, default=200, help="train up to this step")
    option("--horizon", type=int, help="steps of the learning-rate schedule; None: --steps")
    option("--tp", type=int, default=1, help="tensor-parallel ranks; the others are data-parallel")
    option("--batch", type=int, default=8, help="rows of the global batch")
    option("--lr", type=float, default=1e-3, help="peak learning rate")
    option("--dropout", type=float, default=0.0, help="probability")
    option("--seed", type=int, default=0, help="of weights, data and dropout")
    option("--device", choices=("cpu", "cuda"), default="cpu", help="one process per device")
    option("--log-file", type=Path, help="append JSON lines to this file")
    option("--witness", type=Path, help="append digests of the state at the start and end here")
    return parser.parse_args()


@contextmanager
def process_group(device: str) -> Iterator[int]:
    """The number of processes, joined if a launcher started us as one of several."""
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if num_processes > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield num_processes
    finally:
        if num_processes > 1:
            dist.destroy_process_group()


def make_mesh(num_processes: int, tp: int, device: str) -> DeviceMesh | None:
    if num_processes % tp:
        raise SystemExit(f"--tp {tp} does not divide {num_processes} processes")
    if num_processes == 1:
        return None
    mesh = init_device_mesh(device, (num_processes // tp, tp), mesh_dim_names=("dp", "tp"))
    mesh._flatten("all")  # as torch advises: a reduction over both axes is then one collective
    return mesh


def make_optimizer(model: nn.Module, lr: float) -> AdamW:
    """AdamW that decays matrices only; without foreach, which refuses parameters on mixed meshes."""
    decay: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        decay[parameter.ndim == 2 and not name.startswith("embed")].append(parameter)
    groups = [
        {"params": decay[True], "weight_decay": 0.1},
        {"params": decay[False], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95), foreach=False)


def warm_cosine(horizon: int, warmup: int = 10) -> Callable[[int], float]:
    """Linear warmup, then a cosine from 1 down to a tenth at the horizon."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, horizon - warmup))
        return 0.55 + 0.45 * math.cos(math.pi * progress)

    return factor


def clip(model: nn.Module, max_norm: float) -> None:
    """Clip by the norm over all gradients, taken mesh by mesh: torch cannot mix meshes in one call."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if parameter.grad is not None:
            by_mesh[mesh].append(parameter.grad)
    norms = [get_total_norm(gradients, foreach=False) for gradients in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    clip_grads_with_norm_(model.parameters(), max_norm, torch.stack(norms).norm(), foreach=False)


def train_step(
    model: nn.Module, optim: Optimizer, sched: LambdaLR, batch: Sequence[Tensor]
) -> Tensor:
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    clip(model, 1.0)
    optim.step()
    sched.step()
    optim.zero_grad()
    return loss.detach()


def mean_over_dp(loss: Tensor, mesh: DeviceMesh | None) -> float:
    if mesh is not None and mesh["dp"].size() > 1:
        dist.all_reduce(loss, group=mesh["dp"].get_group())
        loss /= mesh["dp"].size()
    return loss.item()


def append(path: Path | None, **record: Any) -> None:
    """Rank 0 adds one JSON line, in one write, so that whoever follows the file sees whole lines."""
    if path is not None and os.environ.get("RANK", "0") == "0":
        with path.open("a") as log:
            log.write(json.dumps(record | {"time": time.time()}) + "\n")


def testify(path: Path | None, event: str, step: int, model: nn.Module, optim: Optimizer) -> None:
    """Write down what the state is, for whoever wants to check a restore; collective, and slow."""
    if path is not None:
        append(path, event=event, step=step, digests=witness.digests(model, optim))


def process_ids(num_processes: int) -> list[int]:
    pids = [os.getpid()] * num_processes
    if num_processes > 1:
        dist.all_gather_object(pids, os.getpid())
    return pids


def train(args: argparse.Namespace, num_processes: int) -> None:
    mesh = make_mesh(num_processes, args.tp, args.device)
    dp, dp_rank = (mesh["dp"].size(), mesh["dp"].get_local_rank()) if mesh is not None else (1, 0)
    torch.manual_seed(args.seed)
    shape = gpt.Shape(dropout=args.dropout)
    model = gpt.build(mesh, shape, args.device)
    torch.manual_seed(args.seed + 1 + dp_rank)  # dropout: its own along dp, the same along tp
    optim = make_optimizer(model, args.lr)
    sched = LambdaLR(optim, warm_cosine(args.horizon or args.steps))
    mine = {"rank": dp_rank, "num_ranks": dp}
    loader = text.Loader(batch=args.batch, context=shape.context, seed=args.seed, **mine)

    ckpt = holdfast.Checkpointer(  # holdfast: where, what, how often, and how many stay
        args.root,
        {"model": model, "optim": optim, "sched": sched, "loader": loader},
        every=holdfast.Every(durable=args.every, delta=1 if args.records else None),
        delta=holdfast.Delta() if args.records else None,  # holdfast: a record of every step
        keep=holdfast.Keep(last=args.keep),
        on_resize={"loader": "same"},  # holdfast: its position holds on any number of ranks
    )
    with ckpt:  # holdfast: waits at the end for a save under way
        step: int = ckpt.restore()  # holdfast: 0 if there is nothing yet
        restored_from = step
        place = {"layout": f"dp={dp} tp={args.tp}", "restored_from": restored_from}
        append(args.log_file, event="start", pids=process_ids(num_processes), **place)
        testify(args.witness, "restored", step, model, optim)
        while step < args.steps:
            batch = [part.to(args.device) for part in next(loader)]
            loss = mean_over_dp(train_step(model, optim, sched, batch), mesh)
            step += 1
            ckpt.step(step)  # holdfast: saves in the background when it is due
            append(args.log_file, event="step", step=step, loss=loss, **place)
        testify(args.witness, "end", step, model, optim)


@holdfast.recoverable  # holdfast: under `holdfast run`, entered again when a rank is lost
def join_and_train(args: argparse.Namespace) -> None:
    with process_group(args.device) as num_processes:
        train(args, num_processes)


def main() -> None:
    args = arguments()
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what determinism takes on CUDA
    for path in filter(None, (args.log_file, args.witness)):
        path.parent.mkdir(parents=True, exist_ok=True)
    join_and_train(args)


if __name__ == "__main__":
    main()
