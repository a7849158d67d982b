"""`holdfast run`: torchrun's command line, and four options of our own."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import re
import shutil
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, NoReturn

from holdfast.base.errors import HoldfastError, UsageError
from holdfast.base.suggest import did_you_mean
from holdfast.launch.forkserver import ForkServer
from holdfast.launch.sockets import raise_limit

if TYPE_CHECKING:
    from holdfast.launch.workers import Launch

PRELOAD = (
    "torch",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "holdfast.session.checkpointer",
    "holdfast.tiers.memory.starting",
    "holdfast.session.restart",
)
"""Modules that nearly every worker imports.  torch's optimizers import
torch._dynamo."""
RESTARTS = 100
NPROC = re.compile(r"--nproc[-_]p[-_a-z]*(?:=(.*))?")
"""The option for the number of ranks, and the abbreviations that argparse accepts."""
_COUNT_RANKS = """
import sys
from torch.distributed.run import determine_local_world_size
print(determine_local_world_size(sys.argv[1]))
"""
LOCAL_RANK = re.compile(r"\$(local_rank\b|\{local_rank\})")
"""The text that torchrun replaces by the local rank."""
SPARES = (
    "Spare processes of this node: each has imported the script, and waits to replace a lost rank."
)
NPROC_MIN = """The least number of ranks with which a node goes on while it has no process for a lost rank.
By default a new process is forked at once, and all ranks wait for it."""
PRELOADED = "Import this module once, before workers are forked; may be given several times."
HANG = """Kill and recover ranks that do no step for S seconds, evaluations included; before the first step,
ranks that do nothing for S seconds or half an hour, whichever is longer. By default, from the first step
on, ranks that do nothing for 20 times the longest pause between steps so far, and at least a minute."""

ABOUT = "Run a script on several ranks, as torchrun does, and recover it in place."
USAGE = "%(prog)s [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]"
TORCHRUNS = """
It takes torchrun's options, too (`torchrun --help`), such as:
  --nproc-per-node N        Ranks of this node.
  --nnodes N                Nodes, each with the same command.
  --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT --rdzv-id=NAME
                            Where several nodes meet.
  --max-restarts N          Attempts, at most.  [default: 100]
  -m                        SCRIPT is the name of a module.
"""
EXAMPLES = (
    "holdfast run --nproc-per-node 8 train.py --lr 1e-3",
    "holdfast run --nproc-per-node 8 --spares 1 --hang-s 300 -m my.training",
)


def main(words: Sequence[str]) -> int:
    """Run a script on several ranks; return the exit status, 1 if the run failed."""
    if [*words[:1]] in (["-h"], ["--help"]):
        print(help_text())
        return 0
    _limit_threads(words)
    try:
        given = _checked(parser().parse_args(words))
        server = _server(given)
    except HoldfastError as error:
        _say(f"error: {error}")
        return 2 if isinstance(error, UsageError) else 1
    if server.worker is not None:
        return _be_a_worker(server)
    from holdfast.launch.rendezvous import is_inside
    from holdfast.launch.workers import Launch

    launch = Launch(
        server=server,
        words=[given.training_script, *given.training_script_args],
        is_module=given.module,
        spares=given.spares,
        nproc_min=given.nproc_min,
        hang_s=given.hang_s,
        say=_say,
    )
    try:
        status = _run(given, launch)
    finally:
        server.close()
    if is_inside():
        sys.stdout.flush()
        os._exit(status)
    return status


def _limit_threads(words: Sequence[str]) -> None:
    """Set OMP_NUM_THREADS to 1 for several ranks, as torchrun does, unless the user has set it.

    torch and numpy read it at import, and torchrun's options cannot be parsed before torch is imported.
    """
    if "OMP_NUM_THREADS" not in os.environ and _num_ranks(words) > 1:
        os.environ["OMP_NUM_THREADS"] = "1"


def _num_ranks(words: Sequence[str]) -> int:
    """Return the number of ranks with which this node begins; 1 for a value that torch will refuse."""
    given = os.environ.get("PET_NPROC_PER_NODE", "1")
    for word, value in zip(words, [*words[1:], ""]):
        if word.endswith(".py") or word in ("-m", "--module"):
            break  # the rest are the script's arguments
        if found := NPROC.fullmatch(word):
            given = value if found[1] is None else found[1]
    if not given.isdecimal():  # `gpu`, `cpu` and the like, which torch counts
        command = [sys.executable, "-c", _COUNT_RANKS, given]
        given = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return int(given) if given.isdecimal() else 1


def _run(given: argparse.Namespace, launch: Launch) -> int:
    """Run torch's launcher with our agent; return the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
    from torch.distributed.run import run

    from holdfast.launch.elastic_agent import in_place_of_torchs

    raise_limit()  # for the launcher alone: the fork server forks the workers
    try:
        with _log_dir(given), in_place_of_torchs(launch):
            _check_by_torch(given)
            _meet_anew(given)
            run(given)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    except RendezvousClosedError:
        _say("the run has ended on another node; the launcher there says why")
        return 1
    except RendezvousError as error:
        why = str(error.__cause__ or error).partition("\n")[0] or type(error).__name__
        _say(f"error: the nodes do not meet: {why}\n  hint: {_hint_for_hosts(given)}")
        return 1
    except UsageError as error:
        _say(f"error: {error}")
        return 2
    except SignalException as error:
        _say(f"ended by {error.sigval.name}")
        return 128 + int(error.sigval)
    except HoldfastError as error:
        _say(f"error: {error}")
        return 1
    return 0


def _meet_anew(given: argparse.Namespace) -> None:
    """Have a single node meet by c10d, as torchrun does without a port.

    The `static` rendezvous has one store for all attempts: an attempt would find the keys of the last one.
    """
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    if given.rdzv_backend == "static" and given.nnodes in ("1", "1:1") and not given.standalone:
        if given.rdzv_endpoint or given.master_port is not None:
            host, _ = parse_rendezvous_endpoint(given.rdzv_endpoint, default_port=-1)
            # the address that ranks get as MASTER_ADDR
            given.local_addr = given.local_addr or (
                host if given.rdzv_endpoint else given.master_addr
            )
        usual = None if "PET_MASTER_PORT" in os.environ else parser().get_default("master_port")
        if given.master_port not in (None, usual):
            _say(
                f"MASTER_PORT is not {given.master_port}: each attempt of one node has a free port"
            )
        given.rdzv_backend, given.rdzv_endpoint = "c10d", "localhost:0"
        given.rdzv_id = str(uuid.uuid4())


def _hint_for_hosts(given: argparse.Namespace) -> str:
    """Return the hint for a lost rendezvous, or for too few nodes."""
    hint = f"check that --nnodes={given.nnodes} nodes can reach {given.rdzv_endpoint}"
    if given.rdzv_backend == "c10d":
        hint += "; --rdzv-backend=etcd-v2 outlives its host"
    return hint


@contextmanager
def _log_dir(given: argparse.Namespace) -> Iterator[None]:
    """Make a folder for the errors and logs of ranks, and delete it at the end if nobody needs it.

    torch would leave one behind for each run.
    """
    if given.log_dir is not None:
        yield
        return
    given.log_dir = mkdtemp(prefix="torchelastic_")
    is_kept = True
    try:
        yield
        is_kept = given.redirects != "0" or given.tee != "0"
    finally:
        if is_kept and any(path.is_file() for path in Path(given.log_dir).rglob("*")):
            _say(f"the logs of the ranks are in {given.log_dir}")
        else:
            shutil.rmtree(given.log_dir, ignore_errors=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser of torchrun's options, with more restarts, shorter pauses, and our own options."""
    from torch.distributed.run import get_args_parser

    found: argparse.ArgumentParser = get_args_parser()
    found.prog = "holdfast run"
    found.usage = USAGE
    found.error = partial(_refuse, found)  # type: ignore[method-assign]
    found.description = ABOUT
    for name, value in (("max_restarts", RESTARTS), ("monitor_interval", 0.02)):
        if f"PET_{name.upper()}" not in os.environ:  # else torch has read that variable
            found.set_defaults(**{name: value})
    _add_ours(found)
    return found


def help_text() -> str:
    """Return what `--help` shows: our own options, without importing torch for its parser."""
    found = argparse.ArgumentParser(
        prog="holdfast run",
        usage=USAGE,
        description=ABOUT,
        epilog=TORCHRUNS.strip() + "\n\nExamples:\n" + "\n".join(f"  {e}" for e in EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_ours(found)
    return found.format_help().rstrip()


def _add_ours(found: argparse.ArgumentParser) -> None:
    """Add the options that torchrun does not have."""
    ours = found.add_argument_group("holdfast")
    ours.add_argument("--spares", type=int, default=0, metavar="N", help=SPARES)
    ours.add_argument("--nproc-min", type=int, metavar="M", help=NPROC_MIN)
    ours.add_argument("--preload", action="append", default=[], metavar="MODULE", help=PRELOADED)
    ours.add_argument("--hang-s", type=float, metavar="S", help=HANG)


def _refuse(found: argparse.ArgumentParser, message: str) -> NoReturn:
    """Raise argparse's message as a UsageError."""
    hint = "`holdfast run --help` shows what it takes"
    unknown = message.partition("unrecognized arguments: ")[2].split()
    if unknown:
        options = [
            name for option in getattr(found, "_actions", ()) for name in option.option_strings
        ]
        name = unknown[0].partition("=")[0]
        hint = did_you_mean(name, [o for o in options if "_" not in o], 1) or hint
        message = f"there is no option {name!r}"
    elif message.endswith("training_script_args"):
        message, hint = "no script is given", f"{found.format_usage().strip()}; {hint}"
    raise UsageError(message, hint=hint)


def _check_by_torch(given: argparse.Namespace) -> None:
    """UsageError for values that torch refuses; after the fork server has begun, since this may touch
    CUDA."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import Std

    options: dict[str, Callable[[str], object]] = {
        "nnodes": run.parse_min_max_nnodes,
        "nproc_per_node": run.determine_local_world_size,
        "redirects": Std.from_str,
        "tee": Std.from_str,
    }
    named = ""
    try:
        for name, read in options.items():
            value = getattr(given, name)
            named = f"--{name.replace('_', '-')} {value}: "
            read(value)
        named = ""
        run.config_from_args(argparse.Namespace(**vars(given)))
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(
            f"{named}{error}", hint="`holdfast run --help` shows what it takes"
        ) from error


def _checked(given: argparse.Namespace) -> argparse.Namespace:
    """UsageError for options that `holdfast run` cannot honour."""
    if given.no_python or given.run_path:
        raise UsageError(
            "workers of `holdfast run` are forked from Python: it takes a script or `-m MODULE`",
            hint="torchrun has --no-python and --run-path",
        )
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    if python != sys.executable:
        raise UsageError(
            f"PYTHON_EXEC={python}: workers of `holdfast run` are forked from its own Python",
            hint=f"{python} -m holdfast run, or torchrun",
        )
    if getattr(given, "numa_binding", None) is not None:  # torch 2.9 and newer
        raise UsageError(
            f"--numa-binding {given.numa_binding}: workers are forked, and stay where the launcher is",
            hint="numactl before `holdfast run`, or torchrun",
        )
    if given.spares < 0:
        raise UsageError(f"--spares {given.spares}: must be 0 or more")
    if given.nproc_min is not None:
        if given.nproc_min < 1:
            raise UsageError(f"--nproc-min {given.nproc_min}: must be 1 or more")
        if getattr(given, "virtual_local_rank", False):
            raise UsageError("--nproc-min needs local ranks of their own: no --virtual-local-rank")
    are_several = given.nnodes not in ("1", "1:1") and given.nnodes.replace(":", "").isdigit()
    if are_several and not given.standalone:
        if given.rdzv_backend not in ("c10d", "etcd-v2"):
            raise UsageError(
                f"--rdzv-backend={given.rdzv_backend}: its nodes cannot meet again after a failure",
                hint="give --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT --rdzv-id=NAME on every node",
            )
    may_move = given.spares or given.nproc_min is not None
    words = [word.replace("$$", "") for word in given.training_script_args]
    if may_move and any(map(LOCAL_RANK.search, words)):
        raise UsageError(
            "${local_rank} in the script's arguments: a spare has them before it has a rank",
            hint="the script finds LOCAL_RANK in its environment; or no --spares",
        )
    if given.hang_s is not None and not given.hang_s > 0:
        raise UsageError(f"--hang-s {given.hang_s}: must be more than 0")
    if not given.module and not os.path.exists(given.training_script):
        raise UsageError(f"there is no script {given.training_script!r}")
    if not given.module and os.path.isfile(given.training_script):
        _compile(given.training_script)
    return given


def _compile(path: str) -> None:
    """UsageError if the script does not compile, once instead of on each rank."""
    if path.endswith((".zip", ".pyz")):
        return
    try:
        with open(path, "rb") as file:
            compile(file.read(), path, "exec")
    except (SyntaxError, ValueError) as error:
        raise UsageError("".join(traceback.format_exception_only(error)).strip()) from error


def _server(given: argparse.Namespace) -> ForkServer:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else the check initialises CUDA
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages; torch reads it once
    for name in (*PRELOAD, *given.preload):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UsageError(f"--preload {name}: {error}") from error
        except Exception as error:  # of the module itself, or of what is no name of one
            raise UsageError(f"--preload {name!r}: {type(error).__name__}: {error}") from error
    gc.collect()
    gc.freeze()  # else the garbage collector of each worker would copy the shared memory
    handled = getattr(given, "signals_to_handle", "")  # older torch has no such option
    return ForkServer([name.strip() for name in handled.split(",")])


def _be_a_worker(server: ForkServer) -> int:
    from holdfast.launch.worker import become, show_failure

    assert server.worker is not None
    try:
        become(*server.worker)
    except SystemExit:
        raise
    except BaseException as error:
        show_failure(error)
        return 1
    return 0


def _say(text: str) -> None:
    print(f"holdfast run: {text}", file=sys.stderr, flush=True)
