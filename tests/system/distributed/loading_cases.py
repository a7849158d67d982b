"""Worker, 3 ranks: loading on several ranks, and what each rank is told when it fails."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from capabilities import FSDP2_ON_CPUS
from holdfast import events
from holdfast.checkpoint.notes import pin
from holdfast.errors import (
    Corrupt,
    NotFound,
    NotRecoverable,
    RuleError,
    StateMismatch,
    UsageError,
)
from holdfast.live import step_loading
from holdfast.store import open_store
from live.state.test_customised_modules import Book, Packed
from live.state.test_optimizers import Counted

from .cases import run_all


class Net(nn.Module):
    def __init__(self, width: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(1001, width)
        self.body = nn.Linear(width, 7)
        self.head = nn.Linear(width, 1001, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)).square().mean() + self.body(self.embed(x)).mean()


def sharded(seed: int) -> Net:
    torch.manual_seed(seed)
    net = Net()
    FSDP2_ON_CPUS.require()
    fully_shard(net.body)
    fully_shard(net)
    return net


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(net: Net, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.arange(64) * (step + 1 + dist.get_rank()) % 1001).backward()
        optimizer.step()
    return optimizer


def everyone(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def meta_models_become_real_and_stay_tied(root: Path) -> None:
    net = sharded(0)
    net.mean.fill_(3)
    holdfast.save(root, {"model": net}, step=1)
    with torch.device("meta"):
        empty = Net()
    FSDP2_ON_CPUS.require()
    fully_shard(empty.body)
    fully_shard(empty)
    assert all(p.is_meta for p in empty.parameters())
    holdfast.load(root, {"model": empty})
    assert empty.head.weight is empty.embed.weight
    assert not any(t.is_meta for t in (*empty.parameters(), *empty.buffers()))
    theirs = dict(net.state_dict())
    for name, tensor in empty.state_dict().items():
        assert torch.equal(whole(tensor), whole(theirs[name])), name
    holdfast.save(root, {"model": empty, "optim": trained(empty)}, step=2)


def two_weights_that_differ_in_one_row(root: Path) -> None:
    """All ranks find it, whoever reads the row, and whether all have the tied weight or one alone."""
    rank = dist.get_rank()
    for step, row in enumerate((None, 0, 500, 1000)):
        torch.manual_seed(0)
        apart = Net()
        apart.head.weight = nn.Parameter(apart.embed.weight.detach().clone())
        if row is not None:
            apart.head.weight.data[row] += 1
        holdfast.save(root, {"model": apart}, step=step)
        for have_all in (True, False):
            tied = sharded(1) if have_all else Net()
            if not have_all and rank != 2:
                del tied.embed, tied.head
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("holdfast.live.restore.tied.COMPARED_BYTES", 16 << 10)
                if row is None:
                    holdfast.load(root, {"model": tied}, step=step)
                    continue
                with pytest.raises(StateMismatch, match=r"head\.weight .*with different values"):
                    holdfast.load(root, {"model": tied}, step=step)


def state_goes_on_under_fsdp(root: Path) -> None:
    """Also read by `test_sharded_state_on_one_rank`, in another process with one rank."""
    net = sharded(0)
    optimizer = trained(net)
    holdfast.save(root, {"model": net, "optim": optimizer}, step=2)
    for used in (False, True):
        other = sharded(1)
        fresh = trained(other, 1) if used else torch.optim.AdamW(other.parameters(), lr=9.0)
        holdfast.load(root, {"model": other, "optim": fresh})
        assert fresh.param_groups[0]["lr"] == 0.01
        for p, q in zip(net.parameters(), other.parameters()):
            for name, value in optimizer.state[p].items():
                assert torch.equal(whole(value), whole(fresh.state[q][name])), name
    expected = [whole(p) for p in net.parameters()]
    torch.save([p.detach() for p in expected], root / f"params-{dist.get_rank()}.pt")


def state_that_belongs_to_no_parameter(root: Path) -> None:
    """Also read by tests on one rank.  `rank` is each rank's own."""
    for own in (False, True):
        net = sharded(0)
        optimizer = Counted(net.parameters())
        for _ in range(2):
            net(torch.arange(9)).backward()
            optimizer.step()
        if own:
            del optimizer.state["large"]
            optimizer.state["rank"] = {"is": dist.get_rank()}
        holdfast.save(root / str(own), {"model": net, "optim": optimizer}, step=2)
        other = sharded(1)
        fresh = Counted(other.parameters())
        holdfast.load(root / str(own), {"model": other, "optim": fresh})
        before, after = (
            {k: str(v) for k, v in o.state.items() if isinstance(k, str)}
            for o in (optimizer, fresh)
        )
        assert after == before and after["k"] == "tensor([2])" and ("rank" in after) == own


def records_have_the_learning_rate_of_each_rank(root: Path) -> None:
    """Ranks train the same parameters with rates of their own: replayed records use each rank's."""
    rank = dist.get_rank()

    def checkpointer(seed: int) -> tuple[Net, torch.optim.Optimizer, holdfast.Checkpointer]:
        net = sharded(seed)
        optimizer = torch.optim.AdamW(net.parameters(), lr=9.0, foreach=False)
        every = holdfast.Every(durable=2, delta=1)
        state = {"model": net, "optim": optimizer}
        return (
            net,
            optimizer,
            holdfast.Checkpointer(root, state, every=every, delta=holdfast.Delta()),
        )

    net, optimizer, ckpt = checkpointer(0)
    with warnings.catch_warnings(record=True) as told, ckpt:
        warnings.simplefilter("always")
        for step in range(1, 6):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + rank) / step
            optimizer.zero_grad()
            net(torch.arange(64) * (step + rank) % 1001).backward()
            optimizer.step()
            ckpt.step(step)
    other, fresh, ckpt = checkpointer(1)
    with ckpt:
        restored = ckpt.restore()
    assert restored == 5 and restored.replayed == 1 and restored.exactness == "bit-exact"
    assert fresh.param_groups[0]["lr"] == 0.01 * (1 + rank) / 5
    for p, q in zip(net.parameters(), other.parameters()):
        assert torch.equal(whole(p), whole(q))
    heard = everyone([str(w.message) for w in told])
    texts = [text for of_rank in heard for text in of_rank]
    assert sum("each rank's are saved, for a restore on the same layout" in t for t in texts) == 1


def modules_keep_their_own_state(root: Path) -> None:
    """What modules have besides tensors may differ between ranks; FSDP2's hooks are not asked."""
    rank = dist.get_rank()

    def build(value: float) -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 6), Packed(value), Book(3.0 if value else 0.0))
        FSDP2_ON_CPUS.require()
        return fully_shard(net)

    net, other = build(rank + 1.0), build(0.0)
    net(torch.ones(2, 6))
    holdfast.save(root, {"model": net}, step=1, deadline_s=120)
    holdfast.load(root, {"model": other}, deadline_s=120)
    assert other[1].scale == rank + 1.0 and (other[2].codebook == 3.0).all()
    assert torch.equal(whole(other[0].weight), whole(net[0].weight))


def large_values_that_differ_between_ranks(root: Path) -> None:
    """They are refused with a rule that works."""
    rank = dist.get_rank()
    net, other = nn.Sequential(Packed(rank + 1.0, 40_000)), nn.Sequential(Packed(9.0, 40_000))
    holdfast.ignore(net, "0.kind", "0.scale")
    rule = {"model.0._own_extra_state": "fresh"}

    def checkpointer(model: nn.Module, **options: Any) -> holdfast.Checkpointer:
        return holdfast.Checkpointer(
            root, {"model": model}, deadline_s=120, on_error="raise", **options
        )

    with checkpointer(net) as ckpt, pytest.raises(holdfast.HoldfastError) as caught:
        ckpt.save(1).wait()
    told = everyone(str(caught.value))
    assert all("differs between ranks" in text for text in told)
    assert f"on_resize={rule}" in told[0]
    with checkpointer(net, on_resize=rule) as ckpt:
        ckpt.save(2).wait()
    holdfast.ignore(other, "0.kind", "0.scale")
    holdfast.load(root, {"model": other}, deadline_s=120)
    assert set(other[0].weight) == {rank + 1.0}


def a_mismatch_is_the_same_on_every_rank(root: Path) -> None:
    """Ranks differ in what they lack; each is told all of it, and nothing is touched."""
    net = sharded(0)
    holdfast.save(root, {"model": net}, step=1)
    other = sharded(1)
    rank = dist.get_rank()
    other.register_buffer(f"mine{rank}", torch.zeros(3))
    if rank == 2:
        other.mean = torch.zeros(6)
    before = [whole(p).clone() for p in other.parameters()]
    with pytest.raises(StateMismatch) as caught:
        holdfast.load(root, {"model": other})
    told = everyone((str(caught.value), caught.value.problems))
    assert told.count(told[0]) == 3
    for r in range(3):
        assert f"missing in the checkpoint: model.mine{r}" in told[0][0]
    assert "model.mean: saved with shape (5,), here (6,)" in told[0][0]
    assert all(torch.equal(whole(p), b) for p, b in zip(other.parameters(), before))


class Stage(nn.Module):
    """Of a pipeline: each rank has one, whose names begin with its number."""

    def __init__(self, rank: int, fill: float) -> None:
        super().__init__()
        self.add_module(f"stage{rank}", nn.Linear(2, 2))
        for p in self.parameters():
            nn.init.constant_(p, fill)


def a_pattern_may_be_of_other_ranks_alone(root: Path) -> None:
    rank = dist.get_rank()
    holdfast.save(root, {"model": Stage(rank, 5.0)}, step=1)
    mine = Stage(rank, 0.0)
    holdfast.load(root, {"model": mine}, only="model.stage1.*")
    assert all(torch.all(p == (5.0 if rank == 1 else 0.0)) for p in mine.parameters())
    with pytest.raises(StateMismatch, match=r"only='model\.stage7\.\*' matches no tensor"):
        holdfast.load(root, {"model": mine}, only=["model.stage1.*", "model.stage7.*"])


def an_error_of_one_rank_is_told_to_all(root: Path) -> None:
    """A rank whose state is malformed must not leave the others waiting."""
    net = sharded(0)
    holdfast.save(root, {"model": net}, step=1)
    other: nn.Module = sharded(1)
    if dist.get_rank() == 1:
        other.register_buffer("angles", torch.zeros(3, device="meta"), persistent=False)
    with pytest.raises(holdfast.errors.UsageError, match="angles are on the meta device"):
        holdfast.load(root, {"model": other}, deadline_s=120)


def flip(root: Path, step: int) -> tuple[str, int]:
    """Rank 0 flips a bit in the middle of the last rank's file; every rank learns where."""
    path = max(root.glob(f"steps/{step:010d}/*/r*.safetensors"))
    at = path.stat().st_size // 2
    dist.barrier()
    if dist.get_rank() == 0:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
    dist.barrier()
    return str(path.relative_to(root)), at


def a_flipped_bit_is_named_on_every_rank(root: Path) -> None:
    """Each rank reads its own part of a sharded model: only one sees the damage itself."""
    for url, make in ((root / "sharded", sharded), (root / "whole", lambda seed: Net())):
        net = make(0)
        holdfast.save(url, {"model": net}, step=1)
        key, at = flip(url, 1)
        with pytest.raises(Corrupt) as caught:
            holdfast.load(url, {"model": net}, deadline_s=120)
        error = caught.value
        assert (error.key, error.step) == (key, 1)
        assert error.start <= at < error.stop
        assert key in str(error)
        assert all(p.isnan().all() for p in map(whole, net.parameters()))


def restore_goes_back_on_every_rank(root: Path) -> None:
    net = sharded(0)
    state = {"model": net}
    with holdfast.Checkpointer(root, state, deadline_s=120) as ckpt:
        for step in (1, 2, 3):
            with torch.no_grad():
                net.body.weight.fill_(step)
            ckpt.save(step).wait(120)
        flip(root, 3)
        with pytest.warns(holdfast.HoldfastWarning, match="step 3 cannot be used"):
            assert ckpt.restore() == 2
        assert (whole(net.body.weight) == 2).all()
        for step in (1, 2):
            flip(root, step)
        with (
            pytest.warns(holdfast.HoldfastWarning),
            pytest.raises(NotRecoverable) as caught,
        ):
            ckpt.restore()
        assert caught.value.reasons.keys() == {1, 2, 3}
        assert everyone(str(caught.value)).count(str(caught.value)) == 3
        with torch.no_grad():
            net.body.weight.fill_(4)
            net.embed.weight.fill_(4)
        ckpt.save(4).wait(120)
        assert ckpt.restore() == 4


def draws() -> list[Any]:
    mask = nn.functional.dropout(torch.ones(20)).tolist()
    return [random.random(), np.random.random(), torch.rand(2).tolist(), mask]


def each_rank_gets_its_own_random_numbers(root: Path) -> None:
    rank = dist.get_rank()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    with holdfast.Checkpointer(root, {"x": 1}, deadline_s=120) as ckpt:
        ckpt.save(1).wait(120)
        expected = draws()
        assert draws() != expected
        ckpt.restore()
        assert draws() == expected
    told = everyone(expected)
    assert all(told[i] != told[j] for i in range(3) for j in range(i))


class Sampler:
    """Each rank at a place of its own; knows how to deal places to other ranks."""

    on_resize = "redistribute"

    def __init__(self) -> None:
        self.places: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"places": self.places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.places = state["places"]

    def redistribute(self, states: list[Any], rank: int, world_size: int) -> None:
        everything = [p for s in states for p in s["places"]]
        self.places = everything[rank::world_size]


def loader(seed: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(seed)
    return StatefulDataLoader(list(range(30)), batch_size=3, shuffle=True, generator=generator)


def per_rank_state(root: Path) -> None:
    """Read again here by all ranks, and by `test_resized` with one."""
    rank = dist.get_rank()
    sampler = Sampler()
    sampler.places = [10 * rank, 10 * rank + 1]
    mine = loader(rank)
    batches = iter(mine)
    for _ in range(4):
        next(batches)
    own = {"sampler": sampler, "loader": mine}
    with holdfast.Checkpointer(root, own, deadline_s=120) as ckpt:
        ckpt.save(4).wait(120)
        found = ckpt.find()
        assert found is not None and found.extras["sampler"] == {"places": sampler.places}
        assert found.extras["rng"].keys() >= {"python", "torch"} and not found.undecided
        with pytest.raises(UsageError, match="nothing was restored"):
            ckpt.restore_rng()
    rest = [b.tolist() for b in batches]
    (root / f"rest-{rank}.txt").write_text(str(rest))
    other, fresh = Sampler(), loader(99)
    events.counters.clear()
    holdfast.load(root, {"sampler": other, "loader": fresh}, deadline_s=120)
    assert other.places == sampler.places
    assert [b.tolist() for b in fresh] == rest
    assert "extras.resized" not in events.counters


def what_must_be_the_same_is_checked(root: Path) -> None:
    class Counter:
        on_resize = "same"

        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    holdfast.save(root, {"c": Counter(5)}, step=1, deadline_s=120)
    fresh = Counter(0)
    holdfast.load(root, {"c": fresh}, deadline_s=120)
    assert fresh.value == 5
    kind = RuleError if dist.get_rank() == 0 else holdfast.HoldfastError
    with pytest.raises(kind, match="declared to be the same on all ranks"):
        holdfast.save(root, {"c": Counter(dist.get_rank())}, step=2, deadline_s=120)
    dist.barrier()
    assert holdfast.steps(str(root)) == [1]


def a_dcp_directory_loads_on_other_cuts(root: Path) -> None:
    """Saved by DCP from rows, wanted in columns and whole: the tensors that torch gathers."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    shapes = ((700, 501), (1001, 3), (2, 64), (5,))
    full = {f"w{i}": torch.randn(s) for i, s in enumerate(shapes)}
    saved = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in full.items()}
    dcp.save({"m": saved, "epoch": 3}, checkpoint_id=root)
    for placement in (Shard(1), Replicate(), Shard(0)):
        live = nn.ParameterDict()
        for name, t in full.items():
            cut = [placement if t.ndim > 1 else Shard(0)]
            live[name] = nn.Parameter(distribute_tensor(torch.zeros_like(t), mesh, cut))
        assert holdfast.load(root, {"m": live}, deadline_s=120) == 0
        assert all(torch.equal(whole(t), full[name]) for name, t in live.items())


def a_damaged_newest_manifest_is_told_by_rank_0_alone(root: Path) -> None:
    """Every rank goes back to the same step; one of them says so."""
    state = {"data": {"x": torch.zeros(3)}}
    for step in (1, 2):
        state["data"]["x"].fill_(step)
        holdfast.save(root, state, step=step)
    if dist.get_rank() == 0:
        (root / "steps/0000000002/manifest.json").write_bytes(b"")
    dist.barrier()
    ckpt = holdfast.Checkpointer(root, state)
    for call in (ckpt.restore, lambda: holdfast.load(root, state)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert call() == 1 and state["data"]["x"].tolist() == [1.0] * 3
        told = [str(w.message) for w in found if w.category is holdfast.HoldfastWarning]
        assert len(told) == (dist.get_rank() == 0), told
        assert all("step 2: steps/0000000002/manifest.json is empty" in text for text in told)
    ckpt.close()


def _values(net: Net) -> set[float]:
    return {x for p in net.parameters() for x in whole(p).unique().tolist()}


def the_newest_that_is_deleted_gives_way_on_every_rank(root: Path) -> None:
    _is_deleted_while_read(root, None)


def a_labelled_step_that_is_deleted_gives_way_on_every_rank(root: Path) -> None:
    _is_deleted_while_read(root, "good")


def _is_deleted_while_read(root: Path, word: str | None) -> None:
    """A training of other processes saves step 2, moves the label and deletes step 1, when that is about to
    be read."""
    net, newer = sharded(0), root.with_name("newer")
    for step in (1, 2):
        for p in net.parameters():
            nn.init.constant_(p, step)
        holdfast.save(root, {"model": net}, step=step)
    dist.barrier()
    if dist.get_rank() == 0:
        pin(open_store(str(root)), 1, "good")
        (root / "steps/0000000002").rename(newer)
    dist.barrier()
    real = step_loading.shared_manifest

    def then_deleted(*args: Any) -> Any:
        manifest = real(*args)
        dist.barrier()
        if dist.get_rank() == 0 and newer.exists():
            newer.rename(root / "steps/0000000002")
            pin(open_store(str(root)), 2, "good")
            shutil.rmtree(root / "steps/0000000001")
        dist.barrier()
        return manifest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_loading, "shared_manifest", then_deleted)
        for p in net.parameters():
            nn.init.constant_(p, -1)
        assert holdfast.load(root, {"model": net}, step=word, deadline_s=120) == 2
        assert _values(net) == {2.0}


def a_file_that_is_gone_leaves_every_rank_as_it_was(root: Path) -> None:
    """Each rank reads its own part of a sharded model: only one needs that file."""
    net = sharded(0)
    optimizer = trained(net)
    holdfast.save(root, {"model": net, "optim": optimizer}, step=1)
    dist.barrier()
    if dist.get_rank() == 0:
        (lost,) = root.glob("steps/*/*/r00002.safetensors")
        lost.unlink()
    dist.barrier()
    fresh = sharded(1)
    other = torch.optim.AdamW(fresh.parameters())
    before = [whole(p).clone() for p in fresh.parameters()]
    with pytest.raises(NotFound, match="r00002"):
        holdfast.load(root, {"model": fresh, "optim": other}, deadline_s=120)
    assert all(torch.equal(whole(p), was) for p, was in zip(fresh.parameters(), before))
    assert not other.state


def a_word_names_the_same_step_on_every_rank(root: Path) -> None:
    """Only rank 0 looks; its error is that of all."""
    torch.manual_seed(0)
    live = {"x": torch.zeros(3)}
    keep = holdfast.Keep(best=("loss", 3))
    with holdfast.Checkpointer(root, live, keep=keep) as ckpt:
        for step, loss in ((10, 0.5), (20, 0.1), (30, 0.2)):
            live["x"].fill_(step)
            ckpt.step(step, metrics={"loss": loss})
            ckpt.save(step).wait(60)
        ckpt.pin("newest", "last")
        ckpt.pin(10, "first")
        assert ckpt.status().protected == 30 and ckpt.status().tiers["durable"].step == 30
    for word, step in (("first", 10), ("best", 20), ("last", 30), ("newest", 30)):
        for address, named in ((root, word), (f"{root}@{word}", None)):
            into = {"x": torch.zeros(3)}
            assert holdfast.load(address, into, step=named) == step
            assert into["x"].tolist() == [step] * 3
    with holdfast.Checkpointer(root, into, keep=keep) as ckpt:
        assert ckpt.restore("best") == 20 and into["x"].tolist() == [20] * 3
    for call in (
        lambda: holdfast.load(f"{root}@frist", into),
        lambda: holdfast.load(root, into, step="frist"),
    ):
        with pytest.raises(NotFound, match="has the label 'frist'"):
            call()


CASES = [
    a_word_names_the_same_step_on_every_rank,
    the_newest_that_is_deleted_gives_way_on_every_rank,
    a_labelled_step_that_is_deleted_gives_way_on_every_rank,
    a_file_that_is_gone_leaves_every_rank_as_it_was,
    a_damaged_newest_manifest_is_told_by_rank_0_alone,
    a_dcp_directory_loads_on_other_cuts,
    meta_models_become_real_and_stay_tied,
    two_weights_that_differ_in_one_row,
    state_goes_on_under_fsdp,
    state_that_belongs_to_no_parameter,
    records_have_the_learning_rate_of_each_rank,
    modules_keep_their_own_state,
    large_values_that_differ_between_ranks,
    a_mismatch_is_the_same_on_every_rank,
    a_pattern_may_be_of_other_ranks_alone,
    an_error_of_one_rank_is_told_to_all,
    a_flipped_bit_is_named_on_every_rank,
    restore_goes_back_on_every_rank,
    each_rank_gets_its_own_random_numbers,
    per_rank_state,
    what_must_be_the_same_is_checked,
]

if __name__ == "__main__":
    run_all(CASES)
