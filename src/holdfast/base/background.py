"""Processes of our own in the background: the agent of a node, and the writer of a rank's records.

Both outlive the process that starts them, and must not get into anybody's way meanwhile.  So each has

* a session of its own: what ends the training, Ctrl-C or a hang-up, does not reach it;
* `/` as its working directory, and no standard input: it holds no file system and no terminal;
* the same Python and the same holdfast, whatever lies in the working directory, and nothing of what a
  launcher has told the training process in its environment.

How the two sides talk differs: the agent serves many by HTTP, a writer has one socket.  Both give way to
the training (`yield_to_training`, `weigh_session`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

RUN = (
    "import sys; sys.path = [p for p in sys.path if p]; from importlib import import_module; "
    "sys.exit(import_module(sys.argv.pop(1)).main())"
)
"""Calls `main()` of the module that is the first argument, and finds none in the working directory."""
OF_THE_LAUNCHER = ("TORCHELASTIC", "NCCL_")
"""The beginnings of variables that a launcher sets for the training process alone."""


def spawn(
    module: str,
    arguments: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    log: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `module.main()`, which finds `arguments` in `sys.argv`; return at once.  OSError.

    `variables` are added to its environment; it inherits `pass_fds`; `log` takes what it prints, by default
    what this process prints to.
    """
    return subprocess.Popen(
        [sys.executable, "-c", RUN, module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=pass_fds,
        start_new_session=True,
        cwd="/",
        env={**_environment(), **(variables or {})},
    )


def _environment() -> dict[str, str]:
    """Return this process's environment with its holdfast first, but for what is the launcher's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OF_THE_LAUNCHER)}
    package = str(Path(__file__).resolve().parent.parent)
    others = filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))
    path = [package, *map(os.path.abspath, others)]
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}


def ending(status: int) -> str:
    """Say how a process has ended, after `it` or its name: `was killed by SIGKILL`, `ended with 1`."""
    if status >= 0:
        return f"ended with {status}"
    known = -status in set(signal.Signals)
    return f"was killed by {signal.Signals(-status).name if known else f'signal {-status}'}"


def yield_to_training() -> None:
    """The lowest priority, for this thread and those that it begins, and for a session of its own.

    Linux may weigh sessions against each other; a process's own priority then counts only within its
    session, so this one's is set, too (sched(7), autogroup).
    """
    with suppress(OSError):
        os.nice(19)
    weigh_session(19)


def weigh_session(nice: int) -> bool:
    """Set the priority of this process's session, up to that of others (0); False if not now: Linux takes
    ten changes a second."""
    try:
        Path("/proc/self/autogroup").write_text(str(nice))
    except BlockingIOError:
        return False
    except OSError:  # this kernel does not weigh sessions
        pass
    return True
