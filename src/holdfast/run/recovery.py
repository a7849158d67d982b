"""A function that recovers in place: its process goes on when another rank is lost.

    @holdfast.recoverable
    def main():
        dist.init_process_group()
        ...

Under python or torchrun that is a plain call.  Under `holdfast run` a rank whose peer is lost leaves the
function by an exception, drops what it held, and enters it again with a rank that the launcher gives it.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from holdfast import events
from holdfast.arguments import function_of, text_of, unfit
from holdfast.run.channel import LONGEST, Beat, Done, End, Enter, Leave, Left, Marked, WorkerEnd

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_S = 0.2
"""Seconds that a rank may take to find that its collectives have failed, before it is interrupted."""
BEAT_S = 0.25
INTERRUPT = signal.SIGRTMAX - 4
"""The signal with which a worker's own thread interrupts its main thread."""


class PeerLost(BaseException):
    """Another rank is lost: this one leaves its recoverable function, wherever it is.

    No Exception, so that a script that catches those does not go on by itself.
    """


_launched: _Launched | None = None
"""The launcher's word to this process; None under python or torchrun."""
_kept: dict[str, Any] = {}


def recoverable(function: Callable[P, T]) -> Callable[P, T]:
    """Mark the function that trains, so that `holdfast run` can recover it in place.

    It is called without a process group, makes one, and restores its state: `Checkpointer.restore` says at
    which step it goes on.  It may be entered many times in one process; what it holds in local variables is
    dropped between.  A function that it calls, and one that is called after it has returned, is plain.
    Exceptions of its own are recovered from as lost ranks are, up to `--max-restarts`; SystemExit ends the
    process.
    """

    if not callable(function):
        raise unfit("recoverable", "function", function, "the function that trains")

    @functools.wraps(function)
    def enter(*args: P.args, **kwargs: P.kwargs) -> T:
        launched = _launched
        if launched is None or launched.is_inside:
            return function(*args, **kwargs)
        return launched.run(lambda: function(*args, **kwargs))

    return enter


def kept(name: str, load: Callable[[], T]) -> T:
    """Return what `load()` returned when this process asked for `name` first.

    For what is dear to load and does not depend on the rank or on the step: a tokenizer, an index of data.
    """
    name = text_of(name, "kept", "name")
    function_of(load, "kept", "load", "without arguments", 0)
    if name not in _kept:
        _kept[name] = load()
    value: T = _kept[name]
    return value


def listen_to(end: WorkerEnd) -> None:
    """From now on this process is a worker of `holdfast run`."""
    global _launched
    _launched = _Launched(end)


_NEVER_ENTERED = Left(0, "", "", False, 0)


class _Launched:
    """A worker between its launcher and its recoverable function."""

    def __init__(self, end: WorkerEnd) -> None:
        self.is_inside = False
        """The function has been called and has not come to its end; it calls others as it likes."""
        self._end = end
        self._words: SimpleQueue[Enter | End] = SimpleQueue()
        self._attempt = 0
        self._runs = 0
        """The attempt whose function the main thread is in; 0: in none."""
        self._is_out = threading.Event()

    def run(self, function: Callable[[], T]) -> T:
        """Call the function, again and again until all ranks are done; return what it returned."""
        self.is_inside = True
        signal.signal(INTERRUPT, self._interrupt)
        threading.Thread(target=self._listen, name="holdfast-launcher", daemon=True).start()
        threading.Thread(target=self._beat, name="holdfast-beat", daemon=True).start()
        self._end.say(Marked())
        if self._end.is_spare:
            warm_up()
        result: T | Left = _NEVER_ENTERED
        first = int(os.environ.get("HOLDFAST_ATTEMPT", "1"))
        word = self._words.get() if self._end.is_spare else Enter(first, {})
        while isinstance(word, Enter):
            self._enter(word)
            try:
                result = self._inside(function)
                self._end.say(Done(self._attempt))
            except (Exception, PeerLost) as error:
                left = self._left(error)
                forget(error)
                del error
                drop()
                self._end.say(left)
                result = left
            word = self._words.get()
            if isinstance(word, Enter):
                drop()
        self.is_inside = False
        if isinstance(result, Left):
            raise SystemExit(0 if result is _NEVER_ENTERED else 1)
        return result

    def _inside(self, function: Callable[[], T]) -> T:
        self._is_out.clear()
        self._runs = self._attempt
        try:
            return function()
        finally:
            self._runs = 0
            self._is_out.set()

    def _enter(self, word: Enter) -> None:
        self._attempt = word.attempt
        os.environ.update(word.environment)

    def _left(self, error: BaseException) -> Left:
        is_own = not isinstance(error, PeerLost)
        error.__traceback__ = of_script(error.__traceback__)
        kind = "".join(traceback.format_exception_only(error)).strip()
        text = "".join(traceback.format_exception(error))
        return Left(self._attempt, kind[:500], text[-LONGEST:], is_own, events.last_step)

    # -- on threads of their own ------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            word = self._end.hear()
            if isinstance(word, Leave):
                self._leave(word)
            else:
                self._words.put(word)
                if isinstance(word, End):
                    return

    def _leave(self, word: Leave) -> None:
        """Have the main thread leave the function, if it is in that attempt's."""
        from holdfast.group.line import lose_all
        from holdfast.run.cutting import cut

        lose_all("the ranks have lost each other")
        cut(word.pids, word.hosts, int(os.environ.get("MASTER_PORT", "0")))
        patience_s = PATIENCE_S
        while not self._is_out.wait(patience_s) and self._runs == word.attempt:
            signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)
            patience_s = 1.0

    def _interrupt(self, *_: object) -> None:
        if self._runs:
            raise PeerLost("another rank is lost")

    def _beat(self) -> None:
        said, pause = 0, threading.Event()
        while self.is_inside:
            if events.last_step != said:
                said = events.last_step
                self._end.say(Beat(said))
            pause.wait(BEAT_S)


def of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames between the launcher and the script, which tell nothing."""
    first = _next_of_script(trace)
    one = first
    while one is not None:
        one.tb_next = _next_of_script(one.tb_next)
        one = one.tb_next
    return first


def _next_of_script(trace: TracebackType | None) -> TracebackType | None:
    ours = (os.path.dirname(__file__), "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


def forget(error: BaseException) -> None:
    """Clear the frames that an error and those before it have left, with all that their variables held."""
    one: BaseException | None = error
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        before = one.__cause__ or one.__context__
        one.__traceback__ = one.__context__ = one.__cause__ = None
        one = before


def drop() -> None:
    """Let go of what the function left behind: process groups, meshes, and cycles with tensors."""
    if "torch" not in sys.modules:
        return
    import torch
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        try:
            dist.destroy_process_group()
        except Exception as error:
            print(f"holdfast: {error} while the process group was ended", file=sys.stderr)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def warm_up() -> None:
    """Take a step of our own: the first is slow, whatever the model is."""
    import torch

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    try:
        import torch.distributed.fsdp
        import torch.distributed.tensor
    except ImportError:
        pass
