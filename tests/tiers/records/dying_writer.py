"""The real writer, which gets SIGKILL before its n-th call that changes a file, or before its first call of
a name; with it its training process, if that is asked for, as when a node is lost.

    python -m tiers.records.dying_writer LINE PARENT WHICH TRAINER CALLS  # writes the calls' names to CALLS
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from holdfast.base import background
from holdfast.tiers.records import writer

CALLS = ("mkdir", "pwrite", "fsync", "link", "replace", "unlink", "rmdir", "ftruncate")


def instead(which: Sequence[int | str], calls: Path, *, trainer: bool) -> Any:
    """For `background.subprocess`: the i-th writer that is started dies before its `which[i]`-th call, or
    before its first of that name."""
    left = itertools.chain(which, itertools.repeat(0))

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if "holdfast.tiers.records.writer" not in command:
            return subprocess.Popen(command, **options)
        how = [str(next(left)), str(int(trainer)), str(calls)]
        dying = [sys.executable, "-m", __name__, *command[-2:], *how]
        return subprocess.Popen(dying, **options)

    return SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)


def install(**options: Any) -> None:
    """In a process that is only for this."""
    background.subprocess = instead(**options)


def main() -> int:
    which, trainer, calls = sys.argv[3], bool(int(sys.argv[4])), Path(sys.argv[5])
    count = itertools.count(1)

    def before(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                with calls.open("a") as file:
                    dies = which in (str(next(count)), name)
                    file.write(f"{'died ' * dies}{name}\n")
                if dies:
                    if trainer:
                        os.kill(os.getppid(), signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in ("open", *CALLS):
        setattr(os, name, before(name, getattr(os, name)))
    return writer.main()


if __name__ == "__main__":
    sys.exit(main())
