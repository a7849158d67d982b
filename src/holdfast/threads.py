"""Work side by side in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_threads(work: Callable[[Any], None], items: list[Any], threads: int) -> None:
    """Call `work` for every item from several threads; the first error stops the rest."""
    if threads == 1 or len(items) < 2:
        for item in items:
            work(item)
        return
    todo = iter(items)
    lock = threading.Lock()
    stop = threading.Event()

    def drain() -> None:
        while not stop.is_set():
            with lock:
                item = next(todo, None)
            if item is None:
                return
            try:
                work(item)
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(threads, "holdfast-io") as pool:
        futures = [pool.submit(drain) for _ in range(min(threads, len(items)))]
    for future in futures:
        future.result()
