"""torch's store in etcd, with every error of etcd's client as a lost connection.

etcd's client has an error class for each lost member, election and late answer, and torch passes them on.
For a launcher they all mean the same: nobody knows whether the store has done the operation, so it must be
asked again.

A launcher keeps one store object for its whole life.  After a reconnect it gets the new client, so that
everyone who holds the store, such as torch's agent, uses the new connection.
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

from holdfast.base.errors import need

need("torch", EtcdStore, "_decode", "_encode")

_VALUE_S = 10.0
"""Seconds to wait for a value: the node that should put it may have begun a new round instead."""
_POLL_S = 0.05


class LosableEtcdStore(EtcdStore):  # type: ignore[misc]
    """The store of torch's handler `torchs`; each request runs in the context `asked`.

    It reads single keys by themselves; torch would read all keys, those of earlier runs included.
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
        """Return a value, by polling: torch's watch fails only after four times its timeout."""
        until = time.monotonic() + _VALUE_S
        while True:
            value = self._value(key)
            if value is not None:
                return value
            if time.monotonic() > until:
                raise RendezvousConnectionError(f"no node has put {key} within {_VALUE_S:g} s")
            time.sleep(_POLL_S)

    def add(self, key: str, num: int) -> int:
        with self._asked():
            return int(super().add(key, num))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Put a value if the key is absent; `expected` must be empty.  Return the value of the key."""
        if expected:
            raise NotImplementedError("compare_set() with an expected value")
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
