"""Drives loops of `loops.drawn` with holdfast, each in a process of its own, beside an uninterrupted twin.

The twin is the same loop without holdfast.  It tells what the state was at each call; so do the lives of
the loop (one, or two where the first ends by a kill or an error), and each step that is found in the root
when all is over is loaded into fresh objects.  All must be equal, bit for bit, and so must be the end of a
run that goes on from a step.

    python -m system.loops.driver 7 8 9       # from tests/: these seeds, with all that was seen
    python -m system.loops.driver --num 2000  # so many new ones; prints those that are not right
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_hexdigest

import holdfast
from holdfast.live import roots
from holdfast.live.state import copy_timing
from holdfast.session.checkpointer import Checkpointer
from holdfast.testing import Slow
from system.loops.loops import BETWEEN, STRIDE, Loop, Swap, bits, drawn, point_of
from tiers.memory.agents import agent

SECONDS = 90.0
"""A loop that takes longer hangs: it computes for some milliseconds."""
PRELOAD = (
    "torch._dynamo", "torch.profiler._cupti_monitor", "numpy.ma", "holdfast.session.save_and_load",
    "holdfast.session.restart", "holdfast.live.step_loading", "holdfast.live.saving.merging",
    "holdfast.live.saving.blocking_saves", "holdfast.formats.looking", "holdfast.formats.read.detect",
    "holdfast.core.layout.locating", "holdfast.core.store.views",
)  # fmt: skip
"""What each process would import for itself otherwise: two seconds."""
LEFT_OUT = "was left out: one was in flight"
UNFINISHED = "the full step before them is not complete: nothing can be restored"
TOLD_APART = (LEFT_OUT, "[held-long]", UNFINISHED)
"""What a host that is busy, or a kill before the first full save is complete, makes of an honest training,
too."""
ELSEWHERE = "memory://elsewhere"
Digests = dict[str, Any]


def digests(value: Any, at: str, into: Digests) -> None:
    """Put what a value is, bit for bit, under the path of each leaf."""
    if isinstance(value, torch.Tensor):
        into[at] = value.dtype, value.shape, digest_of(bits(value))
    elif isinstance(value, np.ndarray):
        into[at] = value.dtype, value.shape, digest_of(value)
    elif hasattr(value, "state_dict"):
        digests(value.state_dict(), at, into)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            digests(one, f"{at}.{key}", into)
    elif isinstance(value, (list, tuple, deque)) and len(value) < 100:
        into[f"{at}.type"] = type(value).__name__, len(value)
        for k, one in enumerate(value):
            digests(one, f"{at}.{k}", into)
    else:
        into[at] = repr(value)


def digest_of(values: np.ndarray[Any, Any]) -> bytes | str:
    if values.nbytes < 1024:
        return values.tobytes()
    return xxh3_64_hexdigest(np.ascontiguousarray(values))


def digest(loop: Loop) -> Digests:
    found: Digests = {}
    digests(loop.state() | {"rng": holdfast.Rng()}, "", found)
    return found


def differing(a: Digests, b: Digests) -> list[str]:
    return sorted(key[1:] for key in a.keys() | b.keys() if a.get(key) != b.get(key))


class Twin:
    """Runs without holdfast, and keeps what the state was at each call, or at the end alone."""

    def __init__(self, loop: Loop, after: int | None = None) -> None:
        self.loop, self.at, self.keeps = loop, dict[int, Digests](), after is None
        loop.run(self, -STRIDE if after is None else after)
        self.end = digest(loop)

    def step(self, number: int) -> None:
        if self.keeps:
            self.at[number] = digest(self.loop)

    save = step

    def look(self, how: str) -> None: ...

    def passing(self, number: int) -> None: ...


class Ended(Exception):
    """An error of the script itself."""


class Log:
    """What is told, in a file that outlives the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(self, **fields: Any) -> None:
        os.write(self._file, (json.dumps(fields) + "\n").encode())

    def compare(self, what: str, seen: Digests, twin: Twin, number: int) -> None:
        """Tell what differs from the twin at a call, and whose it is instead."""
        names = differing(seen, twin.at[number])
        later = [
            n
            for n, all in twin.at.items()
            if names and all.get(f".{names[0]}") == seen.get(f".{names[0]}")
        ]
        if names:
            self.tell(
                wrong=f"{what}: {len(names)} differ, {names[:4]}, of {later or 'no call'}",
                names=names,
            )


class Live:
    """One start of the script: asks holdfast, and tells what the state was at each call."""

    def __init__(self, loop: Loop, ckpt: Checkpointer, twin: Twin, log: Log, *, dies: bool) -> None:
        self.loop, self.ckpt, self.twin, self.log = loop, ckpt, twin, log
        self.dies, self.last, self.due = dies, None, set[int]()

    def step(self, number: int) -> None:
        options = self.loop.options
        self.log.compare(f"live at step({number})", digest(self.loop), self.twin, number)
        if (
            number % options.every == 0
            and options.when_busy != "skip"
            and options.tier != "records"
        ):
            self.due.add(number)
        self.ckpt.step(number)

    def save(self, number: int) -> None:
        self.log.compare(f"live at save({number})", digest(self.loop), self.twin, number)
        self.due.add(number)
        self.last = self.ckpt.save(number)

    def look(self, how: str) -> None:
        try:
            if how == "wait":
                self.ckpt.wait()
            elif how == "done" and self.last is not None:
                self.last.done()
            elif how == "handle" and self.last is not None:
                self.last.wait()
            elif how == "load":
                holdfast.load(ELSEWHERE, {"x": torch.zeros(3)})
        except holdfast.HoldfastError as error:
            self.log.tell(told=f"{how}: {error}")

    def passing(self, number: int) -> None:
        options = self.loop.options
        time.sleep(options.pause_s * random.Random(number).random())
        if self.dies and number == options.end_at:
            if options.end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if options.end == "error":
                raise Ended


def opened(loop: Loop, root: Path) -> Checkpointer:
    options, more = loop.options, dict[str, Any]()
    every = {"durable": options.every}
    if options.tier == "memory":
        every["memory"], more["memory"] = STRIDE, holdfast.Memory()
    if options.tier == "records":
        every["delta"], more["delta"] = 1, holdfast.Delta()
    return Checkpointer(
        root, loop.state(), every=holdfast.Every(**every), when_busy=options.when_busy,
        on_error=options.on_error, deadline_s=SECONDS / 2, **more,
    )  # fmt: skip


def live(seed: int, root: Path, twin: Twin, log: Log, number: int, torch_seed: int = 0) -> None:
    """A start of the script, in this process."""
    loop = drawn(seed)
    loop.build(torch_seed)
    asked = None
    try:
        with opened(loop, root) as ckpt:
            asked = Live(loop, ckpt, twin, log, dies=number == 0)
            restored = int(ckpt.restore())
            if restored:
                log.compare(f"restored {restored}", digest(loop), twin, restored)
            if (restored == 0) == (torch_seed == 0) and not (
                restored and point_of(restored) in BETWEEN
            ):
                loop.run(asked, after=restored or -STRIDE)
                if names := differing(digest(loop), twin.end):
                    log.tell(wrong=f"end of a run from {restored}: {names[:4]}", names=names)
                log.tell(due=sorted(asked.due))
    except holdfast.HoldfastError as error:
        log.tell(refused=f"life {number}: {type(error).__name__}: {error}")
    except Ended:
        pass
    else:
        if restored == 0 and torch_seed != 0:  # begin as the twin did
            live(seed, root, twin, log, number)


def look_at_root(seed: int, root: Path, twin: Twin, log: Log) -> None:
    """Load each step that there is into fresh objects, and go on from some."""
    try:
        steps = holdfast.steps(root)
    except holdfast.HoldfastError as error:
        log.tell(steps=[], none=str(error))
        return
    log.tell(steps=steps)
    onward = [n for n in steps if n and point_of(n) not in BETWEEN]
    onward = onward[-1:] + random.Random(seed).sample(onward[:-1], min(len(onward[:-1]), 1))
    for n in steps:
        loop = drawn(seed)
        loop.build(torch_seed=n + 7)
        try:
            holdfast.load(root, loop.state() | {"rng": holdfast.Rng()}, step=n)
        except holdfast.HoldfastError as error:
            log.tell(wrong=f"step {n} does not load: {error}", names=[])
            continue
        log.compare(f"step {n}", digest(loop), twin, n)
        if n in onward and (names := differing(Twin(loop, n).end, twin.end)):
            log.tell(wrong=f"end of a run loaded from {n}: {names[:4]}", names=names)


def forked(call: Any) -> int:
    """Do it in a forked process, in which it may die."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        call()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def drive(seed: int, folder: Path) -> None:
    """A loop, from its twin to the verdict's facts, in this process and forks of it."""
    log, loop, root = Log(folder / "log"), drawn(seed), folder / "root"
    options = loop.options

    def tell(message: Any, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, holdfast.HoldfastWarning):
            is_apart = any(words in str(message) for words in TOLD_APART)
            log.tell(**{"left" if is_apart else "told": str(message)})

    warnings.simplefilter("always")
    warnings.showwarning = tell
    loop.build(0)
    twin = Twin(loop)
    pauses = random.Random(seed)

    def lag(event: holdfast.events.Event) -> None:
        if options.lag_s and threading.current_thread() is not threading.main_thread():
            time.sleep(pauses.random() * options.lag_s)

    def first() -> None:
        live(seed, root, twin, log, 0)

    holdfast.events.subscribe(lag)
    sys.setswitchinterval(options.switch_s)
    if options.as_large:
        copy_timing.COPIED_AT_CALL_BYTES = 0
    opens = roots.open_store
    if options.slow_s:
        roots.open_store = lambda url: Slow(opens(url), options.slow_s)
    if any(isinstance(part, Swap) and part.look == "load" for part in loop.parts):
        holdfast.save(ELSEWHERE, {"x": torch.ones(3)}, step=1)
    if options.end == "kill":
        status = forked(first)
        assert status in (-signal.SIGKILL, 0), f"the first life ended with {status}"
    else:
        first()
    if options.end != "close" or options.tier != "durable":
        live(seed, root, twin, log, 1, torch_seed=5)
    roots.open_store = opens
    look_at_root(seed, root, twin, log)
    log.tell(looked=True)


# -- many ------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    seed: int
    kind: str
    """`equal`, `told`, `refused`; `SILENT`, `HANG`, `CRASH` are faults."""
    facts: list[str]
    is_plain: bool

    @property
    def is_fault(self) -> bool:
        """True also for a word to a training in which there is nothing to tell."""
        return self.kind in ("SILENT", "HANG", "CRASH") or (self.is_plain and self.kind != "equal")

    def __str__(self) -> str:
        kind = f"{self.kind} (plain)" if self.is_plain else self.kind
        return "\n    ".join([f"{kind}: HOLDFAST_FUZZ_SEED={self.seed}", *self.facts])


def judged(seed: int, folder: Path, status: int) -> Verdict:
    path = folder / "log"
    lines = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    told = [line["told"] for line in lines if "told" in line]
    refused = [line["refused"] for line in lines if "refused" in line]
    words = told + refused + [x["left"] for x in lines if LEFT_OUT in x.get("left", "")]
    wrong = [
        line["wrong"] for line in lines if "wrong" in line and not is_named(line["names"], told)
    ]
    steps = {n for line in lines for n in line.get("steps", ())}
    due = {n for line in lines for n in line.get("due", ())}
    wrong += [
        f"step {n} is missing" for n in due - steps if not any(str(n) in word for word in words)
    ]
    facts = [
        *(f"wrong: {x}" for x in wrong),
        *(f"told: {x}" for x in told),
        *(f"refused: {x}" for x in refused),
    ]
    kind = "SILENT" if wrong else "refused" if refused else "told" if told else "equal"
    if status == -signal.SIGKILL:
        kind = "HANG"
    elif status or not any("looked" in line for line in lines):
        kind = "CRASH"
    if kind in ("HANG", "CRASH"):
        facts.append((folder / "stderr").read_text()[-6000:])
    return Verdict(seed, kind, facts, drawn(seed).is_plain)


def is_named(names: list[str], told: list[str]) -> bool:
    """True if notices, which end with their name in brackets, name the keys of all that differ."""
    notices = [text for text in told if text.endswith("]")]
    keys = {name.split(".")[0] for name in names}
    return bool(keys) and all(any(key in text for text in notices) for key in keys)


def drive_all(seeds: Iterable[int], place: Path, workers: int = 2) -> Iterator[Verdict]:
    """Verdicts, as they come."""
    for name in PRELOAD:
        importlib.import_module(name)
    warm_up()
    assert len(os.listdir("/proc/self/task")) == 1, "something that was imported has begun threads"
    gc.collect()
    gc.freeze()
    waiting, running = deque(seeds), dict[int, tuple[int, float]]()
    while waiting or running:
        while waiting and len(running) < workers:
            seed = waiting.popleft()
            folder = place / str(seed)
            folder.mkdir()
            running[begun(seed, folder)] = seed, time.monotonic() + SECONDS
        for pid, (seed, until) in [*running.items()]:
            if time.monotonic() > until:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid]
                yield judged(seed, place / str(seed), os.waitstatus_to_exitcode(status))
                shutil.rmtree(place / str(seed))
        time.sleep(0.001)


@contextmanager
def an_agent(node: Path, seeds: Iterable[int]) -> Iterator[None]:
    """One for all loops, if any of them has snapshots in memory."""
    os.environ["HOLDFAST_MEMORY_DIR"] = str(node)
    needs = any(drawn(seed).options.tier == "memory" for seed in seeds)
    with agent(node) if needs else nullcontext():
        yield


def warm_up() -> None:
    """Have torch prepare what it prepares once for a process, without holdfast."""
    for seed in range(10):
        loop = drawn(seed)
        loop.build(0)
        Twin(loop)


def begun(seed: int, folder: Path) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.setsid()
        os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT, 0o600), 2)
        faulthandler.dump_traceback_later(SECONDS * 0.9)
        drive(seed, folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("seeds", nargs="*", type=int)
    asked.add_argument("--num", type=int, default=0)
    asked.add_argument("--workers", type=int, default=2)
    given = asked.parse_args()
    seeds = given.seeds + [random.SystemRandom().randrange(1 << 40) for _ in range(given.num)]
    if not seeds:
        seeds = [int(seed) for seed in sys.stdin.read().split()]
    kinds: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-test-") as place,
        an_agent(Path(place) / "node", seeds),
    ):
        for verdict in drive_all(seeds, Path(place), given.workers):
            kinds[f"{'plain ' if verdict.is_plain else ''}{verdict.kind}"] += 1
            if not kinds.total() % 100:
                print(dict(kinds), file=sys.stderr, flush=True)
            if verdict.is_fault or given.seeds:
                print(f"{verdict}\n  {drawn(verdict.seed)}", flush=True)
    print(json.dumps(dict(kinds)), flush=True)


if __name__ == "__main__":
    main()
