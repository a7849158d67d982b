"""torchrun whose ranks are forked from a process that has imported torch, so that a restart is quick.

Same options, same agent, same rendezvous; only how a rank's process comes to be differs.  The fork server
is forked from torchrun itself: a node imports torch once.
"""

import importlib
import logging
import os
import runpy
import sys
from multiprocessing import forkserver, util

PRELOAD = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.run", "holdfast"]


def script(path: str, *args: str) -> None:
    sys.argv = [path, *args]
    runpy.run_path(path, run_name="__main__")


def untraced(record: logging.LogRecord) -> bool:
    """No traceback of the agent: it tells nothing, and to format it torch imports its compiler (2 s)."""
    record.exc_info = None
    return True


def serve_forks() -> None:
    """Begin the fork server as a fork of this process, which as yet has one thread."""
    spawn = util.spawnv_passfds

    def fork(path: bytes, args: list[str], fds: list[int]) -> int:
        if "forkserver" not in args[-1]:  # the resource tracker
            return int(spawn(path, args, fds))
        if pid := os.fork():
            return pid
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in fds:
                try:
                    os.close(fd)
                except OSError:
                    pass  # that of the listing
        try:
            exec(args[-1], {})  # what a new interpreter would be told to do
        finally:
            os._exit(0)

    util.spawnv_passfds = fork
    forkserver.ensure_running()
    util.spawnv_passfds = spawn


def main() -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    serve_forks()
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    noisy = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    noisy.addFilter(untraced)
    given = run.parse_args(None)
    config, _, _ = run.config_from_args(given)
    config.start_method = "forkserver"
    elastic_launch(config, script)(given.training_script, *given.training_script_args)


if __name__ == "__main__":
    main()
