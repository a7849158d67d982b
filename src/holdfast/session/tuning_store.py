"""`tuning.json` in a root: the failures and costs that its runs have seen, and their frequencies.

A process may be killed at any instruction, so failures are written at once, and the trained time again and
again.  Rank 0 writes, on a thread of its own, because storage may be slow.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from statistics import median

import msgspec

from holdfast.base.calls import result_of
from holdfast.base.errors import HoldfastError
from holdfast.base.events import emit
from holdfast.base.threads import Worker
from holdfast.base.wire import decode_json
from holdfast.core.store import Store, get_small

HISTORY_KEY = "tuning.json"
RECENT = 8
CLOSE_S = 10.0
"""Seconds that the last write may take."""


class TuningState(msgspec.Struct, frozen=True):
    """The content of `tuning.json`, over all runs of a root."""

    trained_s: float = 0.0
    process: int = 0
    """Number of failures that left the memory of all nodes intact."""
    node: int = 0
    """Number of failures that took the memory of a node along."""
    failed: bool = False
    """The newest run has ended by an error that is not counted yet."""
    lost_of: str = ""
    """The snapshot in memory whose loss was counted last."""
    tiers: tuple[str, ...] = ()
    frequencies: tuple[int | None, int | None, int | None, int | None] = (None,) * 4
    """Frequencies in force, for `tiers`: steps between durable saves, snapshots, records; then records
    per file."""
    costs: dict[str, float] = {}
    """Costs in seconds, by their names in `policy.wasted.Costs`."""


class TuningStore:
    """Reads and writes `tuning.json`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pool = Worker("holdfast-tuning")
        self._last: Future[None] | None = None
        self._took_s: deque[float] = deque(maxlen=RECENT)

    @property
    def put_s(self) -> float | None:
        """Median seconds of the last writes; None before the first."""
        took = list(self._took_s)  # the writing thread appends to it
        return median(took) if took else None

    def read(self) -> TuningState:
        """Return the stored state; an empty `TuningState` if it cannot be read."""
        with suppress(HoldfastError, msgspec.DecodeError):
            return decode_json(get_small(self._store, HISTORY_KEY), TuningState)
        return TuningState()

    @property
    def busy(self) -> bool:
        """True if the last write is still under way."""
        return self._last is not None and not self._last.done()

    def write(self, kept: TuningState) -> None:
        """Begin to write the state; return at once."""
        self._last = self._pool.submit(self._put, kept)

    def _put(self, kept: TuningState) -> None:
        began = time.perf_counter()
        try:
            self._store.put(HISTORY_KEY, msgspec.json.encode(kept))
            self._took_s.append(time.perf_counter() - began)
        except HoldfastError as error:
            emit("tuning.not_kept", error=str(error))

    def close(self) -> None:
        """Wait for the last write, `CLOSE_S` at most, and end the thread."""
        if self._last is not None:
            with suppress(TimeoutError):
                result_of(self._last, CLOSE_S, TimeoutError)
        self._pool.shutdown()
