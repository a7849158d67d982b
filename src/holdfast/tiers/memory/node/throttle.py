"""A cap on bytes per second, for work that nobody waits for."""

from __future__ import annotations

import threading
import time
from collections import Counter


class Throttle:
    """Lets `bytes_per_s` bytes through, in the long run; 0: as many as come.  Thread-safe."""

    def __init__(self, bytes_per_s: int) -> None:
        self.let: Counter[str] = Counter()
        """Bytes that were let through, by kind of work."""
        self._rate = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, size: int, kind: str = "") -> None:
        """Wait until `size` bytes may be moved, and count them."""
        with self._lock:
            now = time.monotonic()
            start = max(self._free_at, now)
            if self._rate:
                self._free_at = start + size / self._rate
        time.sleep(max(start - now, 0.0))
        with self._lock:
            self.let[kind] += size
