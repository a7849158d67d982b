"""Nothing that a launch has started outlives it."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from system.distributed import launch

ENDS_BEFORE_ITS_RANK = """
import os, signal, sys
if not os.fork():  # what forks ranks
    if not os.fork():
        if sys.argv[2] == "real":
            os.setsid()
        signal.signal(signal.SIGABRT, signal.SIG_IGN)
        os.write(int(sys.argv[1]), b"1")
    while True:
        signal.pause()
os.wait()
"""


@pytest.mark.parametrize("torchrun", ["forked", "real"])
def test_a_rank_that_does_not_heed_is_killed_though_torchrun_has_ended(torchrun: str) -> None:
    lives, held = os.pipe()
    command = [sys.executable, "-c", ENDS_BEFORE_ITS_RANK, str(held), torchrun]
    started = subprocess.Popen(command, pass_fds=[held], start_new_session=True)
    os.close(held)
    assert os.read(lives, 1) == b"1"
    launch._end(started)
    assert select.select([lives], [], [], 60.0)[0] and os.read(lives, 1) == b""
    os.close(lives)
