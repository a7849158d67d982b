"""Accelerate's loaders: the order of their data, the unit of a place in it, and the seeds of workers.

A loader draws a seed for its workers when it starts them.  Persistent workers start once, at the first pass
of a process.  A restarted process starts them at a later pass: one draw more than the uninterrupted run, so
that every later dropout mask would differ.  So that pass begins without the draw:

    uninterrupted    pass 0: seed, order        pass 1:       order        pass 2:       order
    restarted        pass 0: seed, order  -->   pass 1: (own) order        pass 2:       order

The seed then comes from a copy of the generator.  Draws inside the workers are not repeated.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader

from holdfast import errors
from holdfast.extend import data_of, order_of, put_order, tell_other_data

errors.need("torch", DataLoader, "_get_iterator", "_iterator")


def order_kept(loader: Any) -> dict[str, Any]:
    """Return the values that determine a loader's order: seeds of samplers, and states of generators."""
    return order_of(loader.base_dataloader, getattr(loader, "synchronized_generator", None))


def put_order_kept(loader: Any, order: Any) -> None:
    """Put back the result of `order_kept`."""
    put_order(loader.base_dataloader, order, getattr(loader, "synchronized_generator", None))


def data_in(loader: Any) -> dict[str, Any]:
    """Return the units of a place in a prepared loader, over all processes."""
    found = data_of(loader)
    with suppress(Exception):  # not every batch sampler has a size
        found["global_batch"] = loader.total_batch_size
        found.pop("batch", None)
        found.pop("replicas", None)
    return found


def tell_of_data(
    loaders: list[Any], saved: Collection[dict[str, Any]], amid: Collection[int]
) -> None:
    """Warn of loaders whose place in the middle of an epoch was saved with other data, or other batches
    over all processes.  A stateful loader is part of the state, which warns itself."""
    for number, (loader, data) in enumerate(zip(loaders, saved)):
        if number in amid and not getattr(loader, "use_stateful_dataloader", False):
            name = "loader" if number == 0 else f"loader_{number}"
            tell_other_data(name, data, data_in(loader))


class PersistentWorkers:
    """The loaders that have persistent workers, or would have without the interruption."""

    def __init__(self, accelerator: Any) -> None:
        self._of = accelerator
        self._were_there: set[int] = set()
        """Numbers of the loaders that had workers when the restored step was saved."""

    def numbers(self) -> list[int]:
        """Return the numbers of these loaders."""
        loaders = enumerate(self._of._dataloaders)
        have = {number for number, d in loaders if _has_workers(d.base_dataloader)}
        return sorted(have | self._were_there)

    def put(self, numbers: Collection[int]) -> None:
        self._were_there = set(numbers)

    def are_there_for(self, loader: Any) -> bool:
        """Tell whether a loader begins a pass with the workers of an earlier pass, or would have."""
        return _has_workers(loader.base_dataloader) or any(
            d is loader and number in self._were_there
            for number, d in enumerate(self._of._dataloaders)
        )


def _has_workers(base: Any) -> bool:
    keeps = base.num_workers > 0 and base.persistent_workers
    return bool(keeps and getattr(base, "_iterator", None) is not None)


def begin_without_a_draw(base: Any) -> None:
    """Have the next iterator of a loader draw the seed of its workers from a copy of the generator."""
    make = getattr(base, "_get_iterator", None)
    if make is None or base.num_workers == 0 or _has_workers(base):
        return

    def made() -> Any:
        vars(base).pop("_get_iterator", None)
        own = base.generator
        base.generator = torch.Generator()
        base.generator.set_state((own or torch.default_generator).get_state())
        try:
            return make()
        finally:
            base.generator = own

    base._get_iterator = made
