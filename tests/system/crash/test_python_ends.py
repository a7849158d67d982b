"""A process that did all its work ends with 0: torch calls `std::terminate` for a thread that needs Python
and finds it gone, so no such thread is left when Python ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

GLOO_LETS_GO = """
import sys
import torch
import torch.distributed as dist
import holdfast.core.group.gloo

holdfast.core.group.gloo._LONGEST_EXIT_S = 60.0  # the machine may be busy

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = holdfast.core.group.gloo.Gloo(dist.HashStore(), 0, 1, 10.0) if sys.argv[1] == "ours" else dist
sys.setswitchinterval(100)  # gloo's thread does not get to Python by itself
for _ in range(50):
    if group is dist:
        dist.all_reduce(torch.ones(1000), async_op=True)
    else:
        group.max(torch.ones(1000))
if sys.argv[1] == "destroyed":
    mesh = dist.group.WORLD  # as a mesh, or a DTensor, holds it
    dist.destroy_process_group()
"""
WORD_IS_LEFT = """
import sys
import torch.distributed as dist
from holdfast.core.group import store_requests
from holdfast.core.group.store_requests import StoreLine

store_requests._EXIT_S = 60.0  # the machine may be busy
store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
line = StoreLine(lambda: store, "this process", None)
for _ in range(2000):
    line.leave_word(lambda s: s.set("key", "value"))
if sys.argv[1] == "closed":
    line.close()
elif sys.argv[1] == "gone":
    del line
"""


@pytest.mark.soak_except("one destroyed", "ours", "store", "line closed")
@pytest.mark.parametrize(
    ("script", "argument"),
    [
        (GLOO_LETS_GO, "the job's"),
        (GLOO_LETS_GO, "destroyed"),
        (GLOO_LETS_GO, "ours"),
        (WORD_IS_LEFT, "open"),
        (WORD_IS_LEFT, "closed"),
        (WORD_IS_LEFT, "gone"),
    ],
    ids=["the job's group", "one destroyed", "ours", "store", "line closed", "line gone"],
)
def test_no_thread_is_left_in_torch(script: str, argument: str) -> None:
    command = [sys.executable, "-c", script, argument]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.soak
def test_none_is_left_on_a_busy_machine() -> None:
    """More processes than cores end at once: threads of gloo come to their turn late."""
    command = [sys.executable, "-c", GLOO_LETS_GO, "destroyed"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(4 * (os.cpu_count() or 1))
    ]
    told = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), told


LOST_MEANWHILE = """
import sys, threading
from holdfast.core.group.store_requests import StoreLine, lose_all

def make():
    global lines
    for _ in range(200):
        lines = [StoreLine(object, "", None) for _ in range(100)]
    lines = []

lines = []
sys.setswitchinterval(1e-6)
thread = threading.Thread(target=make)
thread.start()
while thread.is_alive():
    lose_all("it is lost")
"""


def test_ranks_are_lost_while_a_line_is_made() -> None:
    """The thread that hears of lost ranks goes on."""
    command = [sys.executable, "-c", LOST_MEANWHILE]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
