"""Worker: one of many ways to train, each of whose ranks fails now and then.

    layouts.py ROOT STEPS LAYOUT [KIND:RANK:STEP ...]

KIND is `kill` or `raise`, done once each, in the middle of the forward pass of that step.  Each rank
appends lines of JSON to ROOT.told: what each attempt began with, and at the end a digest of what it holds.
TIER in the environment is `memory` or `records`, where no step is saved to storage but the first.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if "zero" in sys.argv[3]:
    os.environ["DS_ACCELERATOR"] = "cpu"

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast

root, steps, layout, *faults = sys.argv[1:]
WIDTH, ROWS = 16, 8
DEADLINE_S = 60
TIERS: dict[str, dict[str, Any]] = {
    "durable": {"every": holdfast.Every(durable=1)},
    "memory": {"every": holdfast.Every(durable=1000, memory=1), "memory": holdfast.Memory("none")},
    "records": {"every": holdfast.Every(durable=1000, delta=1), "delta": holdfast.Delta()},
}
TIER = os.environ.get("TIER", "durable")


def tell(**about: Any) -> None:
    line = json.dumps({"rank": int(os.environ["RANK"]), "pid": os.getpid(), **about}) + "\n"
    fd = os.open(f"{root}.told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, line.encode())
    os.close(fd)


# -- the model, and what befalls it -----------------------------------------------------------------


class Now:
    """The step that is being taken: 1 is the first; and who saves it."""

    step = 0
    ckpt: holdfast.Checkpointer | None = None


def fail() -> None:
    """Do what is due at this step on this rank, once."""
    for number, fault in enumerate(faults):
        kind, rank, step = fault.split(":")
        done = Path(f"{root}.fault{number}")
        if int(os.environ["RANK"]) != int(rank) or Now.step != int(step) or done.exists():
            continue
        if TIER == "durable":
            until_saved(Now.step - 1)
        elif Now.ckpt is not None:
            Now.ckpt.wait(DEADLINE_S)
        done.touch()
        if kind == "raise":
            raise ValueError(f"a fault at step {step}")
        os.kill(os.getpid(), signal.SIGKILL)


def until_saved(step: int) -> None:
    stop = time.monotonic() + DEADLINE_S
    while step not in holdfast.steps(root) and time.monotonic() < stop:
        time.sleep(0.02)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """It fails between two of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not torch.compiler.is_compiling():
            fail()
        return self.second(self.dropout(x))


def rows(step: int, of: int | None = None) -> torch.Tensor:
    """A step's batch of a data-parallel rank: this one's, if none is named."""
    made = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if of is None else of))
    return torch.randn(ROWS, WIDTH, generator=made, dtype=torch.float32)


# -- layouts ------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Live state, and what takes a step."""

    state: dict[str, Any]
    step: Callable[[int], None]
    close: Callable[[], None] = lambda: None


def usual(
    model: nn.Module,
    batch: Callable[[int], torch.Tensor] = rows,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
) -> Run:
    """AdamW, and the usual loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        optimizer.zero_grad()
        backward(model(batch(number)).square().mean())
        optimizer.step()

    return Run({"model": model, "optim": optimizer}, step)


def ddp() -> Run:
    return usual(nn.parallel.DistributedDataParallel(Net()))


def _sharded(model: nn.Module, mesh: Any) -> nn.Module:
    for part in (model.first, model.second):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp() -> Run:
    return usual(_sharded(Net(), init_device_mesh("cpu", (dist.get_world_size(),))))


def hsdp() -> Run:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return usual(_sharded(Net(), mesh))


def fsdp_tp() -> Run:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    model.dropout.p = 0.0  # DTensor draws on devices alone
    plan = {"first.up": ColwiseParallel(), "first.down": RowwiseParallel()}
    plan |= {"second.up": ColwiseParallel(), "second.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    of = mesh["dp"].get_local_rank()
    return usual(_sharded(model, mesh["dp"]), lambda step: rows(step, of))


def _pipeline(schedule: Any) -> Run:
    from torch.distributed.pipelining import PipelineStage

    stage, last = dist.get_rank(), dist.get_world_size() - 1
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    part = PipelineStage(model, stage, last + 1, torch.device("cpu"))
    runs = schedule(part, n_microbatches=4, loss_fn=lambda out, _: out.square().mean())

    def step(number: int) -> None:
        optimizer.zero_grad()
        given = [rows(number, 0)] if stage == 0 else []
        runs.step(*given, **({"target": rows(number, 1)} if stage == last else {}))
        optimizer.step()

    names = {f"stage{stage}": model, f"optim{stage}": optimizer}
    return Run(names, step)


def gpipe() -> Run:
    from torch.distributed.pipelining import ScheduleGPipe

    return _pipeline(ScheduleGPipe)


def one_f_one_b() -> Run:
    from torch.distributed.pipelining import Schedule1F1B

    return _pipeline(Schedule1F1B)


def _engine(stage: int) -> Run:
    from deepspeed_on_cpu import deepspeed

    if not dist.is_initialized():
        deepspeed.init_distributed("gloo")
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(number: int) -> None:
        engine.backward(engine(rows(number).bfloat16()).square().mean())
        engine.step()

    return Run({"model": engine, "optim": engine.optimizer}, step)


def zero1() -> Run:
    return _engine(1)


def zero2() -> Run:
    return _engine(2)


def zero3() -> Run:
    return _engine(3)


def accelerate() -> Run:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(number: int) -> None:
        optimizer.zero_grad()
        accelerator.backward(model(rows(number)).square().mean())
        optimizer.step()

    return Run({"model": model, "optim": optimizer.optimizer}, step)


def fabric() -> Run:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    fabric = Fabric(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo")
    )
    fabric.launch()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)

    def step(number: int) -> None:
        optimizer.zero_grad()
        fabric.backward(model(rows(number)).square().mean())
        optimizer.step()

    return Run({"model": model.module, "optim": optimizer.optimizer}, step)


def compiled() -> Run:
    """The compiler's cache is kept in the process; a new one compiles again."""
    model = nn.parallel.DistributedDataParallel(Net())
    run = usual(torch.compile(model, backend="aot_eager"))

    def step(number: int) -> None:
        fail()
        run.step(number)

    return Run({"model": model, "optim": run.state["optim"]}, step)


def compiled_fsdp() -> Run:
    """Graphs that hold collectives, by the names of their groups."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _sharded(Net(), mesh)
    for part in (model.first, model.second):
        part.compile(backend="aot_eager")
    return usual(model)


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100 * ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def _runs(pid: int) -> bool:
    """A process that was killed stays in the table until its parent, or init, has asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def loader() -> Run:
    """Processes load the data, also while the function is left; they tell who they are."""
    dist.barrier()
    tell(alive=[pid for pid in _loaders() if _runs(pid)])
    dist.barrier()
    workers = 2
    data = torch.utils.data.DataLoader(
        Numbers(), ROWS, num_workers=workers, worker_init_fn=_tell_worker, persistent_workers=True
    )
    model = nn.parallel.DistributedDataParallel(Net())
    batches = iter(data)
    seen: dict[int, torch.Tensor] = {}

    def batch(step: int) -> torch.Tensor:
        while step not in seen:
            seen[len(seen) + 1] = next(batches)
        return seen[step]

    return usual(model, batch)


def _tell_worker(number: int) -> None:
    tell(loads=number)


def _loaders() -> list[int]:
    path = Path(f"{root}.told")
    told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["pid"] for line in told if "loads" in line]


def accumulated() -> Run:
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        with model.no_sync():
            model(rows(10 * number)).square().mean().backward()
        model(rows(10 * number + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Run({"model": model, "optim": optimizer}, step)


def recomputed() -> Run:
    """Activation checkpointing: blocks run again in the backward pass."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Net()
    model.first, model.second = checkpoint_wrapper(model.first), checkpoint_wrapper(model.second)
    return usual(_sharded(model, init_device_mesh("cpu", (dist.get_world_size(),))))


def groups() -> Run:
    """Groups of the script's own, one of which averages the gradients."""
    pairs = [dist.new_group([i, i + 1]) for i in range(0, dist.get_world_size(), 2)]
    mine = pairs[dist.get_rank() // 2]
    everyone = dist.new_group()
    model = Net()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=mine))

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=everyone)

    return usual(model, backward=backward)


def contexts() -> Run:
    """Autocast and anomaly detection are on where it fails."""
    model = nn.parallel.DistributedDataParallel(Net())

    def batch(step: int) -> torch.Tensor:
        torch.set_default_dtype(torch.float32)
        return rows(step)

    run = usual(model, batch)

    def step(number: int) -> None:
        with torch.autograd.set_detect_anomaly(True), torch.autocast("cpu", torch.bfloat16):
            run.step(number)

    return Run(run.state, step)


def catching() -> Run:
    """A script that takes any Exception of a step for a bad batch, and goes on."""
    run = ddp()

    def step(number: int) -> None:
        while True:
            try:
                return run.step(number)
            except Exception as error:
                if "a fault" in str(error):
                    raise

    return Run(run.state, step)


def cleaning() -> Run:
    """A script that meets the others when it ends, however it does."""
    run = ddp()

    def close() -> None:
        dist.barrier()
        dist.destroy_process_group()

    return Run(run.state, run.step, close)


def threads() -> Run:
    """A thread of the script is in collectives of its own all the time."""
    run = ddp()
    group = dist.new_group()
    ends = threading.Event()

    def talk() -> None:
        while True:
            wants = torch.tensor([float(ends.is_set())])
            dist.all_reduce(wants, group=group)
            if wants.item() > 0:
                return

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()

    def close() -> None:
        ends.set()
        thread.join()

    return Run(run.state, run.step, close)


def global_model() -> Run:
    """A global of the script holds the model of an attempt until the next."""
    global MODEL
    run = ddp()
    MODEL = run.state["model"]
    return run


def settings() -> Run:
    """What it sets in its process is not there when a new process begins, nor when it begins again."""
    tell(
        settings=[
            str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(), str(torch.get_default_device()),
            os.getcwd(), random.random(), float(np.random.rand()), torch.rand(()).item(),
            torch.multiprocessing.get_start_method(allow_none=True),
        ]
    )  # fmt: skip
    run = ddp()
    os.chdir("/")
    torch.multiprocessing.set_start_method("spawn")
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)

    def step(number: int) -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        with torch.enable_grad(), torch.device("cpu"):
            run.step(number)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)

    return Run(run.state, step)


class Task(nn.Module):
    """A model as a Trainer wants it; which rows it gets is not the Trainer's business here."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(rows(Now.step)).square().mean()}


def trainer() -> None:
    """The loop is the Trainer's; a callback restores at its begin, and saves after each step.

    The Trainer then begins to iterate over its loader, which draws from torch's generator: what that was is
    put back before the first step.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Saving(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.state = {
                "model": kwargs["model"],
                "optim": kwargs["optimizer"].optimizer,
                "sched": kwargs["lr_scheduler"],
            }
            every = holdfast.Every(durable=1)
            self.ckpt = holdfast.Checkpointer(
                root, self.state, every=every, when_busy="queue", deadline_s=DEADLINE_S
            )
            state.global_step = self.first = int(self.ckpt.restore())
            self.generator = torch.get_rng_state()
            tell(begins=state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            Now.step = state.global_step + 1
            if state.global_step == self.first:
                torch.set_rng_state(self.generator)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.ckpt.step(state.global_step)

    options = TrainingArguments(
        f"{root}.trainer", max_steps=int(steps), use_cpu=True, report_to=[], save_strategy="no",
        logging_strategy="no", learning_rate=1e-2, disable_tqdm=True, seed=1, num_train_epochs=1,
    )  # fmt: skip
    saving = Saving()
    data = [{"number": torch.tensor(i)} for i in range(1000)]
    Trainer(Task(), options, train_dataset=data, callbacks=[saving]).train()
    saving.ckpt.close()
    tell(digest=digest(saving.state))


LAYOUTS = {
    f.__name__: f
    for f in (
        ddp, fsdp, hsdp, fsdp_tp, gpipe, one_f_one_b, zero1, zero2, zero3, accelerate, fabric, compiled,
        compiled_fsdp, loader, accumulated, recomputed, groups, contexts, catching, cleaning, threads,
        settings, global_model,
    )
}  # fmt: skip


# -- the run --------------------------------------------------------------------------------------------


def digest(state: dict[str, Any]) -> str:
    """Of all that this rank holds of models and optimizers."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(value[key])
        elif isinstance(value, list):
            for one in value:
                add(one)

    for name in sorted(state):
        add(state[name].state_dict())
    return found.hexdigest()


def main() -> None:
    torch.manual_seed(1)
    if layout == "trainer":
        trainer()
        return
    if layout not in ("accelerate", "fabric", "zero1"):  # those make it themselves
        dist.init_process_group("gloo")
    run = LAYOUTS[layout]()
    try:
        train(run)
    finally:
        run.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def train(run: Run) -> None:
    with holdfast.Checkpointer(
        root, run.state, **TIERS[TIER], when_busy="queue", deadline_s=DEADLINE_S
    ) as ckpt:
        Now.ckpt, restored = ckpt, ckpt.restore()
        step = int(restored)
        tell(begins=step, tier=restored.tier, replayed=restored.replayed, pids=[os.getpid()])
        while step < int(steps):
            Now.step = step = step + 1
            run.step(step)
            ckpt.step(step)
    tell(digest=digest(run.state))


if layout == "early":  # a group before the function is called
    dist.init_process_group("gloo")
    layout = "ddp"

if __name__ == "__main__":
    holdfast.recoverable(main)()
