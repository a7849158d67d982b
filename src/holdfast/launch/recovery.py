"""A function that recovers in place: its process goes on when another rank is lost.

    @holdfast.recoverable
    def main():
        dist.init_process_group()
        ...

Under python or torchrun the decorator does nothing.  Under `holdfast run` a rank whose peer is lost leaves
the function by an exception, drops its tensors and groups, and enters the function again with a rank from
the launcher.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from holdfast.base import events
from holdfast.base.arguments import function_of, text_of, unfit
from holdfast.base.errors import HoldfastError, UsageError
from holdfast.launch.channel import (
    TRACEBACK_CHARS,
    Beat,
    Done,
    End,
    Enter,
    Leave,
    Left,
    Marked,
    Moved,
    Stuck,
    WorkerEnd,
)
from holdfast.launch.liveness import Commits, Movement

if TYPE_CHECKING:
    from holdfast.launch.leftovers import Leftovers

P = ParamSpec("P")
T = TypeVar("T")

UNASKED_S = 0.2
"""Seconds that a rank may take to notice that its collectives have failed, before it is interrupted."""
UNHEARD_S = 0.3
"""Seconds after which an interrupt counts as unheard: the main thread is inside a call of torch."""
REPEAT_S = 1.0
"""Seconds between interrupts: one may be lost in a destructor, or in a handler of the script."""
IDLE = 0.1
"""Share of a core below which a process counts as idle; our own threads take less."""
CLEANUP_S = 3.0
"""Seconds for a rank to handle its own error before an interrupt breaks in."""
DROP_S = 10.0
"""Seconds for a rank to drop its tensors and groups; after that its process is replaced."""
BEAT_S = 0.25
MOVES_S = 1.0
"""Seconds between `Moved` messages of a rank that moves without a step."""
M_ARENA_MAX = -8
"""glibc's name for the number of heaps that threads share."""
INTERRUPT = signal.SIGRTMAX - 4
"""The signal with which a worker's own thread interrupts its main thread."""

WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Unless this variable is 0, NCCL's watchdog ends a process whose peer is gone before the process can leave
its function.  torch's agent sets the variable for every rank, so its value need not be the user's
choice."""


class PeerLost(BaseException):
    """Another rank is lost: raised in the main thread, so that this rank leaves its recoverable function.

    A BaseException, so that a script that catches Exception does not swallow it.
    """


_launched: _Launched | None = None
"""This process as a worker of `holdfast run`; None under python or torchrun."""
_kept: dict[str, Any] = {}


def recoverable(function: Callable[P, T]) -> Callable[P, T]:
    """Mark the function that trains, so that `holdfast run` can recover it in place.

    The function is called without a process group, makes one, and restores its state:
    `Checkpointer.restore` returns the step to go on from.  It may be entered many times in one process.
    Between two entries its local variables are dropped, and a Checkpointer that it left open is closed.  A
    recoverable function called inside it, or after it has returned, is a plain call.  Its own exceptions
    are recovered from like lost ranks, up to `--max-restarts`; SystemExit ends the process.
    """

    if not callable(function):
        raise unfit("recoverable", "function", function, "the function that trains")

    @functools.wraps(function)
    def enter(*args: P.args, **kwargs: P.kwargs) -> T:
        launched = _launched
        if launched is None or launched.has_begun:
            if launched is not None and launched.is_over:
                from holdfast.launch.registries import name_groups_otherwise

                name_groups_otherwise()
            return function(*args, **kwargs)
        return launched.run(lambda: function(*args, **kwargs))

    return enter


def kept(name: str, load: Callable[[], T]) -> T:
    """Return the result of `load()`, called only when this process first asks for `name`.

    For objects that take long to load and depend on neither rank nor step: a tokenizer, an index of data.
    """
    name = text_of(name, "kept", "name")
    function_of(load, "kept", "load", "without arguments", 0)
    if name not in _kept:
        _kept[name] = load() if _launched is None else _launched.keep(load)
    value: T = _kept[name]
    return value


def listen_to(end: WorkerEnd) -> None:
    """Make this process a worker of `holdfast run`; its environment is set already."""
    global _launched
    _launched = _Launched(end)


_NEVER_ENTERED = Left(0, "", "", False, 0)


class _Launched:
    """A worker between its launcher and its recoverable function."""

    def __init__(self, end: WorkerEnd) -> None:
        self.has_begun = False
        """The function has been called; every later call of a recoverable function is plain."""
        self.is_over = False
        """The function has ended for good."""
        self._end = end
        self._words: SimpleQueue[Enter | End] = SimpleQueue()
        self._attempt = 0
        self._runs = 0
        """The attempt whose function the main thread is in; 0: none."""
        self._is_out = threading.Event()
        """The main thread is out of the function of the newest attempt."""
        self._over = 0
        """The newest attempt to be left; the `Leave` may come before the attempt is entered."""
        self._told_to_leave = 0.0
        self._was_heard = threading.Event()
        """The main thread has heard the last interrupt."""
        self._heard_any = False
        """The main thread has heard an interrupt since the last `Leave`, so it is on its way out."""
        self._cutting = threading.Lock()
        """Held while connections are cut and groups aborted, so that no group is destroyed meanwhile."""
        self._before: Leftovers | None = None
        self._watchdog = os.environ.get(WATCHDOG, "0")
        """The user's choice, from the launcher's own environment."""

    def keep(self, load: Callable[[], T]) -> T:
        """Return `load()`; processes that it begins survive attempts."""
        return load() if self._before is None else self._before.keep(load)

    def run(self, function: Callable[[], T]) -> T:
        """Call the function again and again until all ranks are done; return its last result."""
        from holdfast.launch.leftovers import Leftovers
        from holdfast.launch.registries import name_groups_otherwise

        refuse_a_group()
        share_heaps()
        self.has_begun = True
        self._before = before = Leftovers()
        signal.signal(INTERRUPT, self._interrupt)
        threading.Thread(target=self._listen, name="holdfast-launcher", daemon=True).start()
        threading.Thread(target=self._beat, name="holdfast-beat", daemon=True).start()
        self._end.say(Marked())
        if self._end.is_spare:
            warm_up()
        gc.collect()
        gc.freeze()  # imported modules stay: `drop_groups` need not search them
        result: T | Left = _NEVER_ENTERED
        first = int(os.environ.get("HOLDFAST_ATTEMPT", "1"))
        word = self._words.get() if self._end.is_spare else Enter(first, {})
        while isinstance(word, Enter):
            self._enter(word)
            before.put_back()
            try:
                result = self._inside(function)
                self._end.say(Done(self._attempt))
            except (Exception, PeerLost) as error:
                self._runs = 0
                self._is_out.set()
                left = self._left(error)
                with _ends_within(DROP_S):
                    with self._cutting:
                        pass
                    clear_error(error)
                    del error
                    drop_groups()
                    before.end()
                    end_if_device_is_lost(left)
                self._end.say(left)
                result = left
            word = self._words.get()
            if isinstance(word, Enter) and not isinstance(result, Left):
                with _ends_within(DROP_S):
                    end_checkpointers(PeerLost("another rank was lost when this one was done"))
                    drop_groups()
                    before.end()
        self.is_over = True
        name_groups_otherwise()
        if isinstance(result, Left):
            raise SystemExit(0 if result is _NEVER_ENTERED else 1)
        return result

    def _inside(self, function: Callable[[], T]) -> T:
        try:
            self._runs = self._attempt
            if self._over >= self._attempt:
                raise PeerLost("another rank was lost before this one had entered")
            return function()
        except (Exception, PeerLost) as error:
            end_checkpointers(error)
            raise
        finally:
            self._runs = 0
            self._is_out.set()

    def _enter(self, word: Enter) -> None:
        events.last_step = 0  # before the number of the attempt, for `_beat` reads that first
        self._attempt = word.attempt
        os.environ.update(word.environment)
        os.environ[WATCHDOG] = self._watchdog
        write_to(word.stdout, word.stderr)

    def _left(self, error: BaseException) -> Left:
        is_own = not isinstance(error, PeerLost)
        error.__traceback__ = of_script(error.__traceback__)
        kind = "".join(traceback.format_exception_only(error)).strip()
        text = "".join(traceback.format_exception(error))
        return Left(self._attempt, kind[:500], text[-TRACEBACK_CHARS:], is_own, events.last_step)

    # -- on threads of their own ------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            word = self._end.hear()
            if isinstance(word, Leave):
                self._leave(word)
                continue
            if isinstance(word, Enter):
                self._is_out.clear()
            self._words.put(word)
            if isinstance(word, End):
                return

    def _leave(self, word: Leave) -> None:
        """Have the main thread leave the function, if it runs that attempt."""
        from holdfast.core.group.store_requests import lose_all
        from holdfast.launch.abort_connections import cut_connections, cut_store, on_devices

        self._over, self._told_to_leave = word.attempt, time.monotonic()
        self._heard_any = False
        lose_all("the ranks have lost each other")
        store_port = int(os.environ.get("MASTER_PORT", "0"))
        main = threading.main_thread().ident or 0
        with self._cutting:
            if on_devices() and self._runs == word.attempt:
                # A wait for an aborted collective returns as if all were well: it must be the last line.
                signal.pthread_kill(main, INTERRUPT)
            cut_connections(word.pids, word.hosts, store_port)
        patience_s, pulse = UNASKED_S, _Pulse(main)
        while not self._is_out.wait(patience_s):
            patience_s = REPEAT_S
            if self._runs != word.attempt:
                continue  # it is about to enter, and will see that the attempt is over
            self._was_heard.clear()
            signal.pthread_kill(main, INTERRUPT)
            if self._was_heard.wait(UNHEARD_S):
                continue
            with self._cutting:  # a connection may have been made meanwhile
                cut_connections(word.pids, word.hosts, store_port)
            cut_store(store_port)  # the main thread may wait for a key of the lost rank
            if pulse.has_stopped() and not self._is_out.wait(UNHEARD_S) and not self._heard_any:
                self._end.say(Stuck(word.attempt))

    def _interrupt(self, *_: object) -> None:
        """Raise PeerLost in the main thread, where this runs, unless it is leaving the function already."""
        self._was_heard.set()
        self._heard_any = True
        if self._runs and not self._is_leaving(sys.exc_info()[1]):
            raise PeerLost("another rank is lost")

    def _is_leaving(self, handled: BaseException | None) -> bool:
        """Tell whether the handled error leads out of the function: an earlier interrupt, or, for
        `CLEANUP_S`, any other error, such as that of a failed collective."""
        if handled is None:
            return False
        is_early = time.monotonic() - self._told_to_leave < CLEANUP_S
        before: BaseException | None = handled
        while before is not None and not isinstance(before, PeerLost):
            before = before.__context__
        return before is not None or is_early

    def _beat(self) -> None:
        """Report steps and commits; without a step for a while, report whether this process moves."""
        said, said_at, has_saved = Beat(0, 0), 0.0, threading.Event()
        commits, movement = Commits(), Movement()

        def note(event: events.Event) -> None:
            if event.name in ("snapshot.committed", "save.committed"):
                commits.at(self._attempt, events.last_step)
                commits.note(int(event.fields["step"]))
                has_saved.set()

        with events.listen(note):
            while not self.is_over:
                has_saved.clear()
                attempt, step, now = self._attempt, events.last_step, time.monotonic()
                commits.at(attempt, step)
                beat = Beat(attempt, step, commits.number)
                if beat != said:
                    self._end.say(beat)
                    said, said_at = beat, now
                elif now - said_at > MOVES_S:
                    said_at = now
                    if movement.is_seen():
                        self._end.say(Moved())
                has_saved.wait(BEAT_S)


class _Pulse:
    """The pulse of a collective: whether it still does anything.

    When the other rank is killed, gloo does not wake a thread that waits for the rest of a message, or for
    a connection: no connection is left to cut, and nothing within the process ends the wait.
    """

    def __init__(self, main: int) -> None:
        self._main = main
        self._before: tuple[float, float] | None = None

    def has_stopped(self) -> bool:
        """Tell whether the main thread is in a collective and this process was idle since the last call.

        Always False with devices: a thread waits for a running kernel in the same way.
        """
        import torch

        from holdfast.launch.abort_connections import on_devices

        now = time.monotonic(), time.process_time()
        before, self._before = self._before, now
        if before is None or torch.cuda.is_initialized() or on_devices():
            return False
        is_idle = now[1] - before[1] < IDLE * (now[0] - before[0])
        return is_idle and _is_in_collective(self._main)


def _is_in_collective(thread: int) -> bool:
    """Tell whether a thread is in a call of torch.distributed, other than reading or writing
    checkpoints."""
    import torch
    import torch.distributed as dist

    folder, frame = os.path.dirname(dist.__file__), sys._current_frames().get(thread)
    torchs = os.path.dirname(torch.__file__)
    of_a_call = tuple(os.path.join(torchs, name) for name in ("_ops.py", "_library", "autograd"))
    others = 0
    while frame is not None and others < 3:
        name = frame.f_code.co_filename
        if name.startswith(folder):
            return not name.startswith(os.path.join(folder, "checkpoint"))
        others += not name.startswith(of_a_call)  # as calls by way of torch.ops have below them
        frame = frame.f_back
    return False


@contextmanager
def _ends_within(limit_s: float) -> Iterator[None]:
    """End this process if the block takes longer, so that another process takes its rank."""

    def give_up() -> None:
        text = (
            f"holdfast: what the rank held was not dropped within {limit_s:g} s; the process ends"
        )
        print(text, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    watch = threading.Timer(limit_s, give_up)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of the launcher."""
    first = _next_of_script(trace)
    frame = first
    while frame is not None:
        frame.tb_next = _next_of_script(frame.tb_next)
        frame = frame.tb_next
    return first


def _next_of_script(trace: TracebackType | None) -> TracebackType | None:
    ours = (os.path.dirname(__file__), "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


def share_heaps() -> None:
    """Have new threads share two heaps of glibc, unless the user has set a number.

    Each attempt starts dozens of threads; with a heap for each thread, small remains would hold pages.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with suppress(AttributeError):  # not of glibc
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


def clear_error(error: BaseException) -> None:
    """Clear the variables of all frames of an error and its causes."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        before = current.__cause__ or current.__context__
        current.__traceback__ = current.__context__ = current.__cause__ = None
        current = before


def end_checkpointers(error: BaseException) -> None:
    """Close the Checkpointers that the function left open, as a `with` would: they hold root, threads,
    sockets."""
    ending = sys.modules.get("holdfast.session.ending")
    for checkpointer in () if ending is None else list(ending.opened):
        try:
            checkpointer.__exit__(type(error), error, error.__traceback__)
        except HoldfastError as failed:  # the fate of saves is reported
            events.emit("close.failed", error=str(failed))


def drop_groups() -> None:
    """Drop process groups, meshes, and reference cycles with tensors that the function left behind."""
    if "torch" not in sys.modules:
        return
    from holdfast.launch.registries import forget_groups

    forget_groups()
    gc.collect()
    with suppress(AttributeError):  # not of glibc
        ctypes.CDLL(None).malloc_trim(0)  # else the memory that attempts free would fragment


def end_if_device_is_lost(left: Left) -> None:
    """End this process if its device no longer computes, so that another process takes its rank.

    After an illegal access, for example, every later call fails until the process ends.
    """
    import torch

    if not torch.cuda.is_initialized():
        return
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", lambda _: True)
    devices = [i for i in range(torch.cuda.device_count()) if has_context(i)]  # and make none
    try:
        for device in devices:
            with torch.cuda.device(device):
                torch.ones(1, device="cuda").add_(1).item()
                torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        print(
            f"{left.error}\nholdfast: this process ends, its device is lost: {error}",
            file=sys.stderr,
        )
        sys.stderr.flush()
        os._exit(1)


def write_to(stdout: str, stderr: str) -> None:
    """Append the output of this process to these files from now on; a stream whose path is empty, or cannot
    be opened, stays as it is."""
    for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        with suppress(Exception):  # whatever a script has put there, or nothing
            stream.flush()  # type: ignore[union-attr]
    for path, fd in ((stdout, 1), (stderr, 2)):
        if path:
            try:
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(file, fd)
                os.close(file)
            except OSError as error:
                os.write(2, f"holdfast: no log is kept in {path}: {error}\n".encode())


def refuse_a_group() -> None:
    """UsageError if there is a process group already: the next attempt needs a new one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        raise UsageError(
            "a process group was made before the recoverable function was called",
            hint="call init_process_group, and make meshes and models, inside that function",
        )


def warm_up() -> None:
    """Train a tiny model for one step, since the first step of a process is slow.

    Regardless of the script's settings: these may turn gradients off, or use the device of another rank.
    """
    import torch

    try:
        with torch.device("cpu"), torch.enable_grad():
            model = torch.nn.Linear(8, 8)
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    except Exception as error:
        text = f"the first step of this spare will be slow, since its warm-up failed: {error!r}"
        print(f"holdfast: {text}", file=sys.stderr, flush=True)
    try:
        import torch.distributed.fsdp
        import torch.distributed.tensor
    except ImportError:
        pass
