"""Loaders and their samplers: the order of the data goes on, or it is told that it cannot."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import holdfast
from holdfast.core.format.extras import ORDER
from holdfast.errors import HoldfastWarning

pytest.importorskip("torchdata")
from torchdata.stateful_dataloader import StatefulDataLoader

Make = Callable[[int], Any]
SIZE = 20
pytestmark = pytest.mark.filterwarnings("ignore:Neither dataset nor iter")


class Seeded(Sampler[int]):
    """An order that follows from a seed and the number of the pass, as Accelerate's sampler has it."""

    def __init__(self, seed: int) -> None:
        self.initial_seed, self.epoch = seed, 0
        self.generator: torch.Generator | None = None

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.initial_seed + self.epoch)
        yield from torch.randperm(SIZE, generator=self.generator).tolist()
        self.epoch += 1


class Drawn(Sampler[int]):
    """An order that a generator of another kind draws, at the beginning of a pass."""

    def __init__(self, draws: Any) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        self.draws.shuffle(order)
        return iter(order)


class DrawnWithState(Drawn):
    """One whose iterators have a state."""

    def __iter__(self) -> Any:
        return Place(list(super().__iter__()))


class Place:
    """An iterator over an order, which it has in its state."""

    def __init__(self, order: list[int]) -> None:
        self.order, self.at = order, 0

    def __iter__(self) -> Place:
        return self

    def __next__(self) -> int:
        if self.at == SIZE:
            raise StopIteration
        self.at += 1
        return self.order[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]


class Counted(IterableDataset[int]):
    """A stream without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


def loader(samples: int = SIZE, batch: int = 2, **options: Any) -> Any:
    return StatefulDataLoader(list(range(samples)), batch_size=batch, **options)


def of(sampler: Any) -> Any:
    return StatefulDataLoader(list(range(SIZE)), batch_size=2, sampler=sampler)


def of_epoch(seed: int, epoch: int, replicas: int = 2) -> Any:
    sampler: Any = DistributedSampler(list(range(SIZE)), replicas, 0, seed=seed)
    sampler.set_epoch(epoch)
    return of(sampler)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def samples(batches: Any) -> list[int]:
    return [x for batch in batches for x in batch.tolist()]


def went_on(
    root: Path, make: Make, other: Make | None = None, num: int = 4, wrap: Any = None
) -> tuple[bool, str]:
    """Save after `num` batches; True if a loader of another seed goes on as this one does, for this epoch
    and the next, and what was told."""
    wrap = wrap or (lambda one: {"loader": one})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        first = make(1)
        batches = iter(first)
        for _, _batch in zip(range(num), batches):
            pass
        if num * 2 >= SIZE:
            assert not samples(batches)
        holdfast.save(root, wrap(first), step=num)
        expected = samples(batches), samples(first)
        torch.manual_seed(5)
        second = (other or make)(2)
        holdfast.load(root, wrap(second))
        seen = (samples(second) if expected[0] else [], samples(second))
    told = "".join(str(w.message) for w in caught if issubclass(w.category, HoldfastWarning))
    return seen == expected, told


GOES_ON: dict[str, Make] = {
    "shuffled": lambda _: loader(shuffle=True),
    "shuffled, own generator": lambda seed: loader(shuffle=True, generator=generator(seed)),
    "in order": lambda _: loader(),
    "seeded": lambda seed: of(Seeded(seed)),
    "seeded, in batches": lambda seed: StatefulDataLoader(
        list(range(SIZE)), batch_sampler=BatchSampler(Seeded(seed), 2, False)
    ),
    "seeded, fetched ahead": lambda seed: StatefulDataLoader(
        list(range(SIZE)), batch_size=2, sampler=Seeded(seed), num_workers=1
    ),
    "of a rank": lambda seed: of_epoch(seed, seed),
    "a stream": lambda _: StatefulDataLoader(Counted(), batch_size=2),
}


@pytest.mark.parametrize("num", [4, 9])
@pytest.mark.parametrize("name", GOES_ON)
def test_an_order_goes_on(name: str, num: int, tmp_path: Path) -> None:
    assert went_on(tmp_path, GOES_ON[name], num=num) == (True, "")


ENDED: dict[str, Make] = {
    "random": lambda seed: of(RandomSampler(range(SIZE), generator=generator(seed))),
    "subset": lambda seed: of(SubsetRandomSampler(range(SIZE), generator(seed))),
    "weighted": lambda seed: of(
        WeightedRandomSampler([1.0] * SIZE, SIZE, generator=generator(seed))
    ),
    "python's": lambda seed: of(Drawn(random.Random(seed))),
    "numpy's": lambda seed: of(Drawn(np.random.default_rng(seed))),
    "numpy's of old": lambda seed: of(Drawn(np.random.RandomState(seed))),
    "seeded": lambda seed: of(Seeded(seed)),
}


@pytest.mark.parametrize("name", ENDED)
def test_the_order_of_the_next_epoch_goes_on(name: str, tmp_path: Path) -> None:
    assert went_on(tmp_path, ENDED[name], num=10) == (True, "")


@pytest.mark.parametrize("name", ["random", "subset", "weighted"])
def test_an_order_that_no_step_can_hold_is_told(name: str, tmp_path: Path) -> None:
    _, told = went_on(tmp_path, ENDED[name])
    assert "the order of 'loader' is drawn by torch's" in told and told.endswith("[order]")


@pytest.mark.parametrize("name", ["python's", "numpy's", "numpy's of old"])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_order_that_a_sampler_draws_by_itself_is_told(
    name: str, workers: int, tmp_path: Path
) -> None:
    make = lambda seed: StatefulDataLoader(  # noqa: E731
        list(range(SIZE)), 2, sampler=ENDED[name](seed).sampler, num_workers=workers
    )
    _, told = went_on(tmp_path, make)
    assert "is drawn by a generator of its Drawn, which has no state" in told


def test_a_sampler_whose_iterator_has_a_state_is_told_nothing(tmp_path: Path) -> None:
    assert went_on(tmp_path, lambda seed: of(DrawnWithState(random.Random(seed)))) == (True, "")


OTHER: dict[str, tuple[Make, Make, str]] = {
    "grown": (lambda _: loader(shuffle=True), lambda _: loader(24, shuffle=True), "20 samples"),
    "with workers": (
        lambda _: loader(num_workers=1),
        lambda _: loader(24, num_workers=1),
        "20 samples",
    ),
    "batch": (lambda _: loader(), lambda _: loader(batch=4), "batches of 2"),
    "an incomplete batch": (
        lambda _: loader(batch=3),
        lambda _: loader(batch=3, drop_last=True),
        "batches with drop_last=False, and here it is over batches with drop_last=True",
    ),
    "shuffled": (lambda _: loader(), lambda _: loader(shuffle=True), "the order of a Seq"),
    "replicas": (lambda _: of_epoch(0, 0), lambda _: of_epoch(0, 0, 4), "2 replicas"),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_place_in_other_data_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.live.state.data_order._told", set())
    first, second, words = OTHER[name]
    _, told = went_on(tmp_path, first, second, num=2)
    assert f"'loader' in the data was saved over {words}" in told and told.endswith("[other-data]")


def test_a_loader_in_a_list_is_told_by_its_path(tmp_path: Path) -> None:
    wrap = lambda one: {"all": {"train": [one]}}  # noqa: E731
    _, told = went_on(tmp_path, lambda _: loader(), lambda _: loader(26), wrap=wrap)
    assert "'all.train[0]' in the data" in told


def test_a_last_batch_that_is_whole_is_no_news(tmp_path: Path) -> None:
    assert went_on(tmp_path, lambda _: loader(), lambda _: loader(drop_last=True)) == (True, "")


def test_data_that_grow_between_two_epochs_are_no_news(tmp_path: Path) -> None:
    assert went_on(tmp_path, lambda _: loader(), lambda _: loader(28), num=10)[1] == ""


def test_it_is_beside_the_state_which_stays_as_it_was(tmp_path: Path) -> None:
    one = loader(shuffle=True)
    next(iter(one))
    root = str(tmp_path)
    holdfast.save(root, {"loader": one}, step=1)
    with holdfast.Checkpointer(root, {"loader": one}) as ckpt:
        found = ckpt.find()
        assert found is not None and found.extras.keys() == {"loader"}
        assert found.extras["loader"]["_num_yielded"] == 1
    elsewhere: dict[str, Any] = {"loader": Told()}
    holdfast.load(root, elsewhere)
    assert elsewhere["loader"].state.keys() == one.state_dict().keys()


class Told(Dataset[int]):
    """An object that keeps what it is given: it is no loader, and takes what one has saved."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_step_without_it_is_loaded_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.live.kinds.object.add_order", lambda *_: None)
    expected, told = went_on(tmp_path, GOES_ON["shuffled"], lambda _: loader(22, shuffle=True))
    assert told == "" and not expected
    assert not any(ORDER in name for name in holdfast.open(tmp_path).extras)


def test_records_have_it(tmp_path: Path) -> None:
    def run(seed: int, num: int) -> list[int]:
        torch.manual_seed(seed)
        model, data = torch.nn.Linear(1, 1), of(Seeded(seed))
        state = {"model": model, "optim": torch.optim.SGD(model.parameters(), 0.1), "data": data}
        every = holdfast.Every(durable=100, delta=1)
        seen = []
        with holdfast.Checkpointer(tmp_path, state, every=every, delta=holdfast.Delta()) as ckpt:
            first = ckpt.restore()
            if not first:
                ckpt.save(0).wait()
            for step, batch in zip(range(first + 1, first + num + 1), data):
                model(batch.float()[:, None]).sum().backward()
                state["optim"].step()
                seen += batch.tolist()
                ckpt.step(step)
        return seen

    assert sorted(run(1, 4) + run(2, 6)) == list(range(SIZE))
