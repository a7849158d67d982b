"""Look for private places of a package: `python -m house.private_objects PACKAGE` prints a JSON object, by
path: "" if it is there, "skipped: ..." if it needs what is not installed, else what was missing.

`OBJECTS` makes the small real objects that stand for `Class()` in paths.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from importlib import import_module, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Maker = Callable[[], Any]
OBJECTS: dict[str, Maker] = {}
DOCS = Path(__file__).parents[2] / "docs"
ELASTIC = "torch.distributed.elastic"
RENDEZVOUS = f"{ELASTIC}.rendezvous.dynamic_rendezvous"


class NotInstalled(Exception):
    """A package that a place needs besides its own."""


def of(path: str) -> Callable[[Maker], Maker]:
    def keep(make: Maker) -> Maker:
        OBJECTS[path] = cache(make)
        return make

    return keep


def found(path: str) -> Any:
    """What a path names.  AttributeError, KeyError or ImportError if it is not there."""
    parts = path.split(".")
    value, at = _module(parts)
    for number in range(at, len(parts)):
        so_far, name = ".".join(parts[: number + 1]), parts[number]
        if so_far in OBJECTS:
            value = OBJECTS[so_far]()
        elif name.endswith("()"):
            value = getattr(value, name[:-2])()
        else:
            is_key = isinstance(value, Mapping) and name in value
            value = value[name] if is_key else getattr(value, name)
    return value


def _module(parts: list[str]) -> tuple[Any, int]:
    """The innermost module that begins a path, and the number of its parts."""
    for number in range(len(parts), 0, -1):
        try:
            return import_module(".".join(parts[:number])), number
        except ModuleNotFoundError as error:
            if error.name and error.name.partition(".")[0] != parts[0]:
                raise NotInstalled(error.name) from error
    raise ImportError(f"there is no module {parts[0]}")


def look(package: str) -> dict[str, str]:
    sys.path.insert(0, str(DOCS))
    places = [p for p in import_module("private_places").PLACES if p.package == package]
    results = {}
    for place in places:
        try:
            found(place.path)
            results[place.path] = ""
        except NotInstalled as error:
            results[place.path] = f"skipped: {error} is not installed"
        except (AttributeError, KeyError, ImportError) as error:
            results[place.path] = f"{type(error).__name__}: {error}"
    return results


@cache
def one_rank() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


# -- Python -----------------------------------------------------------------------------------------


@of("torch.utils.data.dataloader._SingleProcessDataLoaderIter()")
def _iterator() -> Any:
    data: Any = [0]
    return iter(import_module("torch.utils.data").DataLoader(data))


@of("threading.Lock()")
def _lock() -> Any:
    import threading

    return threading.Lock()


@of("argparse.ArgumentParser()")
def _parser() -> Any:
    import argparse

    return argparse.ArgumentParser()


# -- torch ------------------------------------------------------------------------------------------


@of("torch.nn.Module()")
def linear() -> Any:
    import torch

    return torch.nn.Linear(1, 1)


@of("torch.UntypedStorage()")
def _storage() -> Any:
    import torch

    return torch.zeros(1).untyped_storage()


@of("torch.optim.Optimizer()")
def _adam() -> Any:
    import torch

    return torch.optim.AdamW(linear().parameters())


@of("torch.distributed.optim._apply_optimizer_in_backward()")
def _stepped_in_backward() -> Any:
    import torch
    from torch.distributed.optim import _apply_optimizer_in_backward

    parameter = torch.nn.Parameter(torch.zeros(1))
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
    return parameter


@of("torch.nn.parallel.DistributedDataParallel()")
def _ddp() -> Any:
    import torch

    one_rank()
    return torch.nn.parallel.DistributedDataParallel(linear())


@of("torch.distributed.optim.ZeroRedundancyOptimizer()")
def _zero() -> Any:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    one_rank()
    return ZeroRedundancyOptimizer(linear().parameters(), torch.optim.SGD, lr=0.1)


@of("torch.distributed.fsdp.FSDPModule()")
def _fsdp2() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    one_rank()
    return fully_shard(linear(), mesh=init_device_mesh("cpu", (1,)))


@of("torch.distributed.fsdp.FullyShardedDataParallel()")
def _fsdp1() -> Any:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    one_rank()
    return FullyShardedDataParallel(linear(), device_id=torch.device("cpu"))


@of("torch._dynamo.eval_frame.OptimizedModule()")
def _compiled() -> Any:
    import torch

    return torch.compile(linear())


@of("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper()")
def _checkpointed() -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(linear())


@of("torch.distributed.checkpoint.state_dict._get_fqns()")
def _names() -> Any:
    import inspect

    from torch.distributed.checkpoint.state_dict import _get_fqns

    parameters = inspect.signature(_get_fqns).parameters
    return SimpleNamespace(**{str(p.default): True for p in parameters.values()})


@of("torch.nested.nested_tensor()")
def _nested() -> Any:
    import torch

    rows = [torch.zeros(1), torch.zeros(2)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@of("torch.utils.data.DataLoader()")
def _loader() -> Any:
    from torch.utils.data import DataLoader

    return DataLoader([0])


@of(f"{RENDEZVOUS}.DynamicRendezvousHandler()")
def handler() -> Any:
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    store = dist.HashStore()
    given = RendezvousParameters("c10d", "localhost", "a-run", 1, 1)
    return create_handler(store, C10dRendezvousBackend(store, "a-run"), given)


@of(f"{RENDEZVOUS}.RendezvousTimeout()")
def _timeout() -> Any:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

    return RendezvousTimeout()


@of(f"{ELASTIC}.rendezvous.utils._PeriodicTimer()")
def _timer() -> Any:
    from torch.distributed.elastic.rendezvous.utils import _PeriodicTimer

    return _PeriodicTimer(timedelta(seconds=9), print)


@of(f"{ELASTIC}.agent.server.local_elastic_agent.LocalElasticAgent()")
def _agent() -> Any:
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    spec = WorkerSpec("a-role", 1, handler(), entrypoint=print)
    return LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs())


@of("torch._C._cuda_hasPrimaryContext")
def _has_context() -> Any:
    import torch

    if torch.version.cuda is None:
        raise NotInstalled("torch for CUDA")
    return torch._C._cuda_hasPrimaryContext


# -- torchdata --------------------------------------------------------------------------------------

STATEFUL = "torchdata.stateful_dataloader.StatefulDataLoader"


def _after_a_batch(workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(list(range(4)), num_workers=workers)
    next(iter(loader))
    return loader


@of(f"{STATEFUL}()")
def _stateful() -> Any:
    return _after_a_batch(0)


@of(f"{STATEFUL}(workers)")
def _of_workers() -> Any:
    return _after_a_batch(1)


# -- accelerate, transformers -----------------------------------------------------------------------


@of("accelerate.Accelerator()")
def _accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


@of("accelerate.hooks.add_hook_to_module()")
def _offloaded() -> Any:
    from accelerate.hooks import ModelHook, add_hook_to_module

    return add_hook_to_module(linear(), ModelHook())


@of("transformers.Trainer()")
def _trained() -> Any:
    import torch
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return {"loss": super().forward(x).sum()}

    args = TrainingArguments(
        tempfile.mkdtemp(), max_steps=1, report_to="none", use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    data = [{"x": torch.ones(1)}] * 8
    trainer = Trainer(Net(1, 1), args, train_dataset=data)
    trainer.train()
    return trainer


@of("transformers.trainer_jit_checkpoint.CheckpointManager()")
def _jit() -> Any:
    from transformers.trainer_jit_checkpoint import CheckpointManager

    return CheckpointManager(None)


def _of_callback(name: str, package: str) -> None:
    @of(f"transformers.integrations.{name}()")
    def make() -> Any:
        if util.find_spec(package) is None:
            raise NotInstalled(package)
        return getattr(import_module("transformers.integrations"), name)()


_of_callback("WandbCallback", "wandb")
_of_callback("DVCLiveCallback", "dvclive")
_of_callback("NeptuneCallback", "neptune")
_of_callback("ClearMLCallback", "clearml")


# -- Lightning --------------------------------------------------------------------------------------


@of("lightning.pytorch.Trainer()")
def _lightning() -> Any:
    from lightning.pytorch import Trainer

    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


@of("lightning.pytorch.trainer.connectors.logger_connector.result._ResultMetric()")
def _metric() -> Any:
    from lightning.pytorch.trainer.connectors.logger_connector import result

    return result._ResultMetric(result._Metadata("training_step", "loss"), True)


def _of_class(module: str, name: str, **options: Any) -> None:
    OBJECTS[f"{module}.{name}()"] = lambda: getattr(import_module(module), name)(**options)


_of_class("lightning.pytorch.strategies", "DDPStrategy")
_of_class("lightning.pytorch.callbacks", "BaseFinetuning")
_of_class("lightning.pytorch.callbacks", "ModelCheckpoint")


@of("lightning.pytorch.loggers.WandbLogger()")
def _logger() -> Any:
    if util.find_spec("wandb") is None:
        raise NotInstalled("wandb")
    from lightning.pytorch.loggers import WandbLogger

    return WandbLogger(save_dir=tempfile.mkdtemp(), offline=True)


@of("lightning.fabric.wrappers._FabricModule()")
def _of_fabric() -> Any:
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu").setup_module(linear())


# -- DeepSpeed --------------------------------------------------------------------------------------


@cache
def _deepspeed() -> Any:
    import deepspeed_on_cpu
    from ports import free_port

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    deepspeed_on_cpu.deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    return deepspeed_on_cpu.deepspeed


@of("deepspeed.DeepSpeedEngine()")
def _engine() -> Any:
    import torch

    model = linear()
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_force_ds_cpu_optimizer": False,
    }
    adam = torch.optim.AdamW(model.parameters())
    return _deepspeed().initialize(model=model, optimizer=adam, config=config)[0]


@of("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer()")
def _of_engine() -> Any:
    return OBJECTS["deepspeed.DeepSpeedEngine()"]().optimizer


@of("deepspeed.pipe.PipelineModule()")
def _pipeline() -> Any:
    return _deepspeed().pipe.PipelineModule([linear()], num_stages=1)


if __name__ == "__main__":
    if sys.argv[1] == "deepspeed":
        _deepspeed()
    print(json.dumps(look(sys.argv[1])))
