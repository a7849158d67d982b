"""What two ranks do together in `test_watching` and `test_replaying`: each function is run by every rank of
a life."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from capabilities import FSDP2_ON_CPUS
from holdfast.errors import UsageError

ENDS = 9
"""The step after which all ranks die."""
MASK = torch.arange(18).view(3, 6) % 6 > 0
"""Elements of a gradient that are zero."""


class Pair:
    """A training of two ranks; `state` has all of it."""

    reached = ENDS
    """The last step that can be replayed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        self.model: nn.Module = nn.Linear(6, 3)
        self.optim: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optim}

    def step(self, number: int) -> None:
        torch.manual_seed(100 * number + self.rank)
        self.model(torch.randn(8, 6)).square().mean().backward()
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
        if not self.skips(number):
            self.optim.step()
        self.optim.zero_grad()

    def skips(self, number: int) -> bool:
        return False

    def held(self) -> list[torch.Tensor]:
        states = [v for s in self.optim.state.values() for v in s.values()]
        return [*self.model.parameters(), *states]

    def checkpointer(self) -> holdfast.Checkpointer:
        return holdfast.Checkpointer(
            self.root,
            self.state,
            every=holdfast.Every(delta=1),
            delta=holdfast.Delta(),
            on_error="raise",
            deadline_s=120.0,
        )

    @property
    def _kept(self) -> Path:
        return self.root.parent / f"held{self.rank}.pt"

    def dies(self) -> None:
        ckpt = self.checkpointer()
        for number in range(1, ENDS + 1):
            self.step(number)
            ckpt.step(number)
            ckpt.wait()
            if number == self.reached:
                torch.save(self.held(), self._kept)
            dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    def again(self) -> None:
        with self.checkpointer() as ckpt:
            assert ckpt.restore() == self.reached
            held, expected = self.held(), torch.load(self._kept)
            assert len(held) == len(expected) and all(map(torch.equal, held, expected))


class Table(Pair):
    """A large value that one rank writes, and sends the other in a way that torch does not count."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.table = torch.zeros(3000, 200)
        self.state["bank"] = {"table": self.table}

    def step(self, number: int) -> None:
        super().step(number)
        if number in (2, 3):
            self.table.add_(1.0)
        if number >= 4:
            if self.rank == 0:
                self.table.view(-1)[5::585].add_(number)
            dist.broadcast(self.table, 0)

    def held(self) -> list[torch.Tensor]:
        return [*super().held(), self.table]


class Growing(Pair):
    """The optimizer of one rank alone gets another parameter, as of a stage of a pipeline."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.more: nn.Module = nn.Linear(3, 3)

    def grow(self) -> None:
        if self.rank == 1:
            self.state["more"] = self.more
            self.optim.add_param_group({"params": list(self.more.parameters())})

    def step(self, number: int) -> None:
        if number == 4:
            self.grow()
        if number >= 4:
            self.more(torch.ones(1, 3)).sum().backward()
        began = time.monotonic()
        super().step(number)
        assert time.monotonic() - began < 300  # nobody waits for a rank that plans alone

    def held(self) -> list[torch.Tensor]:
        return [*super().held(), *(self.more.parameters() if self.rank == 1 else ())]

    def again(self) -> None:
        self.grow()
        super().again()


class Headed(Growing):
    """The same, of which the optimizer's other parameters keep their names."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.more = nn.Sequential(self.more)


class Stages(Pair):
    """Each rank has a stage of a pipeline, and a scaler; once the gradient of one is infinite."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.model = nn.ModuleDict({"ab"[self.rank]: nn.Linear(4, 4)})
        self.optim = torch.optim.Adam(self.model.parameters(), lr=0.01, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        self.state = {"model": self.model, "optim": self.optim, "scaler": self.scaler}

    def step(self, number: int) -> None:
        torch.manual_seed(number)
        stage = self.model["ab"[self.rank]]  # type: ignore[index]
        self.scaler.scale(stage(torch.randn(2, 4)).square().sum()).backward()
        if number == 4 and self.rank == 0:
            stage.weight.grad[0, 0] = float("inf")
        self.scaler.step(self.optim)
        self.scaler.update()
        self.optim.zero_grad()


class Skipping(Pair):
    """FSDP2, each rank with its own batch; one rank alone leaves out a step of an optimizer that is not
    fused, whose record has older bytes in the places of its gradients."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        FSDP2_ON_CPUS.require()
        fully_shard(self.model)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state["optim"] = self.optim

    def step(self, number: int) -> None:
        torch.manual_seed(100 * number + self.rank)
        self.model(torch.randn(8, 6)).square().mean().backward()
        if number not in (7, 8) or self.rank == 1:
            self.optim.step()
        self.optim.zero_grad()

    def held(self) -> list[torch.Tensor]:
        return [t.to_local() if isinstance(t, DTensor) else t for t in super().held()]


class Centred(Skipping):
    """A parameter group has a tensor of which each rank holds its part: no record could have it."""

    def refused(self) -> None:
        self.optim.param_groups[0]["centre"] = [p.detach().clone() for p in self.model.parameters()]
        with self.checkpointer() as ckpt:
            self.step(1)
            with pytest.raises(
                UsageError, match=r"optim.*centre.*: a sharded tensor in a parameter"
            ):
                ckpt.step(1)


class Diverging(Pair):
    """Replicas, of which one alone leaves out steps: it was to record some of the other's gradients."""

    reached = 6

    def skips(self, number: int) -> bool:
        return self.rank == 0 and number > self.reached


class Sparse(Diverging):
    """The same, where only the elements that are not zero are recorded."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.model.register_parameter("bias", None)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state["optim"] = self.optim
        holdfast.compression.sparse(self.model.parameters(), at_most=0.2)
        self.model.weight.register_hook(lambda grad: grad.masked_fill(MASK, 0.0))


class Averaged(Pair):
    """An average of the weights, which records hold as soon as it is known that it changes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.average = nn.Linear(6, 3).requires_grad_(False)
        self.state["average"] = self.average

    def step(self, number: int) -> None:
        super().step(number)
        with torch.no_grad():
            for mean, p in zip(self.average.parameters(), self.model.parameters()):
                mean.lerp_(p, 0.5)

    def closes(self) -> None:
        """After a step of which no record could be made: of several ranks, the next one is saved."""
        for last, saves in ((2, False), (5, False), (7, True)):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always", holdfast.HoldfastWarning)
                with self.checkpointer() as ckpt:
                    for number in range(ckpt.restore() + 1, last + 1):
                        self.step(number)
                        ckpt.step(number)
                    if saves:
                        ckpt.save(last)
            texts = [str(one.message) for one in told]
            assert len(texts) == (last == 2), texts
            assert all("step 2 is in no record and no full save" in text for text in texts), texts
            dist.barrier()
        assert holdfast.steps(self.root)[-1] == 7


def saved_early(root: Path) -> None:
    """A step is saved before it is made.  All ranks are told, and one that goes on has all its steps."""
    run = Pair(root)
    with run.checkpointer() as ckpt:
        for number in range(1, ENDS + 1):
            if number == 4:
                ckpt.save(number).wait()
            run.step(number)
            if number == 4:
                with pytest.raises(UsageError, match="step 4 was saved before"):
                    ckpt.step(number)
            else:
                ckpt.step(number)
        torch.save(run.held(), run._kept)
    Pair(root).again()


def left_as_it_is(root: Path) -> None:
    """A parameter of one rank alone is in no step that was restored: all ranks save anew."""
    before = Pair(root)
    with before.checkpointer() as ckpt:
        for number in range(1, 5):
            before.step(number)
            ckpt.step(number)
    run = Headed(root)
    run.grow()
    nn.init.ones_(run.more[0].weight)  # type: ignore[index]
    with warnings.catch_warnings(), run.checkpointer() as ckpt:
        warnings.simplefilter("ignore", holdfast.HoldfastWarning)  # of the parameter
        assert ckpt.restore(strict=False) == 4
        for number in range(5, ENDS + 1):
            run.step(number)
            ckpt.step(number)
        torch.save(run.held(), run._kept)
    assert holdfast.steps(root) == [1, 5]
    Headed(root).again()


def _life(kind: Callable[[Path], Pair], how: str) -> Callable[[Path], None]:
    return lambda root: getattr(kind(root), how)()


table_dies, table_again = _life(Table, "dies"), _life(Table, "again")
growing_dies, growing_again = _life(Growing, "dies"), _life(Growing, "again")
stages_dies, stages_again = _life(Stages, "dies"), _life(Stages, "again")
skipping_dies, skipping_again = _life(Skipping, "dies"), _life(Skipping, "again")
centred_refused = _life(Centred, "refused")
diverging_dies, diverging_again = _life(Diverging, "dies"), _life(Diverging, "again")
sparse_dies, sparse_again = _life(Sparse, "dies"), _life(Sparse, "again")
averaged_closes = _life(Averaged, "closes")
