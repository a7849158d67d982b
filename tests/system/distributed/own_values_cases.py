"""Worker, 2 ranks, then 3: optimizers with other values on each rank, or states of other shapes than
parameters; objects with sharded tensors."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from capabilities import FLAT_STRIPES, FSDP2_ON_CPUS

from .cases import run_all


class Estimating(torch.optim.SGD):
    """Estimates a step size from this rank's gradients alone, and keeps flat copies, as Prodigy does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                local = p.grad._local_tensor if isinstance(p.grad, DTensor) else p.grad
                group["seen"] = group.get("seen", 0.0) + local.abs().sum().item()
                state = self.state[p]
                state.setdefault("start", p.detach().flatten().clone())
                state.setdefault("past", []).append(p.detach().flatten().clone())
                state["count"] = state.get("count", 0) + 1
        super().step(closure)


def built(
    layout: str, seed: int, kind: Any = Estimating
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    if layout == "fsdp":
        FSDP2_ON_CPUS.require()
        fully_shard(
            model, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        )
    elif layout == "tp":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        cuts = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(model, mesh, cuts)  # type: ignore[arg-type]
    options = {"max_iter": 2} if kind is torch.optim.LBFGS else {"momentum": 0.9}
    return model, kind(model.parameters(), lr=0.1, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    for number in range(steps):
        torch.manual_seed(seed + number)
        x = torch.randn(5, 8)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def whole(value: Any) -> Any:
    if isinstance(value, list):
        return [whole(one) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    return value.full_tensor().tolist() if isinstance(value, DTensor) else value.tolist()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that this rank has, with tensors whole."""
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        found[name] = whole(p)
        found |= {f"{name}.{k}": whole(v) for k, v in optimizer.state.get(p, {}).items()}
    for group in optimizer.param_groups:
        found["group"] = {k: v for k, v in group.items() if k != "params"}
    return found


def given(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model, "optim": optimizer}


def each_rank_gets_its_own_values_back(root: Path) -> None:
    """The values of its group, and states cut as they were, so that the next steps are the same."""
    model, optimizer = built("fsdp", 0)
    train(model, optimizer, 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        holdfast.save(root, given(model, optimizer), step=1)
    words = [str(one.message) for one in told if "'optim' has different values" in str(one.message)]
    counts: list[int | None] = [None, None]
    dist.all_gather_object(counts, len(words))
    assert counts == [1, 0]
    before = contents(model, optimizer)
    again = built("fsdp", 1)
    holdfast.load(root, given(*again))
    assert contents(*again) == before
    start = next(iter(again[1].state.values()))
    assert str(start["start"].placements) == str(start["past"][0].placements) == "(Shard(dim=0),)"
    train(model, optimizer, 2, seed=5)
    train(*again, 2, seed=5)
    assert contents(*again) == contents(model, optimizer)


def damage_that_one_rank_sees_is_passed_over_by_all(root: Path) -> None:
    """Only rank 1 reads its own values; all go back to the step before."""
    for number, how in enumerate(("a flipped bit", "a lost file")):
        model, optimizer = built("fsdp", 0)
        path = root / str(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with holdfast.Checkpointer(path, given(model, optimizer), deadline_s=300) as ckpt:
                for step in (1, 2):
                    train(model, optimizer, 1)
                    ckpt.save(step).wait(300)
                expected = contents(model, optimizer)
        file = holdfast.open(path, step=2).manifest.file_of[1]
        damaged = path / f"steps/{2:010d}" / file.path
        dist.barrier()
        if dist.get_rank() == 1 and how == "a lost file":
            damaged.unlink()
        elif dist.get_rank() == 1:
            data = bytearray(damaged.read_bytes())
            data[(file.extras + file.table) // 2] ^= 1
            damaged.write_bytes(data)
        dist.barrier()
        again = built("fsdp", 1)
        ckpt = holdfast.Checkpointer(path, given(*again), deadline_s=300)
        with ckpt, pytest.warns(holdfast.HoldfastWarning, match="step 2 cannot be used"):
            assert ckpt.restore() == 1
        train(*again, 1)
        assert contents(*again) == expected


def values_of_ranks_are_refused_on_another_layout(root: Path) -> None:
    """On as many ranks, too; a rule of the user's decides."""
    model, optimizer = built("fsdp", 0)
    train(model, optimizer, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        holdfast.save(root, given(model, optimizer), step=1)
    before = contents(model, optimizer)
    for layout in ("tp", "whole"):
        other = built(layout, 1)
        untouched = contents(*other)
        with pytest.raises(holdfast.HoldfastError) as caught:
            holdfast.load(root, given(*other))
        assert "'optim' (seen of the same parameters): saved by each rank" in str(caught.value)
        assert "on_resize={'optim': RULE}" in str(caught.value)
        assert contents(*other) == untouched
    other = built("whole", 1)
    holdfast.load(root, given(*other), on_resize={"optim": "rank0"})
    found, seen = contents(*other), [None, None]
    dist.all_gather_object(seen, before["group"]["seen"])
    assert found.pop("group")["seen"] == seen[0] != seen[1]
    del before["group"]
    assert found == before


def values_of_one_parameter_on_differing_ranks_are_refused(root: Path) -> None:
    """Ranks with other parameters besides cannot each keep their own: what they share must agree."""
    torch.manual_seed(0)
    shared, own = nn.Linear(2, 2), nn.Linear(2, 2)
    rank = dist.get_rank()
    model = nn.ModuleDict({"shared": shared, f"own{rank}": own})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    with pytest.raises(
        holdfast.HoldfastError, match=r"group of shared.* has different values of lr"
    ):
        holdfast.save(root, given(model, optimizer), step=1)
    optimizer.param_groups[0]["lr"] = 0.1
    holdfast.save(root, given(model, optimizer), step=2)


def stripes_are_refused_by_name(root: Path) -> None:
    """A matrix that tensor parallelism cuts by columns has no single part once it is flat."""
    FLAT_STRIPES.require()
    model, optimizer = built("tp", 0)
    train(model, optimizer, 1)
    flat: Any = model.get_parameter("2.weight").detach().flatten()
    if flat.placements[0].is_replicate():
        pytest.skip("this torch has no stripes of flat tensors: they are whole on each rank")
    with pytest.raises(holdfast.HoldfastError) as caught:
        holdfast.save(root, given(model, optimizer), step=1)
    assert "'optim.2.weight.start': _StridedShard(dim=0" in str(caught.value), caught.value
    assert "gives each of them stripes of dim 0 in place of one part" in str(caught.value)


def lbfgs_goes_to_other_layouts(root: Path) -> None:
    """Its vectors are of all parameters together, so that no layout makes a difference."""
    FLAT_STRIPES.require()
    kind = torch.optim.LBFGS
    for source in ("fsdp", "tp", "whole"):
        model, optimizer = built(source, 0, kind)
        train(model, optimizer, 2)
        holdfast.save(root / source, given(model, optimizer), step=1)
        before = contents(model, optimizer)
        for target in ("fsdp", "tp", "whole"):
            again = built(target, 1, kind)
            holdfast.load(root / source, given(*again))
            assert contents(*again) == before, (source, target)
            train(*again, 1, seed=5)
            if target == source:
                train(model, optimizer, 1, seed=5)
                assert contents(*again) == contents(model, optimizer)


class Averages:
    """Keeps averages of weights, sharded as they are, and a rank's own number."""

    on_resize: str | None = None

    def __init__(self, model: nn.Module, number: int) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": dict(self.shadow), "number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]
        self.shadow = {name: whole(value) for name, value in state["shadow"].items()}

    def redistribute(self, states: list[dict[str, Any]], rank: int, world_size: int) -> None:
        self.load_state_dict({**states[0], "number": sum(s["number"] for s in states)})


def sharded_tensors_beside_values_of_each_rank(root: Path) -> None:
    """An object gets both back, alone or in a dict, with and without a rule for other layouts."""
    rank = dist.get_rank()
    for where in ("alone", "inside", "ruled"):
        path = root / where

        def state(model: nn.Module, own: Averages, where: str = where) -> dict[str, Any]:
            own.on_resize = "redistribute" if where == "ruled" else None
            return {"model": model, "mine": {"ema": own, "n": 1} if where == "inside" else own}

        model, _ = built("fsdp", 0)
        averages = Averages(model, rank + 1)
        expected = {name: whole(value) for name, value in averages.shadow.items()}
        holdfast.save(path, state(model, averages), step=1)
        with holdfast.open(path) as checkpoint:
            assert "mine" in checkpoint.manifest.per_rank
        again, _ = built("fsdp", 1)
        mine = Averages(again, 0)
        holdfast.load(path, state(again, mine))
        assert (mine.number, mine.shadow) == (rank + 1, expected)


class Dealt(dict[str, Any]):
    """A dict of the script's that deals out what is left of all ranks."""

    def redistribute(self, states: list[dict[str, Any]], rank: int, world_size: int) -> None:
        self["left"] = [one for state in states for one in state["left"]][rank::world_size]


class Dealing(Estimating):
    """An optimizer whose class has a method of that name; its groups are no state to deal out."""

    def redistribute(self, states: list[Any], rank: int, world_size: int) -> None:
        raise AssertionError("not called")


def plain_values_of_each_rank(root: Path) -> None:
    """Read again by `test_a_dict_that_redistributes` and others with one."""
    rank = dist.get_rank()
    mine = Dealt(left=[rank, rank + 10], kept=torch.ones(2))
    holdfast.save(root, {"mine": mine, "best": None if rank == 0 else 0.5}, step=1)
    again = Dealt(left=[], kept=torch.zeros(2))
    holdfast.load(root, {"mine": again})
    assert again["left"] == [rank, rank + 10] and again["kept"].tolist() == [1, 1]


def removed_entries_are_told_by_rank_0(root: Path) -> None:
    """Also where each rank has restored values of its own."""
    rank = dist.get_rank()
    holdfast.save(root, {"progress": {"n": 1}, "mine": [rank]}, step=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        holdfast.load(root, {"progress": {"n": 0, "best": None}, "mine": [9]})
    words = [str(one.message) for one in told if "has nothing of 'best'" in str(one.message)]
    counts: list[int | None] = [None, None]
    dist.all_gather_object(counts, len(words))
    assert counts == [1, 0]


class Assigned(Averages):
    """Takes the tensors that it is given for its own."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self.shadow = state["number"], state["shadow"]


class Copied(Averages):
    """Copies what it is given into the tensors that it has."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)


class Holding:
    """An object whose state has another object in it, which cannot be asked before it is built."""

    def __init__(self, inner: Averages, *, built: bool = True) -> None:
        self.inner, self.built = inner, built

    def state_dict(self) -> dict[str, Any]:
        if not self.built:
            raise RuntimeError("not built")
        return {"list": [1, self.inner]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.built:
            self.inner.load_state_dict(state["list"][1])


def check_averages(
    mine: Averages, model: nn.Module, expected: dict[str, Any], number: int = 5
) -> None:
    """They have the values expected, and the cuts of the model's parameters: the next average can be
    made."""
    assert (mine.number, {n: whole(value) for n, value in mine.shadow.items()}) == (
        number,
        expected,
    )
    for name, p in model.named_parameters():
        average = mine.shadow[name]
        assert type(average) is type(p.data), name
        if isinstance(average, DTensor):
            assert (average.placements, average.device_mesh) == (p.placements, p.device_mesh)
            assert average._local_tensor.shape == p._local_tensor.shape
        average.lerp_(p.detach(), 0.1)


def sharded_tensors_of_an_object_come_back_as_they_were(root: Path) -> None:
    """Also to another layout, and in an object in another one: as `dcp.load` has them."""
    model, _ = built("fsdp", 0)
    averages = Averages(model, 5)
    expected = {name: whole(value) for name, value in averages.shadow.items()}
    holdfast.save(root / "here", {"mine": averages}, step=1)
    holdfast.save(root / "inside", {"mine": {"all": [Holding(averages)]}}, step=1)
    dcp.save({"mine": averages}, checkpoint_id=root / "dcp")
    for kind in (Assigned, Copied):
        for layout in ("fsdp", "tp"):
            model, _ = built(layout, 1)
            mine, inner, theirs = kind(model, 0), kind(model, 0), kind(model, 0)
            holdfast.load(root / "here", {"mine": mine})
            check_averages(mine, model, expected)
            holdfast.load(root / "inside", {"mine": {"all": [Holding(inner)]}})
            check_averages(inner, model, expected)
            dcp.load({"mine": theirs}, checkpoint_id=root / "dcp")
            check_averages(theirs, model, expected)


def replicated_tensors_of_an_object_are_on_its_mesh(root: Path) -> None:
    """They are saved among its values if they are small, as a bias is that tensor parallelism leaves whole;
    so are those of an object that is not sharded, but for a large one."""
    for source in ("tp", "whole"):
        model, _ = built(source, 0)
        averages = Averages(model, 5)
        averages.shadow["large"] = torch.arange(20_000.0)
        expected = {name: whole(value) for name, value in averages.shadow.items()}
        holdfast.save(root / source, {"mine": averages}, step=1)
        for kind in (Assigned, Copied):
            for layout in ("tp", "fsdp"):
                model, _ = built(layout, 1)
                mine = kind(model, 0)
                mine.shadow["large"] = torch.zeros(20_000)
                holdfast.load(root / source, {"mine": mine})
                check_averages(mine, model, expected)


def an_object_that_cannot_be_asked_gets_whole_tensors(root: Path) -> None:
    """On one rank, while the other's has the tensors; nobody waits for the other."""
    model, _ = built("fsdp", 0)
    averages, rank = Averages(model, 5), dist.get_rank()
    expected = {name: whole(value) for name, value in averages.shadow.items()}
    holdfast.save(root, {"mine": Holding(averages)}, step=1)
    model, _ = built("fsdp", 1)
    mine = Assigned(model, 0)
    holdfast.load(root, {"mine": Holding(mine, built=rank == 0)})
    if rank == 0:
        assert all(isinstance(value, DTensor) for value in mine.shadow.values())
    else:
        assert {name: value.tolist() for name, value in mine.shadow.items()} == expected


def averages_on_three_ranks(root: Path) -> None:
    """What two ranks have saved."""
    saved = root.parent / sharded_tensors_of_an_object_come_back_as_they_were.__name__
    model, _ = built("whole", 0)
    expected = {name: whole(p.detach()) for name, p in model.named_parameters()}
    for kind in (Assigned, Copied):
        model, _ = built("fsdp", 1)
        mine, theirs = kind(model, 0), kind(model, 0)
        holdfast.load(saved / "here", {"mine": mine})
        check_averages(mine, model, expected)
        dcp.load({"mine": theirs}, checkpoint_id=saved / "dcp")
        check_averages(theirs, model, expected)


ON_THREE = [averages_on_three_ranks]
CASES = [
    sharded_tensors_of_an_object_come_back_as_they_were,
    replicated_tensors_of_an_object_are_on_its_mesh,
    an_object_that_cannot_be_asked_gets_whole_tensors,
    sharded_tensors_beside_values_of_each_rank,
    plain_values_of_each_rank,
    removed_entries_are_told_by_rank_0,
    each_rank_gets_its_own_values_back,
    damage_that_one_rank_sees_is_passed_over_by_all,
    values_of_ranks_are_refused_on_another_layout,
    values_of_one_parameter_on_differing_ranks_are_refused,
    stripes_are_refused_by_name,
    lbfgs_goes_to_other_layouts,
]

if __name__ == "__main__":
    run_all(CASES if os.environ["WORLD_SIZE"] == "2" else ON_THREE)
