"""Worker, 2 ranks: replicas that differ at the first save, or begin to differ later."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import holdfast
from holdfast.errors import HoldfastError, HoldfastWarning

from .cases import run_all

WAIT_S = 120.0
LARGE = 300_000
"""Elements of a tensor of which only a sample is compared."""


def local_of(p: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = p.to_local() if isinstance(p, DTensor) else p  # type: ignore[attr-defined]
    return local.detach()


def expert(how: str, seed: int = 0, size: int = 4) -> nn.Module:
    """An expert of this rank on a mesh of its own, which is named as the other rank's."""
    rank = dist.get_rank()
    torch.manual_seed(seed + rank)
    model = nn.Linear(size, size, bias=False)
    if how == "submesh":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "fsdp"))
        fully_shard(model, mesh=mesh["fsdp"])
        return model
    mesh = DeviceMesh("cpu", torch.tensor([0]))
    for one in range(2):
        made = DeviceMesh("cpu", torch.tensor([one]))  # collective
        mesh = made if one == rank else mesh
    placements = [Shard(0) if how == "own-shard" else Replicate()]
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, placements))
    return model


def heard(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, HoldfastWarning)]


def experts_on_disjoint_meshes(root: Path) -> None:
    """Refused whatever `replicas=` says; both ranks and their meshes are named."""
    told = r"expert.weight: ranks 0 and 1, on the disjoint meshes \[0\] and \[1\]"
    for how in ("submesh", "own-shard", "own-replica"):
        model = expert(how)
        for mode in ("once", "trust"):
            with pytest.raises(HoldfastError, match=told) as info:
                holdfast.save(root / how, {"expert": model}, step=1, replicas=mode)
            assert "one mesh" in str(info.value)
        ckpt = holdfast.Checkpointer(
            root / how, {"expert": model}, replicas="verify", on_error="raise"
        )
        with pytest.raises(HoldfastError, match=told), ckpt:
            ckpt.save(1).wait(WAIT_S)
    dist.barrier()
    assert holdfast.steps(root / "submesh") == []


def their_moments(root: Path) -> None:
    """Where the weights are equal."""
    torch.manual_seed(0)
    model = expert("submesh")
    for p in model.parameters():
        nn.init.ones_(local_of(p))
    optim = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for p in model.parameters():
        p.grad = torch.full_like(p, dist.get_rank() + 1.0)
    optim.step()
    with pytest.raises(HoldfastError, match=r"weight\.exp_avg: ranks 0 and 1, on the disjoint"):
        holdfast.save(root, {"expert": model, "optim": optim}, step=1)


def copies_on_disjoint_meshes(root: Path) -> None:
    """Tensor parallelism in each of two replicas, as DDP around it: they are equal, and nothing is said."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train() -> None:
        with holdfast.Checkpointer(root, {"m": model, "o": optim}, on_error="raise") as ckpt:
            for step in range(1, 13):
                for p in model.parameters():
                    p.grad = torch.full_like(p, 1.0 / step)
                optim.step()
                ckpt.save(step).wait(WAIT_S)

    assert heard(train) == []


def hybrid(size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(size, size, bias=False)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optim.step()
    return model, optim


def hybrid_replicas_at_the_first_save(root: Path) -> None:
    for which in ("weight", "moment"):
        model, optim = hybrid(4)
        holdfast.save(root / f"{which}-equal", {"m": model, "o": optim}, step=1)
        p = model.weight
        changed = p if which == "weight" else optim.state[p]["exp_avg"]
        if dist.get_rank() == 1:
            local_of(changed).add_(1e-3)
        name = r"m\.weight" if which == "weight" else r"o\.weight\.exp_avg"
        with pytest.raises(HoldfastError, match=f"(?s)1 tensor.*{name}: ranks 0 and 1"):
            holdfast.save(root / which, {"m": model, "o": optim}, step=1)


def first_refused(
    root: Path, state: dict[str, Any], change: Callable[[], object]
) -> tuple[int, str]:
    """Save a step, `change`, and save until one is refused; the number of saves, and what was said."""
    said = ""
    ckpt = holdfast.Checkpointer(root, state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ckpt:
            for step in range(1, 4):
                ckpt.save(step).wait(WAIT_S)
            change()
            for number in range(1, 12):
                save = ckpt.save(3 + number)
                try:
                    save.wait(WAIT_S)
                except HoldfastError as error:
                    said = str(error)
                    break
            else:
                return 0, ""
            for more in (1, 2):  # until it is mended
                with pytest.raises(HoldfastError, match="differ"):
                    ckpt.save(3 + number + more).wait(WAIT_S)
    return number, said


def replicas_that_part_later(root: Path) -> None:
    """Small ones at once, large ones within ten saves, DTensors and moments as well."""
    small, large = hybrid(4), hybrid(550)

    def add(tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: local_of(tensor).add_(1e-3 * dist.get_rank())

    def one(tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: local_of(tensor).view(-1)[-1:].add_(dist.get_rank())

    turned = torch.ones(600, 500).t()
    plain = {"d": {f"x{i}": torch.zeros(LARGE) for i in range(13)}, "t": turned}
    weights: dict[str, tuple[dict[str, Any], torch.Tensor, str, int]] = {
        "weight": ({"m": small[0]}, small[0].weight, "m.weight", 1),
        "large weight": ({"m": large[0]}, large[0].weight, "m.weight", 10),
        "large moment": (
            {"m": large[0], "o": large[1]},
            large[1].state[large[0].weight]["exp_avg_sq"],
            "o.weight.exp_avg_sq",
            10,
        ),
        "expert": (
            {"e": (made := expert("submesh", seed=-dist.get_rank(), size=550))},
            made.weight,
            "e.weight",
            10,
        ),
        "one of many": (plain, plain["d"]["x7"], "d.x7", 10),
        "not contiguous": (plain, turned, "t", 10),
    }
    for name, (state, tensor, saved_as, most) in weights.items():
        number, said = first_refused(root / name, state, add(tensor))
        assert 1 <= number <= most, (name, number, said)
        assert f"{saved_as}: ranks 0 and 1" in said, (name, said)
        local_of(tensor).add_(-1e-3 * dist.get_rank())
    number, said = first_refused(root / "one value", {"m": small[0]}, one(small[0].weight))
    assert number == 1, said


def what_is_mended_is_saved(root: Path) -> None:
    x = torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with holdfast.Checkpointer(root, {"d": {"x": x}}) as ckpt:
            ckpt.save(1).wait(WAIT_S)
            x += dist.get_rank()
            with pytest.raises(HoldfastError, match=r"d\.x: ranks 0 and 1"):
                ckpt.save(2).wait(WAIT_S)
            x.zero_()
            ckpt.save(3).wait(WAIT_S)
    assert holdfast.steps(root) == [1, 3]


class Metric(nn.Module):
    def __init__(self, size: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(size))


def sums_of_each_rank(root: Path) -> None:
    """Told at the first save where they differ, by name, once; by rank 0."""
    torch.manual_seed(0)
    for kind, size in (("durable", ()), ("large", (LARGE,)), ("again", (2,))):
        metric, other = Metric(size), Metric()
        state = {"metric": metric, "other": other}
        told: dict[int, list[str]] = {}
        with holdfast.Checkpointer(root / kind, state) as ckpt:
            for step in range(1, 16):
                if step == 3:
                    metric.total += 10.0 * (dist.get_rank() + 1)
                if step == 14:
                    other.total += dist.get_rank()
                told[step] = heard(lambda step=step: ckpt.save(step).wait(WAIT_S))
        by_step = {step: texts for step, texts in told.items() if texts}
        if dist.get_rank():
            assert by_step == {}
            continue
        first, second = sorted(by_step)
        assert first == 3 if kind != "large" else 3 <= first < 13, by_step
        assert second == 14
        (text,) = by_step[first]
        assert "1 buffer(s) differ" in text and "metric.total: ranks 0 and 1" in text
        assert text.endswith("[buffers-of-ranks]")
        assert "other.total" in by_step[14][0] and "metric.total" not in by_step[14][0]


def buffers_that_ddp_sends(root: Path) -> None:
    """They differ at every save but the first, and nothing is said."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    model = nn.parallel.DistributedDataParallel(net)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train() -> None:
        with holdfast.Checkpointer(root, {"m": model, "o": optim}, on_error="raise") as ckpt:
            ckpt.save(0).wait(WAIT_S)
            for step in range(1, 12):
                torch.manual_seed(step * 10 + dist.get_rank())
                optim.zero_grad()
                model(torch.randn(8, 6)).square().mean().backward()
                optim.step()
                ckpt.save(step).wait(WAIT_S)

    assert heard(train) == []


def stages_have_their_own(root: Path) -> None:
    """Ranks that hold other tensors, some of them in common, are compared in these alone."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    common, metric = nn.Linear(4, 4), Metric()
    state: dict[str, Any] = {"common": common, "metric": metric}
    own = nn.ModuleDict({f"of{rank}": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))})
    state["stages"] = own
    own[f"of{rank}"][0].weight.data.add_(rank)

    def train(ckpt: holdfast.Checkpointer) -> None:
        for step in range(1, 5):
            own[f"of{rank}"][1].running_mean.add_(rank + step)
            ckpt.save(step).wait(WAIT_S)

    with holdfast.Checkpointer(root, state, on_error="raise") as ckpt:
        assert heard(lambda: train(ckpt)) == []
        common.bias.data.add_(rank)
        with pytest.raises(HoldfastError, match=r"common\.bias: ranks 0 and 1"):
            ckpt.save(9).wait(WAIT_S)


def trusted_replicas_may_part(root: Path) -> None:
    x = torch.zeros(3)
    with holdfast.Checkpointer(root, {"d": {"x": x}}, replicas="trust", on_error="raise") as ckpt:
        for step in range(1, 5):
            x += dist.get_rank()
            assert heard(lambda step=step: ckpt.save(step).wait(WAIT_S)) == []


def told_alone(root: Path, states: list[dict[str, Any]], *names: str) -> None:
    """Save these states, one on each rank, twice, and restore them: `names` are told of by rank 0."""
    state = states[dist.get_rank()]

    def save() -> None:
        with holdfast.Checkpointer(root, state, on_error="raise") as ckpt:
            for step in (1, 2):
                ckpt.save(step).wait(WAIT_S)

    def restore() -> None:
        with holdfast.Checkpointer(root, state, on_error="raise") as ckpt:
            assert ckpt.restore() == 2

    for call in (save, restore):
        texts = heard(call)
        if dist.get_rank() or not names:
            assert texts == [], texts
            continue
        assert len(texts) == 1, texts
        (text,) = texts
        assert text.endswith("[one-rank-alone]")
        for name in names:
            assert f"  {name}: rank 0 has it, rank 1 not" in text, (name, text)


def linear(**buffers: float) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    for name, value in buffers.items():
        model.register_buffer(name, torch.tensor(value))
    return model


def what_one_rank_alone_has(root: Path) -> None:
    one = {"n": 1}
    told_alone(root / "loader", [{"m": linear(), "loader": one}, {"m": linear()}], "loader")
    more = {"m": linear(best=1.0, seen=1.0)}
    told_alone(root / "buffers", [more, {"m": linear(seen=1.0)}], "m.best")
    dicts = [{"d": {"x": torch.ones(2), "y": torch.ones(2)}}, {"d": {"x": torch.ones(2)}}]
    told_alone(root / "dict", dicts, "d.y")


def moments_of_one_rank(root: Path) -> None:
    model = linear()
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if dist.get_rank():
        model.bias.grad = None
    optim.step()
    texts = heard(lambda: holdfast.save(root, {"m": model, "o": optim}, step=1))
    assert len(texts) == (dist.get_rank() == 0)
    assert all("o.bias.momentum_buffer: rank 0 has it, rank 1 not" in text for text in texts)


def names_that_differ_as_they_should(root: Path) -> None:
    """Stages, experts, names per rank, an optimizer cut over the ranks, nothing yet."""
    rank = dist.get_rank()
    names = [["a", "b"], ["c"]]
    stages = nn.ModuleDict({name: linear() for name in names[rank]})
    state: dict[str, Any] = {"m": stages, f"sampler{rank}": {"n": rank}, "history": []}
    if rank == 0:
        state["history"] = [1]
    told_alone(root / "stages", [state, state])
    shared = nn.Linear(2, 2)
    nn.init.ones_(shared.weight)
    nn.init.ones_(shared.bias)
    optim = ZeroRedundancyOptimizer(shared.parameters(), torch.optim.Adam, lr=0.1)
    for p in shared.parameters():
        p.grad = torch.ones_like(p)
    optim.step()
    same = {"m": shared}
    told_alone(root / "zero", [same, same])


CASES = [
    experts_on_disjoint_meshes,
    their_moments,
    copies_on_disjoint_meshes,
    hybrid_replicas_at_the_first_save,
    replicas_that_part_later,
    what_is_mended_is_saved,
    sums_of_each_rank,
    buffers_that_ddp_sends,
    stages_have_their_own,
    trusted_replicas_may_part,
    what_one_rank_alone_has,
    moments_of_one_rank,
    names_that_differ_as_they_should,
]

if __name__ == "__main__":
    run_all(CASES)
