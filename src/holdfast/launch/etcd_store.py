"""torch's store in etcd, whose errors are those of a lost connection.

torch raises what etcd's client raises: it knows of each member that was lost, of each election, and of
answers that came too late, by classes of its own.  To a launcher all these are one thing: nobody knows
whether the store has done what it was asked, and it is to be asked again.

One store serves as long as its launcher.  It is given the client of a new connection, so that whoever has
got it, torch's agent for one, asks over that one, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import etcd
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

WAIT_S = 10.0
"""Seconds that a value is waited for: the node that was to put it there may have begun anew."""
PAUSE_S = 0.05


class LosableEtcdStore(EtcdStore):  # type: ignore[misc]
    """The store of a handler of torch, made of its `torchs`; `asked` is the context of each question.

    A single key is read by itself: torch reads all keys that there are, those of earlier runs included.
    """

    def __init__(
        self, torchs: EtcdStore, asked: Callable[[], AbstractContextManager[None]]
    ) -> None:
        super().__init__(torchs.client, torchs.prefix)
        self._asked = asked

    def set(self, key: str, value: bytes) -> None:
        with self._asked():
            super().set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value, looking for it: torch's watch fails only after four times its timeout."""
        until = time.monotonic() + WAIT_S
        while True:
            value = self._value(key)
            if value is not None:
                return value
            if time.monotonic() > until:
                raise RendezvousConnectionError(f"nobody has put {key} there")
            time.sleep(PAUSE_S)

    def add(self, key: str, num: int) -> int:
        with self._asked():
            return int(super().add(key, num))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Put a value where there is none, which `expected` is to say; return the one that is there."""
        if expected:
            raise NotImplementedError("compare_set() of a value that is there")
        with self._asked():
            try:
                self.client.write(self._path(key), self._encode(desired), prevExist=False)
            except etcd.EtcdAlreadyExist:
                return self.get(key)
        return desired

    def wait(self, keys: list[str], override_timeout: timedelta | None = None) -> Any:
        with self._asked():
            return super().wait(keys, override_timeout)

    def check(self, keys: list[str]) -> bool:
        return all(self._value(key) is not None for key in keys)

    def _value(self, key: str) -> bytes | None:
        with self._asked():
            try:
                return bytes(self._decode(self.client.read(self._path(key)).value))
            except etcd.EtcdKeyNotFound:
                return None

    def _path(self, key: str) -> str:
        return f"{self.prefix}{self._encode(key)}"
