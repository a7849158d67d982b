"""Many cases in one launch: each is a function that every rank calls with a folder of its own.

A worker module decorates its cases with `case` and ends with `run_all()`; the pytest module asserts on
`OUT/<rank>.json`, which maps each case to None or to the traceback of this rank, or says why it skipped
the case, as a test does.  Ranks meet between cases, so one that fails on one rank alone does not shift the
next; the meeting has a deadline.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from .launch import LIMIT_S, launch

Case = Callable[[Path], None]
MEET_S = 240.0
SKIPPED = "skipped: "


def run_all(cases: list[Case]) -> None:
    """Run the cases in order, on every rank; arguments: the folder, then names (default: all)."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=240))
    out, names = Path(sys.argv[1]), sys.argv[2:]
    found: dict[str, str | None] = {}
    for one in cases:
        if names and one.__name__ not in names:
            continue
        root = out / one.__name__
        root.mkdir(exist_ok=True)
        dist.monitored_barrier(timeout=timedelta(seconds=MEET_S))
        try:
            one(root)
            found[one.__name__] = None
        except pytest.skip.Exception as skipped:
            found[one.__name__] = f"{SKIPPED}{skipped}"
        except BaseException:
            found[one.__name__] = traceback.format_exc()
        path = out / f"{dist.get_rank()}.json"
        path.write_text(json.dumps(found))
    dist.monitored_barrier(timeout=timedelta(seconds=MEET_S))
    dist.destroy_process_group()


def run_module(
    module: str,
    num_ranks: int,
    out: Path,
    *names: str,
    forked: bool = True,
    timeout_s: float = LIMIT_S,
) -> dict[str, list[str]]:
    """Launch a worker module (its cases with these names); by case, what went wrong on which rank."""
    ran = launch(module, num_ranks, out, *names, forked=forked, timeout_s=timeout_s)
    failed: dict[str, list[str]] = {}
    for rank in range(num_ranks):
        path = out / f"{rank}.json"
        if path.exists():
            for name, text in json.loads(path.read_text()).items():
                said = f"rank {rank}:\n" if text and not text.startswith(SKIPPED) else ""
                failed.setdefault(name, []).extend([said + text] if text else [])
    if all(text.startswith(SKIPPED) for texts in failed.values() for text in texts):
        ran.check()
    return failed


def check(failed: dict[str, list[str]], name: str) -> None:
    """Fail with the tracebacks of a case; or because it was not reached.  Skip if all ranks did."""
    assert name in failed, f"{name} was not reached: {sorted(failed)}"
    if failed[name]:
        if all(text.startswith(SKIPPED) for text in failed[name]):
            pytest.skip(failed[name][0].removeprefix(SKIPPED))
        pytest.fail("\n".join(failed[name]), pytrace=False)
