"""A small training with Lightning's Trainer, by settings in JSON.

    python -m integrations.trainers.lit SETTINGS

Its loss of each step, and a digest of the weights at the end, are printed by rank 0.  The loader draws from
the default generator, as loaders do, and so does dropout.
"""

# ruff: noqa: N812
from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.integrations import lightning as integration
from integrations.trainers.weights import digest


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass
class Settings:
    """What a run of this script does."""

    kind: str = "single"
    root: str = ""
    """Root of holdfast's; without it, Lightning saves by itself."""
    paths: str = ""
    """Folder for ModelCheckpoint."""
    ckpt_path: str | None = None
    epochs: int = 5
    every: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """More options of the strategy."""
    save_every: int = 3
    save_last: bool | str = True
    width: int = 32
    accumulate: int = 1
    dies: int = 0
    """The write into `paths` before which, or if negative after which, the process is killed."""
    sums: bool = False
    """Whether a mean over the epoch is logged."""
    stream: bool = False
    """Whether each rank draws its data from a stateful stream of its own."""
    fabric: bool = False
    """Whether four steps are done with Fabric instead."""

    def text(self) -> str:
        return json.dumps(asdict(self))


class Net(L.LightningModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.Dropout(0.1), nn.ReLU(), nn.Linear(width, 1)
        )

    def configure_model(self) -> None:
        strategy = getattr(getattr(self, "_trainer", None), "strategy", None)
        if isinstance(strategy, ModelParallelStrategy) and not is_sharded(self.net[0]):
            from torch.distributed.fsdp import fully_shard

            for part in (self.net[0], self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - 1).square().mean()
        self.log("loss", loss)
        self.log_sums(loss)
        if self.global_rank == 0:
            print("L", self.global_step, number, loss.item().hex(), flush=True)
        return loss

    def log_sums(self, loss: torch.Tensor) -> None:
        """Nothing here."""

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val", (self.net(batch[0]) - 1).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Summing(Net):
    """Logs a mean over epoch and ranks, and tells what has become of it at the end of the epoch."""

    def log_sums(self, loss: torch.Tensor) -> None:
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        mean = self.trainer.callback_metrics["mean"].item()
        if self.global_rank == 0:
            print("L mean", self.current_epoch, mean.hex(), flush=True)


class Drawn(torch.utils.data.IterableDataset[Any]):
    """Samples that are drawn from a generator, whose state is that of this stream.  It has a length, for
    Lightning fetches a batch ahead of one without."""

    def __init__(self, seed: int) -> None:
        self.generator = seeded(seed)
        self.given = 0

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[Any]:
        while self.given < 24:
            self.given += 1
            yield (torch.randn(8, generator=self.generator),)
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "generator": self.generator.get_state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.given = saved["given"]
        self.generator.set_state(saved["generator"])


def is_sharded(module: nn.Module) -> bool:
    return hasattr(next(module.parameters()), "placements")


def strategy_of(kind: str) -> Any:
    if kind == "ddp":
        return DDPStrategy()
    if kind == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=world(), tensor_parallel_size=1)
    return SingleDeviceStrategy("cpu")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loaders() -> tuple[Any, Any]:
    data = torch.utils.data.TensorDataset(torch.randn(48, 8, generator=seeded(0)))
    if world() > 1:
        rank = int(os.environ["RANK"])
        sampler = torch.utils.data.distributed.DistributedSampler(data, world(), rank, seed=1)
        train = StatefulDataLoader(data, batch_size=4 // world(), sampler=sampler)
    else:
        train = StatefulDataLoader(data, batch_size=4, shuffle=True)
    return train, torch.utils.data.DataLoader(data, batch_size=8)


def checkpoints(settings: Settings) -> ModelCheckpoint:
    return ModelCheckpoint(
        dirpath=settings.paths,
        monitor="loss",
        save_top_k=2,
        every_n_train_steps=settings.save_every,
        save_last=settings.save_last,
        enable_version_counter=False,
    )


def trainer_of(settings: Settings, *callbacks: Any, **more: Any) -> L.Trainer:
    strategy = strategy_of(settings.kind)
    if settings.root:
        options: dict[str, Any] = {"deadline_s": 60.0, **settings.options}
        if settings.every:
            options["every"] = holdfast.Every(**settings.every)
        if "memory" in settings.every:
            options["memory"] = holdfast.Memory(redundancy="none", budget="64MiB")
        if "delta" in settings.every:
            options["delta"] = holdfast.Delta()
        strategy = integration.strategy(strategy, settings.root, **options)
    return L.Trainer(
        accelerator="cpu",
        devices=world(),
        strategy=strategy,
        max_epochs=settings.epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks) or [checkpoints(settings)],
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        accumulate_grad_batches=settings.accumulate,
        log_every_n_steps=1,
        **more,
    )


class Digest(L.Callback):
    """Prints the weights' digest where a training begins and ends."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        text = digest(module)
        if trainer.is_global_zero:
            print("BEGIN", trainer.global_step, text, flush=True)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        text = digest(module)
        if trainer.is_global_zero:
            print("END", trainer.global_step, text, flush=True)


def plain() -> nn.Sequential:
    L.seed_everything(3, verbose=False)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def with_fabric(kind: str, root: str) -> None:
    """Four more steps with Fabric, whose objects are handed over as they are."""

    def sharded(model: nn.Module, mesh: Any) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        for part in (model[0], model):
            fully_shard(part, mesh=mesh["data_parallel"])
        return model

    strategy: Any = {"single": "auto", "ddp": "ddp"}.get(kind) or FabricModelParallel(
        sharded, data_parallel_size=world(), tensor_parallel_size=1
    )
    fabric = Fabric(accelerator="cpu", devices=world(), strategy=strategy)
    fabric.launch()
    model: Any = plain()
    if kind == "fsdp2":
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        made = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = fabric.setup(model, made)
    with holdfast.Checkpointer(root, {"model": model, "optim": optimizer}, every=2) as ckpt:
        first = ckpt.restore()
        for step in range(first + 1, first + 5):
            loss = (model(torch.ones(4, 8)) - 1).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if fabric.is_global_zero:
                print("L", step, loss.item().hex(), flush=True)
            ckpt.step(step)


def die_at_write(settings: Settings) -> None:
    """Have this process killed at a call that changes a file in the folder of paths."""
    left = [abs(settings.dies)]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def change(path: Any, *args: Any) -> Any:
            left[0] -= os.path.dirname(os.fspath(path)) == settings.paths
            is_it = left[0] == 0
            if is_it and settings.dies > 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(path, *args)
            if is_it:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return change

    os.replace, os.remove = counted(os.replace), counted(os.remove)


def main(text: str) -> None:
    warnings.filterwarnings("ignore", module="(?!holdfast)")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    settings = Settings(**json.loads(text))
    if settings.dies:
        die_at_write(settings)
    if settings.fabric:
        with_fabric(settings.kind, settings.root)
        return
    L.seed_everything(4, verbose=False)
    train, valid = loaders()
    if settings.stream:
        train = StatefulDataLoader(Drawn(int(os.environ["RANK"])), batch_size=2)
    trainer = trainer_of(settings, Digest(), checkpoints(settings))
    trainer.fit(
        (Summing if settings.sums else Net)(settings.width),
        train,
        valid,
        ckpt_path=settings.ckpt_path,
    )


if __name__ == "__main__":
    main(sys.argv[1])
