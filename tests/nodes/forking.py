"""torchrun whose ranks are forked from a process that has imported torch, so that a restart is quick.

Same options, same agent, same rendezvous; only how a rank's process comes to be differs.
"""

import logging
import multiprocessing
import runpy
import sys
from multiprocessing import forkserver

PRELOAD = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.run", "holdfast"]


def script(path: str, *args: str) -> None:
    sys.argv = [path, *args]
    runpy.run_path(path, run_name="__main__")


def untraced(record: logging.LogRecord) -> bool:
    """No traceback of the agent: it tells nothing, and to format it torch imports its compiler (2 s)."""
    record.exc_info = None
    return True


def main() -> None:
    multiprocessing.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    from torch.distributed import run  # meanwhile the fork server imports it, too
    from torch.distributed.launcher.api import elastic_launch

    noisy = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    noisy.addFilter(untraced)
    given = run.parse_args(None)
    config, _, _ = run.config_from_args(given)
    config.start_method = "forkserver"
    elastic_launch(config, script)(given.training_script, *given.training_script_args)


if __name__ == "__main__":
    main()
