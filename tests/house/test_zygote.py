"""Programs that are forked: each has an end of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import zygote

NUMBER_IS_GIVEN_AGAIN = """
import json, os, socket
import zygote

pid = os.fork() or os._exit(3)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
asked, served = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
for request in {"poll": pid}, {"args": []}, {"poll": pid}:
    asked.send(json.dumps(request).encode())
asked.shutdown(socket.SHUT_WR)
zygote.PRELOAD, os.fork = (), lambda: pid
zygote._serve(served.detach())
answers = [json.loads(asked.recv(99)) for _ in range(3)]
assert answers == [3, pid, None], answers
"""


def test_a_program_has_not_ended_because_one_of_the_same_number_has() -> None:
    env = os.environ | {"PYTHONPATH": str(zygote.TESTS)}
    command = [sys.executable, "-c", NUMBER_IS_GIVEN_AGAIN]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
