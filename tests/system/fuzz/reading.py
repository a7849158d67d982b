"""Reads damaged checkpoints, each in a process of its own that is bounded: `python -m system.fuzz.reading`.

Every result must be one of
    equal     all that was saved
    refused   a HoldfastError, of all or of a part; the other parts are equal
    older     an older state, exact, whose number is told
    values    other values: of formats without digests, and of lies under a true seal
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.verifying import verify
from holdfast.errors import HoldfastError
from holdfast.store import LocalStore
from holdfast.tiers.records.offline import replay_to
from system.fuzz import bases, damage

CPU_S, WALL_S, MIB = 10, 120, 1024
"""Bounds of one reading: seconds of CPU; of the clock, for what waits takes no CPU; and of memory."""
Found = dict[str, Any]
"""What was read, by part, or why not.  `newest`: the number of a part, and that part once more."""
Read = Callable[[Path], Found]


def ask(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"


def digest_of(*parts: Any) -> str:
    return hashlib.sha1(repr(parts).encode("utf-8", "backslashreplace")).hexdigest()


def content(c: Checkpoint) -> Found:
    """A digest of all that a checkpoint holds."""
    found = [
        (name, v.dtype, v.shape, v.tobytes()) for name in sorted(c.names()) for v in [c.read(name)]
    ]
    own = c.format == "holdfast"
    ranks = [c.rank_extras(r) for r in range(c.manifest.layout.world)] if own else []
    return {"is": digest_of(found, c.extras, c.files if own else None, ranks)}


def read_own(root: Path) -> Found:
    found = {}
    for step in (1, 2):
        found[str(step)] = ask(lambda: content(holdfast.open(root, step=step)))
        ask(lambda: verify(LocalStore(str(root)), step))
    return found | {
        "newest": ask(lambda: [(c := holdfast.open(root)).step, content(c)]),
        "steps": ask(lambda: [holdfast.steps(root), None][1]),
    }


def weights(net: Any, tokens: Any) -> Found:
    return {"is": digest_of([(k, v.numpy().tobytes()) for k, v in net.items()], tokens)}


def read_records(root: Path) -> Found:
    """Two replays without the script, and a restart."""

    def replayed(step: int) -> Found:
        state, _, _ = replay_to(LocalStore(str(root)), step)
        return weights(state["model"].state_dict(), state["progress"].state_dict()["tokens"])

    def restarted() -> Any:
        net, state = bases.live()
        with bases.keeper(root, state) as checkpointer:
            reached = int(checkpointer.restore())
        if not reached:
            return "begins anew"
        return [reached, weights(net.state_dict(), state["progress"]["tokens"])]

    found = {str(step): ask(partial(replayed, step)) for step in (6, 11)}
    return found | {"newest": ask(restarted)}


def truth_of_records(root: Path) -> Found:
    states = torch.load(root.parent / "truth.pt")
    return {str(step): weights(net, 7 * step) for step, net in states.items()}


def read_at(*urls: str) -> Read:
    """Read foreign checkpoints at URLs below the folder."""
    return lambda root: {url: ask(lambda: content(holdfast.open(url.format(root)))) for url in urls}


in_log = partial(damage.damage, prefer="log")
in_safetensors = read_at("huggingface:{}/one", "huggingface:{}/two")
KINDS: dict[str, tuple[Callable[[Path], None], Read, Callable[..., str]]] = {
    "own": (bases.own, read_own, damage.damage),
    "attached": (bases.attached, read_own, damage.damage),
    "records": (bases.records, read_records, in_log),
    "own-lies": (bases.own, read_own, damage.lie_in_manifest),
    "records-lies": (bases.records, read_records, damage.lie_in_records),
    "torch": (bases.torch_file, read_at("torch:{}/m.pt"), damage.damage),
    "dcp": (bases.dcp, read_at("dcp:{}"), damage.damage),
    "safetensors": (bases.safetensors, in_safetensors, damage.damage),
    "deepspeed": (bases.deepspeed, read_at("deepspeed:{}"), damage.damage),
}


def judge(found: Found, truth: Found) -> str:
    worst = "equal"
    for part, got in found.items():
        if part == "newest" and isinstance(got, list):
            if str(got[0]) != max(truth, key=int):
                worst = "older" if worst == "equal" else worst
            part, got = str(got[0]), got[1]
        if isinstance(got, str):
            worst = "refused"
        elif got is not None and got != truth.get(part):
            return "values"
    return worst


def bounded(work: Callable[[], Any]) -> Any:
    """Do something in a fork, and return what it returns; what it raises, or exceeds, as a text."""
    receive, send = os.pipe()
    base = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
    if (pid := os.fork()) == 0:
        os.close(receive)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        warnings.simplefilter("ignore")
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))
        try:
            answer = work()
        except BaseException as error:
            frames = [
                f for f in traceback.extract_tb(error.__traceback__) if "/holdfast/" in f.filename
            ]
            at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
            answer = f"raw {type(error).__name__}: {str(error)[:200]} at {at}"
        os.write(send, json.dumps(answer).encode())
        os._exit(0)
    os.close(send)
    ready, _, _ = select.select([receive], [], [], WALL_S)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    answer = os.read(receive, 1 << 16)
    os.close(receive)
    _, status, use = os.wait4(pid, 0)
    if not ready or os.WIFSIGNALED(status):
        took = use.ru_utime + use.ru_stime
        return f"ended by signal {os.WTERMSIG(status)} after {took:.1f} s of CPU"
    peak = (use.ru_maxrss >> 10) - base
    return json.loads(answer) if peak <= MIB else f"took {peak} MiB"


def import_what_reading_does(work: Callable[[], Any]) -> None:
    """So that forks need not, which takes seconds each."""
    before = set(sys.modules)
    for name in bounded(lambda: (work(), [m for m in sys.modules if m not in before])[1]):
        with suppress(Exception):  # some are made, not imported
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "something that was imported has begun threads"
    gc.collect()
    gc.freeze()


def is_right(kind: str, how: str, verdict: str) -> bool:
    """True for the results that a damage may have."""
    if verdict in ("equal", "refused"):
        return True
    if verdict == "older":
        return "own" in kind or "records" in kind or kind == "attached"
    has_sums = kind in ("own", "attached", "records")
    return verdict == "values" and not has_sums and how not in damage.OF_FILES


def main(kind: str, folder: str, first: int, stop: int, seed: int) -> None:
    make, read, hurt = KINDS[kind]
    base, copy = Path(folder) / "base", Path(folder) / "copy"
    assert bounded(lambda: make(base)) is None
    truth = bounded(lambda: truth_of_records(base) if make is bases.records else read(base))
    import_what_reading_does(lambda: read(base))
    truth = {part: is_ for part, is_ in truth.items() if part not in ("newest", "steps")}
    assert all(isinstance(is_, dict) for is_ in truth.values()), truth
    counts, bad = Counter[str](), []
    for number in range(first, stop):
        rng = random.Random(seed * 1_000_003 + number)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(base, copy)
        how = hurt(rng, copy)
        verdict = bounded(lambda: judge(read(copy), truth))
        counts[verdict.partition(":")[0]] += 1
        if not is_right(kind, how, verdict):
            bad.append(f"{kind} seed {seed} damage {number} ({how}): {verdict}")
    shutil.rmtree(copy, ignore_errors=True)
    print(json.dumps({"counts": counts, "bad": bad}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
