"""`holdfast.testing.prove`: the proof of a training that is a function, for a user's own tests."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.base.arguments import shown
from holdfast.base.errors import UsageError
from holdfast.prove.proving import Plan
from holdfast.prove.proving import prove as prove_plan
from holdfast.prove.report import ResumeProof

_STATE = "holdfast-state"


def prove(train: Callable[[Path], object], *, ranks: int = 1, **options: Any) -> ResumeProof:
    """Prove that a training goes on exactly when it is killed; blocks until all its runs are done.

    `train(root)` trains, saves into the folder `root`, and goes on from there; a function of a module,
    which is imported in new processes, `ranks` of them started by torchrun. `options` are those of the
    command: `steps`, `kill_at`, `kill`, `seed`, `tolerance`, `patience_s`.

    The result is true if every resume was exact, and prints as the command does: `assert prove(train)`.
    Raises `CannotProve` for a training that saves nothing, makes no step, ends early or asks for input;
    UsageError for a function that cannot be imported.
    """
    name = getattr(train, "__qualname__", "<")  # a callable object has none
    module = sys.modules.get(getattr(train, "__module__", ""))
    if "<" in name or module is None or getattr(module, "__file__", None) is None:
        raise UsageError(
            f"prove({shown(train)}): a new process cannot import it",
            hint="give a function of a module's top level",
        )
    command = ["-m", __spec__.name, str(module.__file__), name, "--root", _STATE]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launcher, *command]
    paths = os.pathsep.join([os.path.abspath(p) for p in sys.path])
    plan = Plan([sys.executable, *command], **options)
    return prove_plan(plan, env={**os.environ, "PYTHONPATH": paths})


def _call(file: str, name: str, root: str) -> None:
    """Call the function, in a process of its own."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    found(Path(root))


if __name__ == "__main__":
    _call(sys.argv[1], sys.argv[2], sys.argv[4])
