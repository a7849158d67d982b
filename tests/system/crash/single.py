"""One-process runs of the real Checkpointer over a store that may die, and what must hold then."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

import holdfast
import holdfast.live.roots
import holdfast.session.checkpointer
from holdfast.core.checkpoint.names import read_manifest, step_prefix
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.verifying import verify
from holdfast.store import MemoryStore, Store
from holdfast.testing import StopAfter, Stopped

WAIT_S = 120
SIZES = {"a": (700, 3), "b": (5,), "c": ()}


def state_of(value: float) -> dict[str, Any]:
    """Tensors and a number, all equal to `value`: a mixture of two saves cannot hide."""
    tensors = {name: torch.full(shape, float(value)) for name, shape in SIZES.items()}
    return {"data": {**tensors, "value": float(value)}}


def value_of(store: Store, step: int) -> float:
    """Read all of a step; the one value that everything in it has."""
    with Checkpoint.open(store.url, step) as c:
        values = {float(v) for n in SIZES for v in np.unique(c.read(f"data.{n}"))}
        values.add(c.extras["data"]["value"])
    assert len(values) == 1, f"step {step} is mixed: {values}"
    assert verify(store, step).problems == []
    return values.pop()


def contents(store: Store) -> dict[int, float]:
    """Every committed step's value, each wholly verified."""
    return {step: value_of(store, step) for step in holdfast.steps(store.url)}


def leftovers(store: Store) -> list[str]:
    """Keys below steps/ that no manifest names."""
    named = set()
    for step in holdfast.steps(store.url):
        manifest = read_manifest(store, step)
        prefix = step_prefix(step)
        named |= {prefix + "manifest.json", *(prefix + f.path for f in manifest.objects)}
    return [key for key in store.list("steps/") if key not in named]


def memory(copy_of: Store | None = None) -> MemoryStore:
    store = MemoryStore(uuid.uuid4().hex)
    for key in copy_of.list() if copy_of else ():
        store.put(key, copy_of.get(key))
    return store


def life(
    monkeypatch,
    store: Store,
    saves: list[tuple[int, float]],
    *,
    back: int | None = None,
    anew: bool = False,
    **options: Any,
) -> list[float]:
    """A run that goes on from the newest step, or from step `back`, or begins anew, and saves (step, value)
    after (step, value) until its store is dead; the values of saves that it was told are committed."""
    committed: list[float] = []
    monkeypatch.setattr(holdfast.live.roots, "open_store", lambda url: store)
    state = state_of(0)
    with suppress(Stopped):
        ckpt = holdfast.Checkpointer(store.url, state, deadline_s=WAIT_S, anew=anew, **options)
        try:
            if not anew:
                ckpt.restore(back)
            for step, value in saves:
                state["data"].update(state_of(value)["data"])
                ckpt.save(step).wait(WAIT_S)
                committed.append(value)
        finally:
            with suppress(Stopped):
                ckpt.close()
    return committed


def each_death(
    base: Store,
    live: Callable[[Store], None],
    clone: Callable[[Store], Store] = memory,
    *,
    least: int = 9,
) -> list[tuple[str, Store]]:
    """(what happened, the store that is left) for a death at every change, before and after it."""
    whole = StopAfter(clone(base), None)
    live(whole)
    found = [("to the end", whole.inner)]
    for n in range(1, len(whole.operations) + 1):
        for torn in (False, True):
            dying = StopAfter(clone(base), n, torn=torn)
            live(dying)
            found.append((f"{'after' if torn else 'before'} change {n}", dying.inner))
    assert len(found) > least, "too few operations to be the real thing"
    return found
