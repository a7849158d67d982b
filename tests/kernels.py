"""DeepSpeed's kernels, which it compiles when they are first used, once per checkout."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parent

COMPILE = """
import deepspeed_on_cpu
from deepspeed.accelerator import get_accelerator
for name in ("FusedAdamBuilder", "CPUAdamBuilder"):
    get_accelerator().create_op_builder(name).load()
"""


@contextmanager
def compiled(env: dict[str, str]) -> Iterator[None]:
    """A block in which processes that have `env` find the kernels.

    A compilation that is killed leaves its lock, for which every later one would wait for ever.  So the
    kernels lie in a folder of the checkout, and one process at a time uses it.
    """
    place = TESTS.parent / ".pytest_cache/d/kernels"
    place.mkdir(parents=True, exist_ok=True)
    env["TORCH_EXTENSIONS_DIR"] = str(place)
    with open(place / "in-use", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for lock in place.glob("*/lock"):
            lock.unlink()
        command = [sys.executable, "-c", COMPILE]
        subprocess.run(command, check=True, timeout=400, cwd=TESTS, env=env)
        yield
