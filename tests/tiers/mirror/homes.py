"""Runs of one rank with two homes, each a store that the test holds."""

from __future__ import annotations

import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

import holdfast
import holdfast.live.roots
from holdfast.store import MemoryStore, Store
from system.crash.single import WAIT_S, state_of


def store_like(one: Store | None = None) -> MemoryStore:
    """A store in memory, with what another one has."""
    store = MemoryStore(uuid.uuid4().hex)
    for key in one.list() if one else ():
        store.put(key, one.get(key))
    return store


@dataclass
class Homes:
    """A root and the home behind it; `open_store` gives them by their URLs, wrapped or not."""

    root: Store = field(default_factory=store_like)
    behind: Store = field(default_factory=store_like)
    told: list[str] = field(default_factory=list)
    """Warnings of the runs."""

    def open(self, url: str) -> Store:
        return next(store for store in (self.root, self.behind) if store.url == url)

    @contextmanager
    def run(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Run]:
        """A run; at its end what is pending is uploaded."""
        monkeypatch.setattr(holdfast.live.roots, "open_store", self.open)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = state_of(0)
            upload = options.pop("upload", self.behind.url)
            with holdfast.Checkpointer(
                self.root.url, state, upload=upload, deadline_s=WAIT_S, **options
            ) as ckpt:
                yield Run(ckpt, state)
        self.told += [str(w.message) for w in caught]


@dataclass
class Run:
    """A run under way."""

    ckpt: holdfast.Checkpointer
    state: dict[str, Any]

    def save(self, step: int, value: float | None = None) -> holdfast.Save:
        """Save a step all of whose values are its number, or `value`."""
        self.state["data"].update(state_of(step if value is None else value)["data"])
        save = self.ckpt.save(step)
        save.wait(WAIT_S)
        return save

    def save_and_upload(self, step: int, value: float | None = None) -> None:
        save = self.save(step, value)
        until(lambda: save.uploaded)

    @property
    def value(self) -> float:
        """The value that the live state has."""
        return float(self.state["data"]["value"])


def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so that other threads do."""
    waited = threading.Event()
    for _ in range(int(WAIT_S * 100)):
        if is_so():
            return
        waited.wait(0.01)
    raise AssertionError("it never came")
