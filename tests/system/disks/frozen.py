"""A file system that answers no more, as this process sees it: calls do not return until it thaws.

    with Frozen(root) as disk:       # from here on whoever touches what is below `root` waits
        ...
        disk.thaw()

What is frozen is the operating system's side of `os`; all of holdfast is as it is.  Real frozen file
systems are in `test_real_disks`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

CHANGES = ("link", "replace", "unlink", "mkdir", "rmdir", "pwrite", "fsync", "ftruncate", "open")
"""What a file system that is frozen (`fsfreeze -f`) does not do; it may still be read."""
READS = ("scandir", "preadv", "stat")
"""What hangs as well when the server of a file system does not answer."""


class Frozen:
    """Calls on what lies below `root` wait; by path, or by the descriptor of an open file."""

    def __init__(self, root: Path, *, reads: bool = False) -> None:
        self.root = os.path.abspath(root)
        self.names = CHANGES + (READS if reads else ())
        self.num_waiting = 0
        self._thawed = threading.Event()
        self._patches: list[Any] = []

    def __enter__(self) -> Frozen:
        for name in self.names:
            patch = mock.patch.object(os, name, self._waiting(getattr(os, name), name))
            patch.start()
            self._patches.append(patch)
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()
        for patch in self._patches:
            patch.stop()

    def thaw(self) -> None:
        """All that waits goes on."""
        self._thawed.set()

    def _waiting(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def waiting(what: Any = ".", *args: Any, **kwargs: Any) -> Any:
            reads = name == "open" and not args[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            at = kwargs.get("dir_fd")
            if self._is_below(what if at is None else at) and not (
                reads and "preadv" not in self.names
            ):
                self.num_waiting += 1
                self._thawed.wait()
            return call(what, *args, **kwargs)

        return waiting

    def _is_below(self, what: Any) -> bool:
        if isinstance(what, int):
            what = os.readlink(f"/proc/self/fd/{what}")
        return os.path.abspath(os.fspath(what)).startswith(self.root)
