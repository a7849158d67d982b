"""What an attempt leaves in its process is put back, ended or told."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import sys
import time
import types
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from holdfast.launch import leftovers, registries
from holdfast.launch.abort_connections import on_devices
from holdfast.launch.forkserver import cuda_has_begun


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[leftovers.Settings]:
    monkeypatch.chdir(tmp_path)
    found = leftovers.Settings()
    yield found
    found.put_back()


def test_what_the_first_half_of_a_with_has_set(before: leftovers.Settings) -> None:
    """As if an exception had arrived between the two halves."""
    torch.set_grad_enabled(False)
    torch.autocast("cpu", torch.bfloat16).__enter__()
    torch.autocast("cpu", torch.bfloat16).__enter__()
    torch.autograd.graph.save_on_cpu().__enter__()
    torch.autograd.set_detect_anomaly(True)
    FlopCounterMode(display=False).__enter__()
    torch.device("meta").__enter__()
    before.put_back()
    weight = torch.ones(2, requires_grad=True)
    weight.mul(3).square().sum().backward()
    assert weight.device.type == "cpu" and torch.equal(weight.grad, torch.full((2,), 18.0))
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert not torch.is_anomaly_enabled()


def test_settings_of_the_script(before: leftovers.Settings) -> None:
    hook, method = sys.excepthook, multiprocessing.get_start_method(allow_none=True)
    threads, folder = torch.get_num_threads(), Path.cwd()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(threads + 1)
    torch.backends.cudnn.benchmark = True
    multiprocessing.set_start_method("spawn", force=True)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    sys.excepthook = print
    os.chdir("/")
    before.put_back()
    made = torch.ones(1)
    assert (made.dtype, made.device.type) == (torch.float32, "cpu")
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    assert torch.get_num_threads() == threads and Path.cwd() == folder
    assert multiprocessing.get_start_method(allow_none=True) == method
    assert sys.excepthook is hook
    assert not nn.modules.module._global_forward_hooks
    handle.remove()


def test_random_numbers(before: leftovers.Settings) -> None:
    first = random.random(), np.random.rand(), torch.rand(()).item()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before.put_back()
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == first


def test_names_of_groups_after_a_world_that_did_not_come_about() -> None:
    """It has used up a name, which a new process has not: the two would never meet."""
    with pytest.raises(RuntimeError):
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=1)
        )
    assert not dist.is_initialized()
    registries.forget_groups()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD.group_name == "0"
    registries.forget_groups()
    assert not dist.is_initialized() and not c10d._world.pg_map


def test_meshes_and_groups_are_let_go() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    held = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])
    (held @ held).redistribute(placements=[Replicate(), Replicate()])
    flat = mesh._flatten("all")
    seen = [weakref.ref(one) for one in (mesh, flat, dist.group.WORLD, mesh.get_group("dp"))]
    del mesh, flat, held
    assert on_devices() == []
    registries.forget_groups()
    gc.collect()
    assert [one() for one in seen] == [None] * 4


def test_answers_about_tensors_without_values_do_not_pile_up() -> None:
    """DTensor asks for shapes with such tensors; torch would keep some answers of every attempt."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    held = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    (held @ held).sum()
    assert FakeTensorMode.cache
    registries.forget_groups()
    assert not FakeTensorMode.cache


def test_compiled_code_does_not_keep_a_rank() -> None:
    """It has rank and size as numbers; after a recovery with fewer ranks, they are others."""

    def numbered(x: torch.Tensor) -> torch.Tensor:
        return x + 10 * dist.get_rank() + 100 * dist.get_world_size()

    for rank, size in ((1, 2), (0, 2), (1, 3)):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        compiled = torch.compile(numbered, backend="eager")
        assert compiled(torch.zeros(())).item() == 10 * rank + 100 * size
        registries.forget_groups()


def test_processes_that_were_begun(tmp_path: Path) -> None:
    """They end with their attempt, but for those that `kept` has begun."""
    context = multiprocessing.get_context("fork")

    def begin() -> multiprocessing.process.BaseProcess:
        process = context.Process(target=time.sleep, args=(600,), daemon=True)
        process.start()
        return process

    earlier = begin()
    leftover = leftovers.Leftovers()
    kept, begun = leftover.keep(begin), begin()
    try:
        leftover.end()
        assert not begun.is_alive()
        assert kept.is_alive() and earlier.is_alive()
    finally:
        kept.kill()
        earlier.kill()


def test_globals_of_the_script_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = types.ModuleType("parts")
    script.__file__ = str(tmp_path / "parts.py")
    monkeypatch.setitem(sys.modules, "parts", script)
    monkeypatch.syspath_prepend(str(tmp_path))
    script.table = torch.ones(3)  # type: ignore[attr-defined]
    found = leftovers.Globals()
    found.tell()
    assert capsys.readouterr().err == ""
    script.model = nn.Linear(2, 2)  # type: ignore[attr-defined]
    found.tell()
    found.tell()
    said = capsys.readouterr().err
    assert said.count("the global `model` of parts still holds a Linear of the attempt") == 1
    assert "table" not in said


def test_cuda_was_not_begun() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        pytest.skip("an earlier test has used the device")
    assert not cuda_has_begun()
