"""Orders of data: what a loader's own state leaves out of the order that its samples come in.

A place such as "batch 40" is a place only in the same order of the same data, in batches of the same size.
So two things are kept beside the state of each loader, and neither goes into that state:

    loader          what its state_dict() gives: the place
    loader._order   data: samples 50000, batch 32, ...     compared at a restore; a difference is told
                    kept: seed, epoch and generators       put back into the samplers at a restore

Samplers with a seed of their own (`DistributedSampler`, Accelerate's `SeedableRandomSampler`) have no
state_dict, and a process that was not seeded gives each start another seed.  A sampler that draws from a
generator has used it by the middle of an epoch, and nobody knows what it was before: it is kept between two
epochs, and in one only by those who saw it begin (the integrations do).  Else a notice tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from holdfast.base.errors import need, warn_user
from holdfast.core.format import extras
from holdfast.core.format.extras import ORDER
from holdfast.live.state.generators import GENERATOR_TYPES, generator_state, set_generator_state

if TYPE_CHECKING:
    from holdfast.live.state.named import Collected

need("torch", DataLoader, "_get_iterator")

MOST_SAMPLERS = 10
"""Samplers inside of each other that are looked into."""
SEEDS = ("seed", "initial_seed", "epoch")
"""Attributes of samplers from which an order follows."""
AT_RANDOM = {s.__iter__ for s in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)}
"""The ways of torch's samplers to give an order that is drawn anew, and is in no state."""

SamplerOrder = dict[str, Any]
"""Seeds and states of generators of a loader's samplers: `{"seeds": [...], "generators": [...]}`."""
DataUnits = dict[str, Any]
"""The units that a place in data is counted in: samples, batch, drop_last, replicas, order; those that are
known, and matter."""

_told: set[str] = set()
_told_of: WeakSet[Any] = WeakSet()


# -- samplers ---------------------------------------------------------------------------------------


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a loader, each of which asks the next."""
    found: list[Any] = []
    holder = loader
    while len(found) < MOST_SAMPLERS:
        inner = getattr(holder, "batch_sampler", None)
        holder = getattr(holder, "sampler", None) if inner is None else inner
        if holder is None:
            break
        found.append(holder)
    return found


def order_of(loader: Any, shared: Any = None, *, amid: bool = False) -> SamplerOrder:
    """Return what an order follows from: seeds and epochs of samplers, and the states of generators.

    `shared`: a generator that ranks share, which comes first.  `amid`: in the middle of an epoch, where
    a sampler may have counted on already.
    """
    seeds = [_seeds_of(holder, amid=amid) for holder in _seeded(loader)]
    return {
        "seeds": seeds,
        "generators": [generator_state(one) for one in _generators(loader, shared)],
    }


def put_order(loader: Any, order: Any, shared: Any = None) -> None:
    """Put back what `order_of` gave.  A step of an older release has generators alone, in a list or as one
    tensor, or None."""
    if not isinstance(order, Mapping):
        states = [] if order is None else [order] if isinstance(order, torch.Tensor) else order
        order = {"seeds": (), "generators": states}
    for holder, seeds in zip(_seeded(loader), order["seeds"]):
        for name in vars(holder).keys() & seeds.keys():
            setattr(holder, name, seeds[name])
    for generator, state in zip(_generators(loader, shared), order["generators"]):
        set_generator_state(generator, state)


def put_order_later(loader: Any, order: SamplerOrder, *, amid: bool) -> None:
    """Put seeds back, and the generators once a loader has gone to its place, which draws from them: at an
    end it goes through the whole epoch, also by the default generator, and no other run does that."""
    put_seeds(loader, order)
    make = getattr(loader, "_get_iterator", None)
    if make is None or not isinstance(loader, DataLoader) or "base_dataloader" in vars(loader):
        if not amid:  # else its own state tells
            put_order(loader, order)
        return

    def made() -> Any:
        if vars(loader).get("_get_iterator") is made:
            del loader._get_iterator
        before = torch.get_rng_state()
        iterator = make()
        put_order(loader, {**order, "seeds": ()})
        if getattr(iterator, "_finished", False):
            torch.set_rng_state(before)
        return iterator

    loader._get_iterator = made


def put_seeds(loader: Any, order: SamplerOrder) -> None:
    """Put back the seeds of an order, and not its generators: these may be another rank's."""
    put_order(loader, {**order, "generators": ()})


def _seeded(loader: Any) -> list[Any]:
    """Return the samplers, and a stream of data, that have a seed or an epoch of their own."""
    holders = [one for one in samplers_of(loader) if isinstance(one, Sampler)]
    return [one for one in (*holders, *_streams(loader)) if _seeds_of(one)]


def _seeds_of(holder: Any, *, amid: bool = False) -> dict[str, int]:
    own = vars(holder) if hasattr(holder, "__dict__") else {}
    found = {name: own[name] for name in SEEDS if type(own.get(name)) is int}
    generator = own.get("generator")
    if amid and {"initial_seed", "epoch"} <= found.keys() and generator is not None:
        # Accelerate's counts its epoch on when its last sample is fetched, ahead of the training
        found["epoch"] = generator.initial_seed() - found["initial_seed"]
    return found


def _streams(loader: Any) -> list[Any]:
    dataset = getattr(loader, "dataset", None)
    return [dataset] if isinstance(dataset, IterableDataset) else []


def _generators(loader: Any, shared: Any) -> list[Any]:
    """Return the generators that a loader, its samplers and a stream of data draw from, but for the default
    one: that which ranks share comes first."""
    holders = [loader, *samplers_of(loader), *_streams(loader)]
    found = [shared, *(getattr(holder, "generator", None) for holder in holders)]
    for holder in holders[1:]:
        found += getattr(holder, "__dict__", {}).values()
    return list({id(one): one for one in found if isinstance(one, GENERATOR_TYPES)}.values())


# -- data -------------------------------------------------------------------------------------------


def data_of(loader: Any) -> DataUnits:
    """Return what a loader's place is counted in; empty if it does not say over which data it goes."""
    samplers = samplers_of(loader)
    found: DataUnits = {"samples": _length(getattr(loader, "dataset", None))}
    if found["samples"] is None:
        return {}
    found["batch"] = _first([loader, *samplers], "batch_size")
    if found["batch"] is None or (_length([loader.dataset, *samplers][-1]) or 0) % found["batch"]:
        found["drop_last"] = _first([*samplers, loader], "drop_last", of=bool)
    whole = any(getattr(one, "split_batches", False) for one in samplers)
    found["replicas"] = None if whole else _first(samplers, "num_replicas", "num_processes")
    if samplers:
        shuffles = getattr(samplers[-1], "shuffle", True) is not False
        found["order"] = type(samplers[-1]).__name__ + ("" if shuffles else " that shuffles not")
    return {name: value for name, value in found.items() if value is not None}


def _length(dataset: Any) -> int | None:
    with suppress(Exception):  # a stream has none, or counts it from what is not there yet
        return len(dataset)
    return None


def _first(holders: list[Any], *names: str, of: type = int) -> Any:
    """The first attribute of these names that is of a type, or None."""
    values = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in values if type(value) is of), None)


_WORDS = {
    "samples": "{} samples",
    "batch": "batches of {}",
    "drop_last": "batches with drop_last={}",
    "global_batch": "batches of {} over all ranks",
    "update": "{} samples for an update",
    "replicas": "{} replicas",
    "order": "the order of a {}",
}


def tell_other_data(name: str, saved: DataUnits, live: DataUnits) -> None:
    """Tell, once, of a place in an epoch that was counted over other data or in other batches."""
    both = [word for word in _WORDS if word in saved and word in live]
    other = [word for word in both if saved[word] != live[word]]
    if not other:
        return
    was, here = (
        ", ".join(_WORDS[word].format(data[word]) for word in other) for data in (saved, live)
    )
    text = (
        f"the place of {name!r} in the data was saved over {was}, and here it is over {here}: up to "
        "the end of the epoch samples may come twice or never; restore with the data and batches of the "
        "step, or begin a new epoch"
    )
    if text not in _told:
        _told.add(text)
        warn_user(text, notice="other-data")


# -- beside a loader's state ------------------------------------------------------------------------


def add_loader_order(live: Collected, name: str, loader: Any, saved: Any, rule: str | None) -> None:
    """Add what is kept beside the state of a loader, which `saved` is; nothing if it has no data to tell
    of.  `rule`: of that state, when the number of ranks changes."""
    amid = _is_amid(saved)
    data, kept = data_of(loader), order_of(loader, amid=amid)
    if not data and not any(kept.values()):
        return
    if amid:
        _tell_of_order(name, loader, saved)
    if rule == "redistribute":  # it deals out what is left of the same data
        data = {word: value for word, value in data.items() if word == "samples"}
    full = f"{name}.{ORDER}"
    live.rules[full] = "rank0" if rule in ("same", "rank0") else "fresh"
    live.extras[full] = extras.encode({"amid": amid, "data": data, "kept": kept}, _inline, full)


def _inline(value: Any, path: str) -> Any:
    from holdfast.live.state.encoding import inline_tensor

    return inline_tensor(value)


def _is_amid(saved: Any) -> bool:
    """True unless the state is that of a beginning or of an end, which torchdata's loaders tell."""
    if not isinstance(saved, Mapping):
        return True
    if saved.get("_iterator_finished") is True:
        return False
    snapshot = saved.get("_snapshot")
    if isinstance(snapshot, Mapping):  # several workers
        return bool(snapshot.get("_snapshot_step", 1) or saved.get("_steps_since_snapshot", 1))
    return saved.get("_num_yielded", 1) != 0


def _tell_of_order(name: str, loader: Any, saved: Any) -> None:
    """Tell, once for a loader, that its order is drawn by a sampler of which there is no state."""
    if not isinstance(loader, DataLoader) or loader in _told_of:
        return
    for one in samplers_of(loader):
        kind = type(one)
        is_torchs = kind.__iter__ in AT_RANDOM
        if is_torchs or (_draws_by_itself(one) and not _has_state_of_samplers(saved)):
            _told_of.add(loader)
            whose = (
                f"torch's {kind.__name__}" if is_torchs else f"a generator of its {kind.__name__}"
            )
            warn_user(
                f"the order of {name!r} is drawn by {whose}, which has no state: a "
                "restart amid an epoch goes on in another order; use StatefulDataLoader(shuffle=True) or a "
                "sampler that has a state_dict, or a seed and an epoch, or save at the ends of epochs",
                notice="order",
            )
            return


def _draws_by_itself(sampler: Any) -> bool:
    """True for a sampler of the script's own whose generator goes on from epoch to epoch: one with an epoch
    seeds it for each."""
    if type(sampler).__module__.partition(".")[0] in ("torch", "torchdata"):
        return False
    own = getattr(sampler, "__dict__", {})
    return any(isinstance(one, GENERATOR_TYPES) for one in own.values()) and not (
        "epoch" in own or hasattr(sampler, "state_dict")
    )


def _has_state_of_samplers(saved: Any) -> bool:
    """True if the state of a loader of torchdata's has one of a sampler's own iterator."""
    if not isinstance(saved, Mapping):
        return False
    # the first with several workers
    at = (saved.get("_snapshot") or {}).get("_main_snapshot") or saved
    own = at.get("_sampler_iter_state")
    # of batches of torchdata's, around it
    if isinstance(own, Mapping) and "samples_yielded" in own:
        own = own.get("sampler_iter_state")
    return own is not None
