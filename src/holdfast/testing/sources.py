"""A test suite for a `Framework`: does it state correctly where its values are?

    class TestMyFramework(SourceTests):
        @pytest.fixture
        def build(self) -> Build:
            def run(seed: int) -> Training:
                model, optimizer = ...                       # other seeds give other weights
                def train() -> None: ...                     # one step; the same in equal runs
                return Training({"model": model, "optim": optimizer}, train)
            return run

The tests save and restore on one rank, and compare bit for bit.  They need pytest only for the fixture.
The behaviour on several ranks (pieces that make up a weight, a collective `refresh`) needs a separate test
under torchrun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.layout import Box, tiles
from holdfast.formats.looking import open as open_checkpoint
from holdfast.live.collecting import collect
from holdfast.live.sources import Group, Source
from holdfast.live.state.recognising import is_optimizer, sources_in, stages
from holdfast.session.checkpointer import Checkpointer
from holdfast.session.save_and_load import load, save

SavedBytes = dict[str, list[tuple[Box, bytes]]]
"""A rank's boxes of each saved tensor and their bytes, by name."""


@dataclass(frozen=True)
class Training:
    """A training run of the framework."""

    state: dict[str, Any]
    """The state that a user hands to `Checkpointer`: modules and optimizers of the framework."""
    train: Callable[[], object]
    """Does one step; with equal weights and states, the same step."""


Build = Callable[[int], Training]
"""Makes a fresh run from a seed."""


class SourceTests:
    """Subclass it with a fixture `build` that makes a fresh `Training` from a seed.  Also needs
    `tmp_path`."""

    # the statements of a source

    def test_a_source_tells_of_every_optimizer(self, build: Build) -> None:
        state = build(0).state
        assert list(sources_of(state)), "no registered framework tells of a module or optimizer"
        for optimizer in optimizers_in(state):
            groups = sources_in(state).of(optimizer).groups(optimizer)
            assert any(params for _, params in groups), "an optimizer without parameters"
            assert all(isinstance(group, dict) for group, _ in groups)

    def test_parts_are_views_that_make_up_the_weight(self, build: Build) -> None:
        run = build(0)
        run.train()
        for source, p in weights_in(run.state):
            master = source.master(p)
            if master is None or master.cut is None:
                continue
            if master.shape is None:
                raise AssertionError("a master with a cut must tell the shape of the weight")
            memory = master.tensor.untyped_storage().data_ptr()
            boxes = []
            for box, part in master.cut(master.tensor.detach()):
                assert part.shape == box.shape
                assert part.untyped_storage().data_ptr() == memory, "a part must be a view"
                boxes.append(box)
            assert master.is_padded or tiles(boxes, master.shape), f"{boxes} in {master.shape}"

    def test_states_lie_as_their_masters(self, build: Build) -> None:
        run = build(0)
        run.train()
        found = 0
        for source, p in weights_in(run.state):
            master = source.master(p)
            if master is not None and master.optimizer is not None:
                states = master.optimizer.state.get(master.tensor, {})
                tensors = [v for v in states.values() if isinstance(v, torch.Tensor) and v.ndim]
                assert all(v.shape == master.tensor.shape for v in tensors)
                found += len(states)
        assert found, "after a step the optimizers of masters have states"

    def test_weights_follow_from_their_masters(self, build: Build) -> None:
        run = build(0)
        run.train()
        before = weights_of(run)
        for source in sources_of(run.state):
            source.refresh()
        assert weights_of(run) == before

    def test_poison_leaves_nothing_that_trains(self, build: Build) -> None:
        run = build(0)
        for source in sources_of(run.state):
            source.poison()
        weights = [p for _, p in weights_in(run.state) if p.is_floating_point()]
        assert all(bool(torch.isnan(p).all()) for p in weights)

    # what is saved and restored

    def test_what_is_saved_is_what_there_is(self, build: Build, tmp_path: Path) -> None:
        run = build(0)
        run.train()
        save(tmp_path, run.state, step=1)
        with open_checkpoint(tmp_path) as checkpoint:
            assert in_file(checkpoint, values_of(run)) == values_of(run)

    def test_each_step_is_saved_as_it_was(self, build: Build, tmp_path: Path) -> None:
        """Copies are made while training goes on: saved values may change only in the step of a torch
        optimizer, or the source must call them unsteady."""
        run, taken = build(0), {}
        with Checkpointer(tmp_path, run.state, every=1, when_busy="queue") as ckpt:
            for step in range(1, 6):
                run.train()
                taken[step] = values_of(run)
                ckpt.step(step)
        for step, values in taken.items():
            with open_checkpoint(tmp_path, step=step) as checkpoint:
                assert in_file(checkpoint, values) == values

    def test_a_fresh_run_goes_on_as_the_saved_one(self, build: Build, tmp_path: Path) -> None:
        saved, other = build(0), build(1)
        assert values_of(saved) != values_of(other), "another seed must give other weights"
        self._go_on(saved, other, tmp_path)

    def test_a_trained_run_goes_on_as_the_saved_one(self, build: Build, tmp_path: Path) -> None:
        other = build(1)
        other.train()
        self._go_on(build(0), other, tmp_path)

    def test_a_run_without_states_goes_on_as_it_was(self, build: Build, tmp_path: Path) -> None:
        saved, other = build(0), build(1)
        save(tmp_path, saved.state, step=0)
        other.train()
        load(tmp_path, other.state)
        for run in (saved, other):
            run.train()
        assert values_of(other) == values_of(saved)

    def test_a_checkpointer_saves_and_restores(self, build: Build, tmp_path: Path) -> None:
        saved, other = build(0), build(1)
        with Checkpointer(tmp_path, saved.state, every=2, when_busy="queue") as ckpt:
            for step in (1, 2, 3):
                saved.train()
                ckpt.step(step)
        with Checkpointer(tmp_path, other.state, every=2) as ckpt:
            assert ckpt.restore() == 2
        other.train()
        assert values_of(other) == values_of(saved)

    @staticmethod
    def _go_on(saved: Training, other: Training, root: Path) -> None:
        for _ in range(2):
            saved.train()
        save(root, saved.state, step=2)
        at_save = values_of(saved), weights_of(saved), extras_of(saved)
        load(root, other.state)
        assert (values_of(other), weights_of(other), extras_of(other)) == at_save
        for run in (saved, other):
            run.train()
        assert values_of(other) == values_of(saved)
        assert weights_of(other) == weights_of(saved)
        assert extras_of(other) == extras_of(saved)


# -- values of a run ------------------------------------------------------------------------------


def sources_of(state: dict[str, Any]) -> list[Source]:
    """Return the sources of frameworks in a state."""
    return sources_in(state).of_frameworks()


def optimizers_in(state: dict[str, Any]) -> list[Any]:
    """Return the optimizers of a state."""
    return [value for value in state.values() if is_optimizer(value)]


def weights_in(state: dict[str, Any]) -> Iterator[tuple[Source, torch.Tensor]]:
    """Yield every parameter of a framework's optimizers, with its source."""
    sources = sources_in(state)
    for optimizer in optimizers_in(state):
        source = sources.of(optimizer)
        groups: list[Group] = source.groups(optimizer) if not source.saves_rest else []
        yield from ((source, p) for _, params in groups for p in params)


def values_of(run: Training) -> SavedBytes:
    """Return all tensors that a save would write now."""
    live = collect(run.state)
    return {
        name: [(part.box, bytes_of(part.local)) for part in tensor.parts]
        for name, tensor in live.tensors.items()
    }


def extras_of(run: Training) -> dict[str, Any]:
    """Return all plain values that a save would write now."""
    return collect(run.state).extras


def weights_of(run: Training) -> dict[str, bytes]:
    """Return the weights with which the models compute."""
    return {
        f"{key}.{number}.{name}": bytes_of(p)
        for key, value in run.state.items()
        for number, module in enumerate(stages(value) or ())
        for name, p in module.named_parameters()
    }


def in_file(checkpoint: Checkpoint, values: SavedBytes) -> SavedBytes:
    """Return the same boxes, read from a checkpoint."""
    return {
        name: [(box, checkpoint.read(name, box).tobytes()) for box, _ in parts]
        for name, parts in values.items()
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes, in row-major order."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().data)
