"""A signal whose handler raises, at any moment of a call: a recovery in place sends them to trainings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, random, signal, sys
from holdfast.base.storage_deadlines import ThreadWatch
from holdfast.store import LocalStore

class Ended(Exception): ...

def end(*_):
    global armed
    armed = False  # Python swallows what is raised in some callbacks
    raise Ended

def read(store):
    store.get("a/b")

def stream(store):
    store.open("a/b").close()

def direct(store):
    store.open_once("a/b").close()

def replace(store):
    store.put("a/b", b"x" * 100, replacing=b"x" * 100)

call = locals()[sys.argv[2]]
store = LocalStore(sys.argv[1], durable=False)
store.put("a/b", b"x" * 100)
signal.signal(signal.SIGALRM, end)
before = len(os.listdir("/proc/self/fd"))
with ThreadWatch().over_this_thread():  # it makes its calls itself
    for _ in range(1000):
        armed = True
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 4e-4))
            while armed:
                call(store)
        except Ended:
            pass
print(len(os.listdir("/proc/self/fd")) - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["read", "stream", "direct", "replace"])
def test_no_descriptor_stays_open(tmp_path: Path, call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path), call], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 0
