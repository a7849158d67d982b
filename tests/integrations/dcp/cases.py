"""Worker, 2 ranks: dcp.save, dcp.async_save and dcp.load through holdfast's Writer and Reader."""

from __future__ import annotations

import io
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import holdfast
from capabilities import ASYNC_PROCESS, FSDP2_ON_CPUS, GROUPS_OF_SOME
from holdfast.core.checkpoint.verifying import verify
from holdfast.dcp import Reader, Writer
from holdfast.store import open_store
from system.distributed.cases import run_all

Pair = tuple[nn.Module, torch.optim.Optimizer]


def made(layout: str, seed: int) -> Pair:
    """A model on a layout, and an optimizer that has done a step; all of it depends on the seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 34), nn.ReLU(), nn.Linear(34, 5))
    if layout == "fsdp":
        FSDP2_ON_CPUS.require()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if layout == "tp":
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1), foreach=False)
    model(torch.ones(2, 16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(pair: Pair, **more: Any) -> dict[str, Any]:
    weights, states = get_state_dict(*pair)
    return {"model": weights, "optim": states, **more}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def values(pair: Pair) -> dict[str, Any]:
    """Everything that ought to come back."""
    model, optimizer = pair
    found: dict[str, Any] = {"lr": optimizer.param_groups[0]["lr"]}
    for name, p in model.named_parameters():
        found[name] = whole(p.detach())
        found |= {f"{name}.{k}": whole(v) for k, v in optimizer.state[p].items()}
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    equal = (
        torch.equal(v, other[k]) if torch.is_tensor(v) else v == other[k] for k, v in one.items()
    )
    return one.keys() == other.keys() and all(equal)


def loaded(layout: str, root: str, checkpoint_id: str | None, **more: Any) -> tuple[Any, Any]:
    pair = made(layout, seed=7)
    state = state_of(pair, **more)
    dcp.load(state, storage_reader=Reader(root), checkpoint_id=checkpoint_id)
    set_state_dict(*pair, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return values(pair), {k: state[k] for k in more}


def good(root: str, step: int) -> None:
    if dist.get_rank() == 0:
        assert verify(open_store(root), step).good
    dist.barrier()


def every_layout_into_every_other(out: Path) -> None:
    losses = io.BytesIO(b"0.5 0.25")
    losses.seek(4)
    rest = {
        "epoch": 3,
        "note": ("a", b""),
        "of": {"x": [1, None], "y": torch.arange(5)},
        "losses": losses,
    }
    blank = {
        "epoch": 0,
        "note": None,
        "of": {"x": [], "y": torch.zeros(5, dtype=torch.int64)},
        "losses": io.BytesIO(),
    }
    for number, layout in enumerate(("fsdp", "tp", "plain")):
        root, pair = str(out / layout), made(layout, seed=number)
        expected = values(pair)
        dcp.save(state_of(pair, **rest), storage_writer=Writer(root), checkpoint_id="10")
        good(root, 10)
        for other in ("fsdp", "tp", "plain"):
            found, values_found = loaded(other, root, "10", **blank)
            assert same(found, expected), (layout, other)
            assert values_found.pop("of")["y"].tolist() == [0, 1, 2, 3, 4]
            losses = values_found.pop("losses")
            assert losses.tell() == 4 and losses.read() == b"0.25"
            assert values_found == {"epoch": 3, "note": ("a", b"")}
        ours = made("fsdp", seed=9)
        assert holdfast.load(root, {"model": ours[0], "optim": ours[1]}) == 10
        assert same(values(ours), expected), layout


def what_a_checkpointer_saved_is_loaded(out: Path) -> None:
    root, pair = str(out / "root"), made("fsdp", seed=1)
    progress = {"epoch": 4, "seen": torch.arange(70000)}
    state = {"model": pair[0], "optim": pair[1], "progress": progress, "rng": holdfast.Rng()}
    with holdfast.Checkpointer(root, state) as ckpt:
        ckpt.save(5).wait()
    blank = {"epoch": 0, "seen": torch.zeros(70000, dtype=torch.int64)}
    for layout in ("tp", "plain"):
        found, rest = loaded(layout, root, None, progress=blank)
        assert same(found, values(pair))
        assert rest["progress"]["epoch"] == 4
        assert torch.equal(rest["progress"]["seen"], torch.arange(70000))


def plans_are_kept(out: Path) -> None:
    """From the second save on DCP hands out empty plans; a step that is saved again is another one."""
    root, pair = str(out / "root"), made("fsdp", seed=1)
    writer, rank = Writer(root), dist.get_rank()
    for number, step in enumerate((1, 2, 2, 3)):
        with torch.no_grad():
            for p in pair[0].parameters():
                p.add_(1)
        state = state_of(pair, number=number, **({"more": torch.ones(3)} if step == 3 else {}))
        planner = DefaultSavePlanner(enable_plan_caching=True)
        writer = writer if step == 2 else Writer(root)
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step), planner=planner)
        good(root, step)
        found, rest = loaded("tp", root, None, number=-1)
        assert same(found, values(pair)), step
        assert rest == {"number": number}
    if rank == 0:
        assert holdfast.steps(root) == [1, 2, 3]
        assert all(len(os.listdir(f"{root}/steps/{step:010d}")) == 2 for step in (1, 2, 3))


class Failing(Writer):
    """Its second rank cannot write."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self._turn.rank == 1:
            raise OSError("the disk is gone")
        return super().write_data(plan, planner)


def a_rank_fails(out: Path) -> None:
    root, pair = str(out / "root"), made("fsdp", seed=1)
    dcp.save(state_of(pair), storage_writer=Writer(root), checkpoint_id="1")
    writer = Failing(root)
    with pytest.raises(CheckpointException, match="the disk is gone"):
        dcp.save(state_of(made("fsdp", seed=2)), storage_writer=writer, checkpoint_id="2")
    assert holdfast.steps(root) == [1]
    found, _ = loaded("plain", root, None)
    assert same(found, values(pair))
    dist.barrier()
    if dist.get_rank() == 0:
        assert len(list(Path(root).rglob("*/once-*/r00000.safetensors"))) == 2
    dist.barrier()
    writer.__class__ = Writer
    dcp.save(state_of(pair), storage_writer=writer, checkpoint_id="3")
    if dist.get_rank() == 0:  # the next save has tidied up
        assert len(list(Path(root).rglob("*/once-*/r00000.safetensors"))) == 2
    assert holdfast.steps(root) == [1, 3]


def what_cannot_be_is_refused(out: Path) -> None:
    pair = made("fsdp", seed=1)
    writer = Writer(out / "root")
    with pytest.raises(Exception, match="use_collectives=False: without collectives ranks cannot"):
        dcp.save(state_of(pair), storage_writer=writer, use_collectives=False)
    dist.barrier()
    with pytest.raises(CheckpointException, match=r"app\.it: is no plain data"):
        dcp.save({"app": {"it": Path("x")}}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="names no step of"):
        dcp.save(state_of(pair), storage_writer=_NamedLate(out / "root"), checkpoint_id="1")
    assert not [*out.glob("root/steps/*/manifest.json")]


class _NamedLate(Writer):
    def prepare_global_plan(self, plans: Any) -> Any:
        self.reset("elsewhere/1")
        return plans


def in_the_background(out: Path) -> None:
    """Two saves are begun before either has ended; each holds what was there when it began."""
    root, pair = str(out / "root"), made("fsdp", seed=1)
    expected, futures = [], []
    for step in (1, 2):
        with torch.no_grad():
            for p in pair[0].parameters():
                p.add_(1)
        expected.append(values(pair))
        saved = dcp.async_save(state_of(pair), storage_writer=Writer(root), checkpoint_id=str(step))
        with torch.no_grad():
            for p in pair[0].parameters():
                p.add_(1)
        futures.append(saved)
        saved.result()
    for step in (1, 2):
        good(root, step)
        assert same(loaded("tp", root, str(step))[0], expected[step - 1])


def in_another_process(out: Path) -> None:
    ASYNC_PROCESS.require()
    root, pair = str(out / "root"), made("fsdp", seed=1)
    writer = Writer(root, keep=holdfast.Keep(last=2))
    for step in (1, 2, 3):
        with torch.no_grad():
            for p in pair[0].parameters():
                p.add_(1)
        kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.async_save(
            state_of(pair),
            storage_writer=writer,
            checkpoint_id=str(step),
            async_checkpointer_type=kind,
            planner=planner,
        ).result()
    good(root, 3)
    assert holdfast.steps(root) == [2, 3]
    assert same(loaded("tp", root, None)[0], values(pair))


def a_group_of_some_ranks(out: Path) -> None:
    """Rank 1 saves and loads alone, in a process group of its own."""
    GROUPS_OF_SOME.require()
    root, alone = str(out / "root"), dist.new_group([1])
    if dist.get_rank() == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"x": torch.arange(5)}, storage_writer=Writer(root), process_group=alone)
            state = {"x": torch.zeros(5, dtype=torch.int64)}
            dcp.load(state, storage_reader=Reader(root), process_group=alone)
        assert state["x"].tolist() == [0, 1, 2, 3, 4]
    dist.barrier()
    assert holdfast.steps(root) == [0]


def parts_of_every_kind(out: Path) -> None:
    """Uneven and empty parts, numbers, empty tensors, and dtypes of every width."""
    root, mesh = str(out / "root"), init_device_mesh("cpu", (2,))
    wide = torch.arange(11.0, dtype=torch.float64).reshape(11, 1)
    full = {
        "rows": wide,
        "columns": torch.arange(21).reshape(3, 7),
        "one": torch.ones(1, 4, dtype=torch.bfloat16),
        "none": torch.ones(0, 3),
        "number": torch.tensor(2.5),
        "bits": torch.tensor([True, False, True]),
        "complex": torch.tensor([1 + 2j]),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
    }
    cuts = {"rows": 0, "columns": 1, "one": 0}

    def placed(values: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {
            k: distribute_tensor(v, mesh, [Shard(cuts[k])]) if k in cuts else v
            for k, v in values.items()
        }

    dcp.save({"a": placed(full)}, storage_writer=Writer(root))
    blank = {"a": placed({k: torch.zeros_like(v) for k, v in full.items()})}
    dcp.load(blank, storage_reader=Reader(root))
    plain = {"a": {k: torch.zeros_like(v) for k, v in full.items()}}
    dcp.load(plain, storage_reader=Reader(root))
    for name, expected in full.items():
        assert torch.equal(whole(blank["a"][name]), expected), name
        assert torch.equal(plain["a"][name], expected), name
    good(root, 0)


class ToldNoRank(Writer):
    """As DCP of older torch calls it, and any DCP a method without `kwargs`."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:  # type: ignore[override]
        super().set_up_storage_writer(is_coordinator)


def a_writer_that_is_not_told_its_rank(out: Path) -> None:
    root, mesh = str(out / "root"), init_device_mesh("cpu", (2,))
    full = torch.arange(6.0)
    dcp.save({"x": distribute_tensor(full, mesh, [Shard(0)])}, storage_writer=ToldNoRank(root))
    found = {"x": torch.zeros(6)}
    dcp.load(found, storage_reader=Reader(root))
    assert torch.equal(found["x"], full)
    good(root, 0)


def on_object_storage(out: Path) -> None:
    """The address of the server is in a file beside the cases."""
    url = json.loads((out.parent / "url.json").read_text())
    pair = made("fsdp", seed=1)
    writer = Writer(url, keep=holdfast.Keep(last=1))
    for step in ("1", "2"):
        dcp.save(state_of(pair), storage_writer=writer, checkpoint_id=step)
    writer.wait()
    dist.barrier()
    good(url, 2)
    assert holdfast.steps(url) == [2]
    assert same(loaded("tp", url, None)[0], values(pair))


CASES = [
    every_layout_into_every_other,
    what_a_checkpointer_saved_is_loaded,
    plans_are_kept,
    a_rank_fails,
    what_cannot_be_is_refused,
    in_the_background,
    a_group_of_some_ranks,
    parts_of_every_kind,
    a_writer_that_is_not_told_its_rank,
]

if __name__ == "__main__":
    run_all([*CASES, in_another_process, on_object_storage])
