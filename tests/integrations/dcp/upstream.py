"""PyTorch's own tests of DCP, with holdfast's `Writer` and `Reader` in the place of its file system.

python tests/integrations/dcp/upstream.py DIR [-k PATTERN]

DIR is a checkout of PyTorch's source.  Its tests need `expecttest` and `zstandard`.  Each file that saves
to a file system runs in a process of its own, and once more with torch's own writer: what fails there, too,
is not holdfast's.  All runs on CPUs, also what `skip_if_lt_x_gpu` keeps from them, in forked ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partialmethod
from importlib import import_module
from pathlib import Path
from typing import Any

WRITER = "HOLDFAST_UPSTREAM_WRITER"
"""An environment variable: whose writer the processes of a run have, holdfast's or torch's."""
FOLDER = "test/distributed/checkpoint"
SAVES = re.compile(r"FileSystem(Writer|Reader)\b|checkpoint_id=")
ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Unsaved|Mismatch)(?:: .*)?$", re.MULTILINE)
CASE_SECONDS, FILE_SECONDS = "150", 600
COUNTS = ("cases", "passed", "failed", "skipped", "torch's own passed")
ROW = "{:<42}" + "{:>8}" * 4 + "{:>20}"


class OfPath:
    """Made of a path, as torch's own are: it is the root, and each save is its next step."""

    def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(path)  # type: ignore[call-arg]

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin another save or load, of another path if there is one."""
        self.root: str = os.fspath(checkpoint_id or self.root)
        super().reset()  # type: ignore[misc]


def take_the_place() -> None:
    """Put holdfast's classes where DCP has its own, once those are made that extend its own."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils

    from holdfast.dcp import Reader, Writer

    import_module("torch.distributed.checkpoint._fsspec_filesystem")
    for name, ours in (("FileSystemWriter", Writer), ("FileSystemReader", Reader)):
        of_path = {"validate_checkpoint_id": filesystem.FileSystem.validate_checkpoint_id}
        made = type(name, (OfPath, ours), {"__module__": __name__, **of_path})
        globals()[name] = made  # the process of `async_save` finds it here
        for module in (dcp, filesystem, _storage_utils, format_utils):
            setattr(module, name, made)


def run_on_cpus() -> None:
    """Run what asks for GPUs on CPUs, in forked ranks, which tell of all errors."""
    import torch
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.fsdp import FullyShardedDataParallel as Sharded
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed._tensor import common_dtensor

    for module in (common_distributed, common_dtensor):
        module.skip_if_lt_x_gpu = lambda *args, **kwargs: lambda test: test
    Sharded.__init__ = partialmethod(Sharded.__init__, device_id=torch.device("cpu"))
    ranks, twice = common_distributed.MultiProcessTestCase, "cpu:gloo,cpu:gloo"
    init, run_test = common_dtensor.DTensorTestBase.init_pg, ranks.run_test
    common_dtensor.DTensorTestBase.init_pg = lambda self, eager, backend=None: init(
        self, eager, "gloo" if (backend or self.backend) == twice else backend
    )
    torch.multiprocessing.set_start_method("fork", force=True)
    ranks._spawn_processes = lambda self: self._start_processes(torch.multiprocessing.Process)

    @contextmanager
    def told() -> Iterator[None]:
        try:
            yield
        except CheckpointException as error:  # it is no Exception: a rank would exit without a word
            raise RuntimeError(str(error)) from error

    def run_told(self: Any, name: str, *args: Any) -> None:
        setattr(self, name, told()(getattr(self, name)))
        run_test(self, name, *args)

    ranks.run_test = run_told


class Told(unittest.TestResult):
    """Writes what became of each case into a file, at once: the process may not come to its end."""

    def tell(self, case: Any, outcome: str, why: str = "") -> None:
        """Write a line; of two of one case the second is true."""
        with self.into.open("a") as lines:
            lines.write(json.dumps([case.id().partition(".")[2], outcome, why]) + "\n")

    def addSuccess(self, test: Any) -> None:  # noqa: N802  unittest's names
        self.tell(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self.tell(test, "skipped", reason)

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        self.tell(test, "failed", reason_of(self._exc_info_to_string(err, test)))

    addError = addFailure  # noqa: N815


def reason_of(trace: str) -> str:
    """The line that says what was wrong: of the first rank, if ranks have sent their tracebacks."""
    trace = trace.split("exited with error code")[:2][-1]
    found = [m[0] for m in ERROR.finditer(trace)] or trace.strip().splitlines()
    return found[-1][:200] if found else "no word"


def cases_of(suite: Any) -> Iterator[Any]:
    """All cases of a suite, and of suites in it."""
    for one in suite:
        yield from cases_of(one) if isinstance(one, unittest.TestSuite) else [one]


def run_here(file: Path, pattern: str, into: Path) -> None:
    """Run the cases of a file in this process."""
    sys.path[0] = str(file.parent)
    loader, result = unittest.TestLoader(), Told()
    result.into = into
    loader.testNamePatterns = [f"*{pattern}*"]
    suite = loader.loadTestsFromModule(import_module(file.stem))
    for case in cases_of(suite):
        result.tell(case, "failed", "did not come to its end")
    suite.run(result)


def run(file: Path, pattern: str, writer: str) -> dict[str, tuple[str, str]]:
    """Run the cases of a file in a process of its own; return what became of each, and why."""
    with tempfile.TemporaryDirectory() as folder:
        into, log = Path(folder, "told"), Path(folder, "log")
        more = {WRITER: writer, "TMPDIR": folder, "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": CASE_SECONDS}
        command = [sys.executable, __file__, str(file), "-k", pattern, "--into", str(into)]
        with log.open("w") as out:
            process = subprocess.Popen(
                command, env=os.environ | more, stdout=out, stderr=out, start_new_session=True
            )
            with suppress(subprocess.TimeoutExpired):
                process.wait(FILE_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        told = [json.loads(line) for line in into.read_text().splitlines()] if into.exists() else []
        if not told and process.returncode:
            return {"(import)": ("failed", reason_of(log.read_text()))}
        return {name: (outcome, why) for name, outcome, why in told}


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("dir", type=Path, help="a checkout of PyTorch's source")
    p.add_argument("-k", default="", help="only cases with this in their name: file.Class.case")
    p.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.into:
        run_here(args.dir, args.k, args.into)
        return
    total: Counter[str] = Counter()
    print(ROW.format("file", *COUNTS))
    for file in sorted((args.dir / FOLDER).rglob("test_*.py")):
        ours = run(file, args.k, "holdfast") if SAVES.search(file.read_text()) else {}
        if not ours:
            continue
        control = run(file, args.k, "torch")
        count = Counter(outcome for outcome, _ in ours.values())
        count[COUNTS[0]] = len(ours)
        count[COUNTS[-1]] = [outcome for outcome, _ in control.values()].count("passed")
        total.update(count, files=1)
        print(ROW.format(str(file.relative_to(args.dir / FOLDER)), *map(count.__getitem__, COUNTS)))
        for name, one in ours.items():
            if {one[0], (other := control.get(name, ("missing", "")))[0]} != {"passed"}:
                print(f"  {name}: {' '.join(one)}\n    torch's own: {' '.join(other)}", flush=True)
    print(ROW.format(f"{total['files']} files", *map(total.__getitem__, COUNTS)))


if os.environ.get(WRITER):
    run_on_cpus()
    if os.environ[WRITER] == "holdfast":
        take_the_place()
if __name__ == "__main__":
    main()
