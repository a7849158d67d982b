"""torchrun whose ranks are forked from a process that has imported torch: a rank starts in 0.1 s.

Same options, same agent, same rendezvous; only how a rank's process comes to be differs.  The fork server
is forked from torchrun itself: torch, and with `-m` the module that ranks run, are imported once per node.

    python -m forking --standalone --nproc-per-node=4 -m system.distributed.matrix ...

Ranks that are forked hash strings alike, as real ones do not: what ranks must agree on whatever the order
of their sets is tested under a real torchrun: saving, and by `make soak` loading, converting, three ranks
of the matrix, DeepSpeed on three.
"""

import importlib
import logging
import os
import runpy
import sys
from argparse import Namespace
from multiprocessing import forkserver, util
from typing import Any

from ports import free_port
from zygote import PRELOAD


def script(path: str, *args: str) -> None:
    sys.argv = [path, *args]
    runpy.run_path(path, run_name="__main__")


def module(name: str, *args: str) -> None:
    sys.argv = [name, *args]
    del sys.modules[name]  # it was imported under its own name, to be run under another
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def untraced(record: logging.LogRecord) -> bool:
    """No traceback of the agent: it tells nothing, and to format it torch imports its compiler (2 s)."""
    record.exc_info = None
    return True


def serve_forks() -> None:
    """Begin the fork server as a fork of this process, which as yet has one thread."""
    assert len(os.listdir("/proc/self/task")) == 1, "something that was imported has begun threads"
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
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import api

    api.get_free_port = free_port
    given = run.parse_args(None)
    if given.module:
        importlib.import_module(given.training_script)
    serve_forks()
    noisy = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    noisy.addFilter(untraced)
    configured = run.config_from_args

    def forking(args: Namespace) -> Any:
        config, _, _ = configured(args)
        config.start_method = "forkserver"
        ranks = module if args.module else script
        return config, ranks, [args.training_script, *args.training_script_args]

    run.config_from_args = forking
    run.run(given)


if __name__ == "__main__":
    main()
