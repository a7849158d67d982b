"""The end of a process that may have gloo's threads."""

from __future__ import annotations

import os

from holdfast.core.group import gloo


def test_a_forked_process_is_not_taken_for_a_thread_of_gloo() -> None:
    """Python leaves the native number of the main thread as it was before the fork."""
    read, write = os.pipe()
    if not (child := os.fork()):
        mine = str(os.getpid())
        os.write(
            write, b"mine" if any(f"Pid:\t{mine}" in one for one in gloo._threads()) else b"no"
        )
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        assert told.read() == b"no"
    os.waitpid(child, 0)
