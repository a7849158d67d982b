"""torch's store in etcd, whose errors are those of a lost connection.

torch raises what etcd's client raises: it knows of each member that was lost, of each election, and of
answers that came too late, by classes of its own.  To a launcher all these are one thing: nobody knows
whether the store has done what it was asked, and it is to be asked again.

One store serves as long as its launcher.  It is given the client of a new connection, so that whoever has
got it, torch's agent for one, asks over that one, too.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

from holdfast.run.torch_rendezvous import as_lost_connection

WAIT_S = 10.0
"""Seconds that a value is waited for: the node that was to put it there may have begun anew."""
PAUSE_S = 0.05


class LosableEtcdStore(EtcdStore):  # type: ignore[misc]
    """The store of a handler of torch, made of its `torchs`."""

    def __init__(self, torchs: EtcdStore) -> None:
        super().__init__(torchs.client, torchs.prefix)

    def set(self, key: str, value: bytes) -> None:
        with as_lost_connection():
            super().set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value, looking for it: torch's watch fails only after four times its timeout."""
        until = time.monotonic() + WAIT_S
        while not self.check([key]):
            if time.monotonic() > until:
                raise RendezvousConnectionError(f"nobody has put {key} there")
            time.sleep(PAUSE_S)
        with as_lost_connection():
            return bytes(super().get(key))

    def add(self, key: str, num: int) -> int:
        with as_lost_connection():
            return int(super().add(key, num))

    def wait(self, keys: list[str], override_timeout: timedelta | None = None) -> Any:
        with as_lost_connection():
            return super().wait(keys, override_timeout)

    def check(self, keys: list[str]) -> bool:
        with as_lost_connection():
            return bool(super().check(keys))
