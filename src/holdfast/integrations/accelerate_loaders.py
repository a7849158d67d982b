"""Accelerate's loaders: the order of their data, what a place in it is counted in, and workers' seeds.

A loader draws a seed for its workers when it makes them.  Persistent workers are made once, at the first
pass of a process, and a process that goes on with a later pass makes them there: one draw more than the run
that was not interrupted, after which each dropout mask is another one.  So that pass begins without it:

    uninterrupted    pass 0: seed, order        pass 1:       order        pass 2:       order
    restarted        pass 0: seed, order  -->   pass 1: (own) order        pass 2:       order

The seed then comes from a copy of the generator.  What workers draw themselves is not repeated.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch

from holdfast.extend import data_of, order_of, put_order, tell_other_data


def order_kept(loader: Any) -> dict[str, Any]:
    """Return what a loader's order follows from: seeds of its samplers, and states of generators."""
    return order_of(loader.base_dataloader, getattr(loader, "synchronized_generator", None))


def put_order_kept(loader: Any, order: Any) -> None:
    """Put that back."""
    put_order(loader.base_dataloader, order, getattr(loader, "synchronized_generator", None))


def data_in(loader: Any) -> dict[str, Any]:
    """Return what a place in a prepared loader is counted in, over all processes."""
    found = data_of(loader)
    with suppress(Exception):  # not every batch sampler has a size
        found["global_batch"] = loader.total_batch_size
        found.pop("batch", None)
        found.pop("replicas", None)
    return found


def tell_of_data(
    loaders: list[Any], saved: Collection[dict[str, Any]], amid: Collection[int]
) -> None:
    """Tell of loaders whose place, in the middle of an epoch, was saved over other data, or in other
    batches over all processes.  A stateful one is in the state, and told of there."""
    for number, (loader, data) in enumerate(zip(loaders, saved)):
        if number in amid and not getattr(loader, "use_stateful_dataloader", False):
            name = "loader" if number == 0 else f"loader_{number}"
            tell_other_data(name, data, data_in(loader))


class PersistentWorkers:
    """The loaders that have persistent workers, or would have if the run had not been interrupted."""

    def __init__(self, accelerator: Any) -> None:
        self._of = accelerator
        self._were_there: set[int] = set()
        """Numbers of those that had them when the restored step was saved."""

    def numbers(self) -> list[int]:
        """Return the numbers of these loaders."""
        loaders = enumerate(self._of._dataloaders)
        have = {number for number, d in loaders if _has_workers(d.base_dataloader)}
        return sorted(have | self._were_there)

    def put(self, numbers: Collection[int]) -> None:
        self._were_there = set(numbers)

    def are_there_for(self, loader: Any) -> bool:
        """True if a loader begins a pass with the workers of an earlier one, or would have."""
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
