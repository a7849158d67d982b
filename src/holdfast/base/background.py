"""The background processes of holdfast: the agent of a node, and the writer of a rank's records.

Both outlive the process that starts them and must not disturb anything meanwhile.  So each has

* its own session: Ctrl-C or a hang-up, which end the training, do not reach it;
* `/` as its working directory and no standard input: it blocks no unmount and holds no terminal;
* the same Python and the same holdfast, regardless of the files in the working directory, and an
  environment without the variables that a launcher sets for the training process.

The two talk to the training differently: the agent serves many processes by HTTP, a writer has one socket.
Both run at the lowest priority (`yield_to_training`, `weigh_session`).
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

_RUN = (
    "import sys; sys.path = [p for p in sys.path if p]; from importlib import import_module; "
    "sys.exit(import_module(sys.argv.pop(1)).main())"
)
"""Calls `main()` of the module named by the first argument; imports nothing from the working directory."""
_OF_THE_LAUNCHER = ("TORCHELASTIC", "NCCL_")
"""Prefixes of environment variables that a launcher sets for the training process alone."""


def spawn(
    module: str,
    arguments: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    log: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `module.main()` with `arguments` in `sys.argv`; return at once.  OSError.

    `variables` are added to its environment.  It inherits `pass_fds`.  Its output goes to `log`, by default
    to the output of this process.
    """
    return subprocess.Popen(
        [sys.executable, "-c", _RUN, module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=pass_fds,
        start_new_session=True,
        cwd="/",
        env={**_environment(), **(variables or {})},
    )


def _environment() -> dict[str, str]:
    """Return this process's environment without the launcher's variables, and with this holdfast first in
    PYTHONPATH."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_THE_LAUNCHER)}
    package = str(Path(__file__).resolve().parents[2])
    others = filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))
    path = [package, *map(os.path.abspath, others)]
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}


def ending(status: int) -> str:
    """Describe the end of a process, for a message: `was killed by SIGKILL`, `ended with 1`."""
    if status >= 0:
        return f"ended with {status}"
    known = -status in set(signal.Signals)
    return f"was killed by {signal.Signals(-status).name if known else f'signal {-status}'}"


def yield_to_training() -> None:
    """Set the lowest priority for this thread, the threads that it starts, and its session.

    Linux may weigh sessions against each other.  A process's priority then counts only within its session,
    so the priority of the session is set, too (sched(7), autogroup).
    """
    with suppress(OSError):
        os.nice(19)
    weigh_session(19)


def weigh_session(nice: int) -> bool:
    """Set the priority of this process's session; 0 is that of other sessions.  False if Linux refuses for
    now, because it takes only ten changes a second."""
    try:
        Path("/proc/self/autogroup").write_text(str(nice))
    except BlockingIOError:
        return False
    except OSError:  # this kernel does not weigh sessions
        pass
    return True
