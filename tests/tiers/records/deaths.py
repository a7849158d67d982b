"""What may happen to a training process: SIGKILL at a moment, a writer that stands still, helpers."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from holdfast.base import background
from holdfast.store import LocalStore
from holdfast.tiers.records import planning, queue
from holdfast.tiers.records.copying import GradientCopier, OpenRecord
from holdfast.tiers.records.queue import Queue
from tiers.records import dying_writer
from tiers.records.test_damage import the_writer


def arrange(at: str, number: int | str, out: Path) -> None:
    """Die at the `number`-th time that this process comes to a moment: `copy` (half of a step's gradients
    are copied), `plan` (the plan of records is put), `announce` and `announced` (before and after a writer
    is announced), `put` and `put-done` (before and after a record is
    handed to the writer), `delete` (of a file of the log), `writer` (with its writer, before that calls
    to change a file: for the `number`-th time, or by that name)."""
    count = itertools.count(1)

    def now() -> bool:
        return next(count) == number

    def before(call: Callable[..., Any], counts: Callable[..., bool]) -> Callable[..., Any]:
        def killed(*args: Any, **kwargs: Any) -> Any:
            if counts(*args) and now():
                die()
            return call(*args, **kwargs)

        return killed

    match at:
        case "copy":
            whole = GradientCopier._copy_on_host

            def half(making: GradientCopier, record: OpenRecord, grads: list[Any]) -> None:
                if now():
                    whole(making, record, grads[: len(grads) // 2])
                    die()
                whole(making, record, grads)

            GradientCopier._copy_on_host = half  # type: ignore[method-assign]
        case "plan":
            planning.put_plan = before(planning.put_plan, lambda *_: True)
        case "announce":
            queue.announce = before(queue.announce, lambda *_: True)
        case "announced":
            announce = queue.announce

            def announced(*args: Any) -> None:
                announce(*args)
                if now():
                    die()

            queue.announce = announced
        case "put":
            Queue.put = before(Queue.put, lambda *_: True)  # type: ignore[method-assign]
        case "put-done":
            put = Queue.put

            def done(queue: Queue, *args: Any) -> None:
                put(queue, *args)
                if now():
                    die()

            Queue.put = done  # type: ignore[method-assign]
        case "delete":
            of_log = before(LocalStore.delete, lambda _, key: key.startswith("log/"))
            LocalStore.delete = of_log  # type: ignore[method-assign]
        case "writer":
            dying_writer.install(which=[number], calls=out / "calls", trainer=True)
        case _:
            raise AssertionError(at)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_writer(reached: Callable[[], int], step: int, still_s: float) -> None:
    """The writer of this process stands still, as on storage that does not answer, until training has
    `reached` a step or has itself made no step for so long."""
    pid = the_writer()
    os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        last, since = reached(), time.monotonic()
        while last < step and time.monotonic() - since < still_s:
            time.sleep(0.02)
            if reached() > last:
                last, since = reached(), time.monotonic()
        os.kill(pid, signal.SIGCONT)

    threading.Thread(target=go_on, daemon=True).start()


def delay_writer(seconds: float) -> None:
    """The writer begins so much after its process was started, as on a busy machine."""
    wait = ["sh", "-c", f'sleep {seconds}; exec "$@"', "sh"]

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        late = wait if "holdfast.tiers.records.writer" in command else []
        return subprocess.Popen([*late, *command], **options)

    background.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=start, DEVNULL=subprocess.DEVNULL
    )


def helper(seconds: float) -> int:
    """A process that is forked from this one, with all that it holds open, and sleeps."""
    pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(0)
    return pid


def halve(optimizer: Any, *_: Any) -> None:
    """A hook that changes gradients just before the step."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.mul_(0.5)
