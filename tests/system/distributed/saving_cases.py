"""Worker, 3 ranks: saving beside the training, and what a failure of one rank does to all."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate

import holdfast
from capabilities import FSDP2_ON_CPUS
from holdfast import events
from holdfast.errors import Deadline, OutOfSpace, RankErrors, UsageError
from holdfast.live.saving import stall_notice
from holdfast.live.state import copy_timing, replicas, snapshot
from holdfast.testing import Faulty

from .cases import run_all

WAIT_S = 120.0


class Net(nn.Module):
    """Its buffers change in the forward pass, right after a save was called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(200, 301), nn.Tanh(), nn.Linear(301, 200))
        self.register_buffer("seen", torch.zeros(40_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.body(x).square().mean()


class Run:
    """A training run with a checkpointer, sharded or replicated."""

    def __init__(self, root: Path, *, shard: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.root = root
        self.net = Net()
        self.model: nn.Module = self.net
        if shard:
            FSDP2_ON_CPUS.require()
            fully_shard(self.net.body)
            fully_shard(self.net)
        else:
            self.model = nn.parallel.DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.state = {"model": self.model, "optim": self.optimizer, "step": 0}
        self.ckpt = holdfast.Checkpointer(
            root, self.state, **{"deadline_s": WAIT_S, "on_error": "raise", **options}
        )

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.state["step"] += 1
            self.optimizer.zero_grad()
            torch.manual_seed(self.state["step"] * 10 + dist.get_rank())
            self.model(torch.randn(8, 200)).backward()
            self.optimizer.step()

    def copy(self) -> dict[str, torch.Tensor]:
        """All tensors now, whole, under holdfast's names."""
        found = {f"model.{n}": whole(p) for n, p in self.net.named_parameters()}
        found["model.seen"] = self.net.seen.clone()
        for name, p in self.net.named_parameters():
            for key, value in self.optimizer.state[p].items():
                found[f"optim.{name}.{key}"] = whole(value)
        return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def check_saved(root: Path, step: int, copy: dict[str, torch.Tensor]) -> None:
    """The checkpoint holds exactly the copy."""
    with holdfast.open(str(root), step=step) as checkpoint:
        assert set(checkpoint.names()) == set(copy)
        for name, tensor in copy.items():
            assert torch.equal(torch.from_numpy(checkpoint.read(name)), tensor), name
        assert checkpoint.extras["step"] == step


def everyone(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@contextmanager
def store_of(run: Run, fail: Callable[[str, str], Exception | None]) -> Iterator[None]:
    """While open, `fail` is asked before each operation of this rank's store."""
    inner = run.ckpt._tiers.durable.steps.store
    run.ckpt._tiers.durable.steps.store = Faulty(inner, fail)
    yield
    run.ckpt._tiers.durable.steps.store = inner


class Gate:
    """Holds writes up until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, op: str, key: str) -> None:
        if op == "create":
            assert self.opened.wait(WAIT_S)


def files_of(root: Path, step: int) -> list[Path]:
    return [p for p in root.glob(f"steps/{step:010d}/**/*") if p.is_file()]


# -- the snapshot ---------------------------------------------------------------------------------


def snapshots_are_of_the_moment_of_the_call(root: Path) -> None:
    """Nothing is written before training has gone on for steps; yet the call's state is saved."""
    for name, shard in (("sharded", True), ("replicated", False)):
        run = Run(root / name, shard=shard)
        run.train(2)
        for _ in range(4):
            gate, step = Gate(), run.state["step"]
            copy = run.copy()
            with store_of(run, gate):
                save = run.ckpt.save(step)
                run.train(3)
                assert not save.done()
                gate.opened.set()
                save.wait(WAIT_S)
            check_saved(run.root, step, copy)
        assert not torch.equal(copy["model.seen"], run.net.seen)
        run.ckpt.close()


def a_write_in_the_window_fails_aloud(root: Path) -> None:
    """Rank 1 edits weights while they are copied: no step, and each rank is told whose fault it is."""
    run = Run(root)
    save_the_first(run)
    original = snapshot.Copies.run

    def edited(copies: Any, *args: Any) -> None:
        original(copies, *args)
        if dist.get_rank() == 1:
            with torch.no_grad():
                run.net.body[0].weight.add_(1)

    snapshot.Copies.run = edited
    try:
        with (
            patch.object(copy_timing, "COPIED_AT_CALL_BYTES", 0),
            pytest.raises(
                RankErrors, match=r"outside optimizer\.step\(\).*body\.0\.weight"
            ) as caught,
        ):
            run.ckpt.save(1).wait(WAIT_S)
    finally:
        snapshot.Copies.run = original
    assert caught.value.errors.keys() == {1}
    dist.barrier()
    assert files_of(root, 1) == []
    check_next_save(run, 0)


def save_the_first(run: Run) -> None:
    """Step 0, which is copied before its call returns; the next save is copied in the window."""
    run.train()
    with patch.object(copy_timing, "COPIED_AT_CALL_BYTES", 0):
        run.ckpt.save(0).wait(WAIT_S)


def weights_that_a_forward_pass_writes_fail_no_save(root: Path) -> None:
    """The first save is copied before its call returns; then it is known that they are written."""
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(nn.Embedding(300, 40, max_norm=1.0))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    original = snapshot.Copies.run

    def late(copies: Any, *args: Any) -> None:
        time.sleep(0.3)
        original(copies, *args)

    ckpt = holdfast.Checkpointer(root, {"model": net, "optim": optimizer})
    late_copies = patch.object(snapshot.Copies, "run", late)
    with ckpt, late_copies, patch.object(copy_timing, "COPIED_AT_CALL_BYTES", 0):
        for step in (1, 2, 3):
            expected = net.module.weight.detach().numpy().copy()
            save = ckpt.save(step)
            loss = net(torch.arange(100 * step - 100, 100 * step)).square().mean()
            loss.backward()
            optimizer.step()
            save.wait(WAIT_S)
            with holdfast.open(root, step=step) as checkpoint:
                assert np.array_equal(checkpoint.read("model.weight"), expected)


def a_write_that_is_counted_after_the_copy_fails_aloud(root: Path) -> None:
    """Rank 1 was writing when its copy ended: the second look at the counters shows it."""
    run = Run(root)
    save_the_first(run)
    changed, looks = snapshot.Shot.changed, iter(range(9))

    def written_after_the_first(shot: snapshot.Shot) -> list[str]:
        if next(looks) == 1 and dist.get_rank() == 1:
            with torch.no_grad():
                run.net.body[0].weight.add_(1)
        return changed(shot)

    with (
        patch.object(snapshot.Shot, "changed", written_after_the_first),
        patch.object(copy_timing, "COPIED_AT_CALL_BYTES", 0),
        pytest.raises(RankErrors, match=r"outside optimizer\.step\(\).*body\.0\.weight") as caught,
    ):
        run.ckpt.save(1).wait(WAIT_S)
    assert next(looks) >= 2  # it was looked at twice
    assert caught.value.errors.keys() == {1}
    dist.barrier()
    assert files_of(root, 1) == []
    check_next_save(run, 0)


def check_next_save(run: Run, *before: int) -> None:
    """After a failure: training goes on, the next save works, nothing is left behind; there are the steps
    of `before`, too."""
    run.train(2)
    copy, step = run.copy(), run.state["step"]
    run.ckpt._saves.untold.clear()  # the failure has been looked at
    run.ckpt.save(step).wait(WAIT_S)
    check_saved(run.root, step, copy)
    run.ckpt.close()
    dist.barrier()
    assert holdfast.steps(str(run.root)) == [*before, step]
    attempts = {attempt(run.root, one) for one in (*before, step)}
    assert {p.parts[-2] for p in run.root.glob("steps/*/*/*")} == attempts


def attempt(root: Path, step: int) -> str:
    return holdfast.open(str(root), step=step).manifest.attempt


# -- busy -----------------------------------------------------------------------------------------


def a_busy_save_is_skipped_by_all(root: Path) -> None:
    """One rank's store is slow; the step that falls due meanwhile is left out on every rank."""
    run = Run(root, every=1, when_busy="skip")
    gate = Gate()
    if dist.get_rank() != 1:
        gate.opened.set()
    events.counters.clear()
    with store_of(run, gate):
        run.train()
        copy = run.copy()
        run.ckpt.step(1)
        run.train()
        run.ckpt.step(2)
        second = run.ckpt._saves.untold[-1]
        second.wait(WAIT_S)
        assert second.skipped
        gate.opened.set()
        with pytest.warns(holdfast.HoldfastWarning, match="step 2 was left out"):
            run.ckpt.wait()
    assert events.counters["save.skipped"] == 1
    dist.barrier()
    assert holdfast.steps(str(root)) == [1]
    check_saved(root, 1, copy)
    run.train()
    run.ckpt.step(3)
    run.ckpt.close()
    dist.barrier()
    assert holdfast.steps(str(root)) == [1, 3]


def a_busy_save_waits_in_the_queue(root: Path) -> None:
    run = Run(root, every=1)
    gate = Gate()
    events.counters.clear()
    told = pytest.warns(
        holdfast.HoldfastWarning, match=r"training waited .* of step 1.*\[held-long\]"
    )
    with store_of(run, gate), patch.object(stall_notice, "LONG_S", -1.0), told:
        copies = {}
        for step in (1, 2):
            run.train()
            copies[step] = run.copy()
            run.ckpt.step(step)
        assert not any(save.done() for save in run.ckpt._saves.untold)
        while not events.counters["save.queued"]:
            time.sleep(0.01)
        gate.opened.set()
        run.ckpt.wait()
    dist.barrier()
    assert holdfast.steps(str(root)) == [1, 2]
    for step, copy in copies.items():
        check_saved(root, step, copy)
    run.ckpt.close()


# -- failures -------------------------------------------------------------------------------------


def check_failed_save(
    root: Path, ranks: tuple[int, ...], op: str, expected: dict[int, str]
) -> None:
    """`op` of these ranks' stores says that there is no space left."""
    run = Run(root)
    run.train()

    def fail(name: str, key: str) -> Exception | None:
        return OutOfSpace(f"disk {dist.get_rank()} is full") if name == op else None

    with store_of(run, fail if dist.get_rank() in ranks else lambda *_: None):
        save = run.ckpt.save(1)
        run.train()
        with pytest.raises(RankErrors) as caught:
            save.wait(WAIT_S)
    assert caught.value.errors == expected
    assert caught.value.step == 1
    dist.barrier()
    assert holdfast.steps(str(root)) == []
    assert files_of(root, 1) == []
    check_next_save(run)


def a_full_disk_of_one_rank_fails_the_save_on_all(root: Path) -> None:
    for op in ("create", "write", "finish"):
        check_failed_save(root / op, (1,), op, {1: "OutOfSpace: disk 1 is full"})


def full_disks_of_several_ranks_are_all_named(root: Path) -> None:
    both = {0: "OutOfSpace: disk 0 is full", 2: "OutOfSpace: disk 2 is full"}
    check_failed_save(root, (0, 2), "write", both)


def a_commit_that_fails_is_told_to_all(root: Path) -> None:
    check_failed_save(root, (0,), "put", {0: "commit: OutOfSpace: disk 0 is full"})


def a_failed_save_is_a_warning_unless_asked_otherwise(root: Path) -> None:
    run = Run(root, on_error="warn")
    run.train()
    failing = dist.get_rank() == 2
    with store_of(run, lambda op, key: OutOfSpace("full") if failing and op == "create" else None):
        run.ckpt.save(1)
        with pytest.warns(holdfast.HoldfastWarning, match=r"rank 2: OutOfSpace: full"):
            run.ckpt.wait()
    run.ckpt.close()


def a_rank_that_never_saves_is_named_in_time(root: Path) -> None:
    run = Run(root)
    run.train()
    planner = run.ckpt._tiers.saver.planner
    planner.deadline_s, all_others_s = 2.0, planner.deadline_s
    dist.barrier()  # the others begin together
    if dist.get_rank() != 2:
        started = time.monotonic()
        with pytest.raises(Deadline, match="rank 2 has not begun the save of step 1 within 2 s"):
            run.ckpt.save(1).wait(WAIT_S)
        assert time.monotonic() - started < all_others_s / 2
        run.ckpt._saves.untold.clear()
    dist.barrier()
    planner.deadline_s = all_others_s
    run.train()
    run.ckpt.close()
    assert files_of(root, 1) == []


def ranks_that_save_different_steps_are_told(root: Path) -> None:
    run = Run(root)
    run.train()
    step = 7 if dist.get_rank() == 1 else 1
    with pytest.raises(holdfast.HoldfastError, match="rank 1 saves step 7, rank 0 step 1"):
        run.ckpt.save(step).wait(WAIT_S)
    dist.barrier()
    check_next_save(run)


def a_tensor_that_differs_between_ranks_is_refused(root: Path) -> None:
    run = Run(root)
    run.train()
    run.state["own"] = torch.zeros(3 + dist.get_rank())
    with pytest.raises(holdfast.HoldfastError, match=r"'own' is float32 \(3,\) on rank 0 but"):
        run.ckpt.save(1).wait(WAIT_S)
    del run.state["own"]
    check_next_save(run)


def a_key_of_several_kinds_is_refused(root: Path) -> None:
    """It could be saved, and not restored.  A rank may have nothing at all."""
    run = Run(root)
    run.train()
    for number, kinds in enumerate([("a tensor", "a dict"), ("a module", "a tensor")]):
        values = {"a tensor": torch.zeros(3), "a dict": {"a": torch.zeros(3)}, "a module": run.net}
        run.state["own"] = values[kinds[dist.get_rank() == 1]]
        first, other = (type(values[kind]).__name__ for kind in kinds)
        told = rf"'own' is of type {first} on rank 0 and {other} on rank 1"
        with pytest.raises(holdfast.HoldfastError, match=told):
            run.ckpt.save(1 + number).wait(WAIT_S)
    own = None if dist.get_rank() == 1 else nn.LayerNorm(2)
    holdfast.save(root / "with nothing", {"own": own}, step=1)
    holdfast.load(root / "with nothing", {"own": own})
    del run.state["own"]
    check_next_save(run)


def state_that_one_rank_cannot_save_fails_the_save_on_all(root: Path) -> None:
    """And at once: the others need not wait for a deadline.  The call on that rank raises, whatever failed
    saves are to do."""
    run = Run(root, on_error="warn")
    run.train(1)
    began = time.monotonic()
    if dist.get_rank() == 1:
        run.state["odd"] = object()
        with pytest.raises(UsageError, match=r"odd: a builtins\.object cannot be saved"):
            run.ckpt.save(1)
        save = run.ckpt._saves.untold[-1]
    else:
        save = run.ckpt.save(1)
    with pytest.raises(RankErrors) as caught:
        save.wait(WAIT_S / 3)
    assert time.monotonic() - began < WAIT_S / 2
    told = everyone(str(caught.value))
    assert told.count(told[0]) == 3
    assert "rank 1: UsageError: odd" in told[0]
    run.state.pop("odd", None)
    check_next_save(run)


def a_plan_that_fails_is_made_again(root: Path) -> None:
    """The exchange of descriptions breaks off once; later saves hold all that there is by then."""
    run = Run(root, on_error="warn")
    run.ckpt.save(1).wait(WAIT_S)  # before the first step: no optimizer state
    run.train(2)
    planner = run.ckpt._tiers.saver.planner
    original, planner.make_plan = planner.make_plan, None  # not callable: fails on every rank
    with pytest.raises(Exception, match="not callable"):
        run.ckpt.save(2).wait(WAIT_S)
    planner.make_plan = original
    run.train(1)
    copy = run.copy()
    run.ckpt.save(3).wait(WAIT_S)
    check_saved(root, 3, copy)
    run.ckpt.close()
    dist.barrier()
    assert holdfast.steps(str(root)) == [1, 3]


# -- parts that look whole ------------------------------------------------------------------------


def fsdp1(*, orig: bool, whole_units: bool = False, **options: Any) -> nn.Module:
    """Two layers without bias, cut evenly by three ranks if each is a unit: of one shape on all of them."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(9, 9, bias=False), nn.Linear(9, 9, bias=False))
    policy = ModuleWrapPolicy({nn.Linear}) if whole_units else None
    return FSDP(
        layers,
        device_id=torch.device("cpu"),
        use_orig_params=orig,
        auto_wrap_policy=policy,
        **options,
    )


class Around(nn.Module):
    """Has a model that is sharded as a part."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.parts = nn.ModuleList([inner])


def step_of(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 9)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def fsdp1_is_refused_in_every_form(root: Path) -> None:
    """Also where ranks have parts of one shape, which look like replicas."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(9, 9, bias=False), nn.Linear(9, 9, bias=False))
    holdfast.save(root / "plain", {"model": plain}, step=1)
    states: list[dict[str, Any]] = []
    for orig in (True, False):
        one = fsdp1(orig=orig, whole_units=True)
        states += [{"model": Around(one)}, {"optim": step_of(one)}, {"p": list(one.parameters())}]
        whole_in_effect = fsdp1(orig=orig, sharding_strategy=ShardingStrategy.NO_SHARD)
        states += [{"model": fsdp1(orig=orig)}, {"model": [whole_in_effect]}]
    one = fsdp1(orig=True, whole_units=True)
    states.append({"model": one})
    refused = r"(?s)LayoutError: .*FSDP1.*\n  hint: shard the model by .*fully_shard"
    for number, state in enumerate(states):
        with pytest.raises(RankErrors, match=refused):
            holdfast.save(root / "run", state, step=1)
        if "model" in state:
            before = [p.detach().clone() for p in one.parameters()]
            with pytest.raises(holdfast.HoldfastError, match="FSDP1"):
                holdfast.load(root / "plain", state)
            assert all(map(torch.equal, before, one.parameters())), number
    with FSDP.summon_full_params(one), pytest.raises(RankErrors, match=refused):
        holdfast.save(root / "run", {"model": one}, step=1)
    dist.barrier()
    assert not [*root.glob("run/steps/*/manifest.json")]


def fsdp1_is_saved_by_whole_tensors(root: Path) -> None:
    """As the hint says; they come back on all ranks."""

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fsdp1(orig=True, whole_units=True)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(seed)
        return model, step_of(model)

    def whole_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        both = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        return dict(zip(("model", "optim"), both))

    model, optimizer = build(0)
    whole = whole_of(model, optimizer)
    holdfast.save(root, whole, step=1)
    other = build(1)
    state = whole_of(*other)
    assert not torch.equal(state["model"]["0.weight"], whole["model"]["0.weight"])
    holdfast.load(root, state)
    set_state_dict(
        *other,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=StateDictOptions(full_state_dict=True),
    )
    assert all(map(torch.equal, model.parameters(), other[0].parameters()))
    for p, q in zip(model.parameters(), other[0].parameters()):
        assert torch.equal(optimizer.state[p]["exp_avg"], other[1].state[q]["exp_avg"])


def what_megatron_has_cut_is_refused_outside_its_models(root: Path) -> None:
    module = nn.Linear(4, 4)
    module.weight.tensor_model_parallel = True
    module.bias.tensor_model_parallel = False
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for state, name in (({"m": module}, "m.weight"), ({"o": optimizer}, "o.group0.0.value")):
        with pytest.raises(RankErrors, match=f"LayoutError: '{name}': .*\n  hint: hand over"):
            holdfast.save(root / "run", state, step=1)
    dist.barrier()
    assert not [*root.glob("run/steps/*/manifest.json")]


def a_sharded_tensor_is_saved_as_its_shards(root: Path) -> None:
    """Torch's own, as TorchRec has it, cut among ranks in another order; loaded whole, and as shards."""

    def sharded(order: list[int]) -> Any:
        spots = [f"rank:{rank}/cpu" for rank in order]
        return sharded_tensor.zeros(ChunkShardingSpec(0, spots), 7, 2)

    def rows(shard: Any) -> torch.Tensor:
        first = shard.metadata.shard_offsets[0]
        return torch.arange(14.0).view(7, 2)[first : first + shard.tensor.shape[0]]

    saved, other, whole = sharded([2, 0, 1]), sharded([0, 1, 2]), torch.zeros(7, 2)
    for shard in saved.local_shards():
        shard.tensor.copy_(rows(shard))
    holdfast.save(root / "run", {"d": {"x": saved}}, step=1)
    holdfast.load(root / "run", {"d": {"x": whole}})
    assert torch.equal(whole, torch.arange(14.0).view(7, 2))
    holdfast.load(root / "run", {"d": {"x": other}})
    assert all(torch.equal(shard.tensor, rows(shard)) for shard in other.local_shards())


# -- what is taken for replicated -----------------------------------------------------------------


def replicas_that_differ_are_refused_at_the_first_save(root: Path) -> None:
    """Parameters, their states, tensors of a dict, DTensors: each is named, with ranks."""
    mine = float(dist.get_rank() == 1)
    module = nn.Linear(3, 3)
    nn.init.zeros_(module.weight)
    nn.init.constant_(module.bias, mine)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.weight] = {"momentum_buffer": torch.full((3, 3), mine)}
    mesh = init_device_mesh("cpu", (3,))
    unlike = DTensor.from_local(torch.full((2,), mine), mesh, [Replicate()], run_check=False)
    state: dict[str, Any] = {"m": module, "o": optimizer, "d": {"x": torch.full((2,), mine)}}
    state["unlike"] = unlike
    for root_of, save in (("once", holdfast.save), ("kept", saver(state, on_error="raise"))):
        with pytest.raises(holdfast.HoldfastError) as caught:
            save(root / root_of, state, step=1)
        lines = str(caught.value).splitlines()
        assert "replicas of 4 tensor(s) differ" in lines[0], lines
        names = ["m.bias", "o.weight.momentum_buffer", "d.x", "unlike"]
        told = sorted(line.removesuffix(" (step 1)") for line in lines[1:5])
        assert told == sorted(f"  {name}: ranks 0 and 1" for name in names), lines
        assert 'replicas="trust"' in lines[5]
    dist.barrier()
    assert not [*root.glob("once/steps/*/manifest.json"), *root.glob("kept/steps/*/manifest.json")]
    holdfast.save(root / "trust", state, step=1, replicas="trust")
    saver(state, replicas="trust")(root / "too", state, step=1)
    dist.barrier()
    assert holdfast.steps(str(root / "trust")) == holdfast.steps(str(root / "too")) == [1]


def saver(made_for: dict[str, Any], **options: Any) -> Callable[..., None]:
    """Saves as a run does."""

    def save(root: Path, state: dict[str, Any], step: int) -> None:
        assert state is made_for
        with holdfast.Checkpointer(root, state, deadline_s=WAIT_S, **options) as ckpt:
            ckpt.save(step).wait(WAIT_S)

    return save


def replicas_are_proved_once(root: Path) -> None:
    """Each tensor in whole at the first save that has it; then only if it is asked for."""
    looked: list[str] = []
    original = replicas._digests

    def digests(wanted: Any, *args: Any, **options: Any) -> Any:
        looked.append(" ".join(sorted(wanted)))
        return original(wanted, *args, **options)

    replicas._digests = digests
    try:
        for mode, times in (("once", 1), ("trust", 0), ("verify", 4)):
            looked.clear()
            state: dict[str, Any] = {"m": nn.Linear(2, 2, bias=False), "x": torch.zeros(2)}
            nn.init.zeros_(state["m"].weight)
            with holdfast.Checkpointer(root / mode, state, replicas=mode) as ckpt:
                for step in (1, 2, 3):
                    ckpt.save(step).wait(WAIT_S)
                state["y"] = torch.zeros(2)
                ckpt.save(4).wait(WAIT_S)
            assert len(looked) == times + (mode == "once"), (mode, looked)
            assert mode != "once" or looked == ["m.weight x", "y"]
    finally:
        replicas._digests = original


def buffers_are_those_of_rank_0(root: Path) -> None:
    """Whole, however large; and a run under DDP with batch norm goes on as if it had not been ended."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        net.register_buffer("large", torch.full((600_000,), float(dist.get_rank())))
        model = nn.parallel.DistributedDataParallel(net)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        torch.manual_seed(step * 10 + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()

    model, optimizer = build()
    train(model, optimizer, 1)
    model.module.large.add_(dist.get_rank())
    own = [b.clone() for b in model.buffers()]
    assert len({tuple(b[1].tolist()) for b in everyone(own)}) == 3  # ranks have seen other data
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # DDP will send them about
        with holdfast.Checkpointer(root, {"model": model, "optim": optimizer}) as ckpt:
            ckpt.save(1).wait(WAIT_S)
    firsts = everyone(own)[0]
    other, again = build()
    train(other, again, 5)  # DDP orders gradients anew after its first step, and sums them so
    holdfast.load(root, {"model": other, "optim": again})
    assert all(map(torch.equal, other.buffers(), firsts))
    for step in (2, 3):
        train(model, optimizer, step)
        train(other, again, step)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    assert all(map(torch.equal, other.buffers(), model.buffers()))


def buffers_that_nobody_sends_are_told(root: Path) -> None:
    net = nn.Sequential(nn.BatchNorm1d(2))
    with torch.no_grad():
        net[0].running_mean += dist.get_rank()
    alone = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    for number, model in enumerate((net, alone)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with holdfast.Checkpointer(root / str(number), {"m": model}) as ckpt:
                for step in (1, 2):
                    ckpt.save(step).wait(WAIT_S)
        texts = [str(w.message) for w in told if issubclass(w.category, holdfast.HoldfastWarning)]
        assert len(texts) == (dist.get_rank() == 0), texts
        assert all("m.0.running_mean: ranks 0 and 1" in text for text in texts)
    assert (holdfast.open(str(root / "0"), step=2).read("m.0.running_mean") == 0).all()
    with pytest.raises(holdfast.HoldfastError, match=r"m\.0\.running_mean: ranks 0 and 1"):
        saver(state := {"m": net}, replicas="verify", on_error="raise")(root / "2", state, 1)


def commits_are_called_for_on_every_rank(root: Path) -> None:
    """Once each, in order, when the step is there for all to read."""
    run, told = Run(root / "run"), list[int]()

    def call(step: int) -> None:
        assert step in holdfast.steps(str(run.root))
        told.append(step)

    with run.ckpt:
        run.ckpt.on_commit(call)
        for step in (1, 2, 3):
            run.train()
            run.ckpt.save(step)
        run.ckpt.wait()
        assert told == [1, 2, 3]
        run.train()
        run.ckpt.save(4)
    assert told == [1, 2, 3, 4]


CASES = [
    snapshots_are_of_the_moment_of_the_call,
    a_write_in_the_window_fails_aloud,
    weights_that_a_forward_pass_writes_fail_no_save,
    a_write_that_is_counted_after_the_copy_fails_aloud,
    a_busy_save_is_skipped_by_all,
    a_busy_save_waits_in_the_queue,
    a_full_disk_of_one_rank_fails_the_save_on_all,
    full_disks_of_several_ranks_are_all_named,
    a_commit_that_fails_is_told_to_all,
    a_failed_save_is_a_warning_unless_asked_otherwise,
    ranks_that_save_different_steps_are_told,
    a_tensor_that_differs_between_ranks_is_refused,
    a_key_of_several_kinds_is_refused,
    state_that_one_rank_cannot_save_fails_the_save_on_all,
    a_plan_that_fails_is_made_again,
    fsdp1_is_refused_in_every_form,
    fsdp1_is_saved_by_whole_tensors,
    what_megatron_has_cut_is_refused_outside_its_models,
    a_sharded_tensor_is_saved_as_its_shards,
    replicas_that_differ_are_refused_at_the_first_save,
    replicas_are_proved_once,
    buffers_are_those_of_rank_0,
    buffers_that_nobody_sends_are_told,
    commits_are_called_for_on_every_rank,
    a_rank_that_never_saves_is_named_in_time,
]

if __name__ == "__main__":
    run_all(CASES)
