"""Runs the command of a training, hears of each step, and kills it where it is to end."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from holdfast.base.errors import HoldfastError, UsageError
from holdfast.prove.courses import (
    Gathering,
    Life,
    SeenSave,
    Segment,
    TrainingTick,
    begin_of,
    renamed,
)
from holdfast.prove.messages import (
    ADDRESS,
    GO,
    LAST,
    AfterStep,
    BeforeStep,
    Incoming,
    LoadedNames,
    Message,
    Trouble,
    WasLoaded,
    WasSaved,
)
from holdfast.prove.workspace import Folder

_LOOK_S = 0.05
_QUIET_S = 0.4
"""Files that did not change for so long are complete."""
_MOST_QUIET_S = 30.0
_OTHERS_S = 30.0
"""How long ranks that have stopped wait for those that have not come; some have no optimizer."""
_FIRST = 3
"""Ticks of a process after which a state_dict that an optimizer takes is none of its resume."""
_LOGS = (".log", ".txt", ".jsonl", ".csv", ".out", ".err")


class CannotProve(HoldfastError):
    """The command cannot be proved, for a reason that is not its resume: it never saves, or never steps."""

    def __init__(self, cause: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.cause = cause


@dataclass
class _Rank:
    """One attempt of one process."""

    channel: socket.socket
    segment: Segment
    is_held: bool = False
    made_last: bool = False

    @property
    def made(self) -> int:
        """Steps of the whole course that are behind it: the tick in hand has not been made yet."""
        return self.segment.begin + len(self.segment.ticks) - 1


class Trial:
    """A process tree of the training, from its start until all ranks have made a step, or it ends."""

    def __init__(
        self,
        folder: Folder,
        until: int,
        last: int,
        course: dict[int, list[TrainingTick]],
        patience_s: float,
    ) -> None:
        """`until`: the last step to be made; it is observed afterwards, too, if it is `last`.
        `course`: what the ranks went through before, to find out where a process goes on; empty at first.
        """
        self.folder, self.until, self.last = folder, until, last
        self.course, self.patience_s = course, patience_s
        self.life = Life()
        self.recovered: Life | None = None
        """What came after the loss of one rank, in the same launch."""
        self._ranks: dict[tuple[int, int], _Rank] = {}
        self._gatherings: dict[socket.socket, tuple[int, Gathering]] = {}
        self._files: dict[str, tuple[int, int, int]] = {}
        self._heard = time.monotonic()
        self._trouble: Trouble | None = None
        self._anew: set[socket.socket] = set()
        """Processes that restored after they had stepped: they begin with the next step."""
        self._seen_stopped: float | None = None
        self._log = folder.path / "output.log"

    def run(self, words: Sequence[str], kill: str = "all") -> Life:
        """Run until all ranks have made step `until`, and kill them; or one of them, with `kill="one"`.

        Returns what was seen, up to the loss of the one.  Raises CannotProve for a training that asks,
        writes elsewhere or is silent.
        """
        life = self.life
        with suppress(FileNotFoundError):
            os.unlink(self.folder.socket)
        self._files = self._look_at_files()
        with (
            socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector,
            self._log.open("ab") as log,
        ):  # fmt: skip
            listener.bind(self.folder.socket)
            listener.listen(512)
            selector.register(listener, selectors.EVENT_READ)
            process = self._start(words, log)
            try:
                self._listen(selector, listener, process)
                if self.life.status is None and kill == "one":
                    self._lose_one(selector, listener, process)
            finally:
                kill_all(f"{ADDRESS}={self.folder.socket}", process)
                for key in list(selector.get_map().values()):
                    if key.fileobj is not listener:
                        key.fileobj.close()  # type: ignore[union-attr]
        return life

    def _start(self, words: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                words, cwd=self.folder.cwd, env=self.folder.env, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(f"{words[0]} cannot be started: {error.strerror}") from None

    def output(self, lines: int = 12) -> str:
        """Return the last lines that the training has printed."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _listen(
        self, selector: Any, listener: socket.socket, process: subprocess.Popen[bytes]
    ) -> None:
        self._heard = time.monotonic()
        while not self._is_done():
            for key, _ in selector.select(_LOOK_S):
                if key.fileobj is listener:
                    channel, _ = listener.accept()
                    selector.register(channel, selectors.EVENT_READ, Incoming(channel))
                    continue
                messages = key.data.read()
                if messages is None:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    continue
                for message in messages:
                    self._heard = time.monotonic()
                    self._take(key.fileobj, message)
            self._check()
            self.life.status = process.poll()
            if self.life.status is not None:
                return

    def _take(self, channel: socket.socket, message: Message) -> None:
        attempt, gathering = self._gatherings.setdefault(channel, (0, Gathering()))
        if isinstance(message, Trouble):
            self._trouble = message
        elif isinstance(message, (WasLoaded, LoadedNames)):
            gathering.note(message)
            if isinstance(message, WasLoaded) and message.kind == "group" and self.course:
                rank = next((r for r in self._ranks.values() if r.channel is channel), None)
                if rank is not None and len(rank.segment.ticks) < _FIRST:
                    self._anew.add(channel)
        elif isinstance(message, WasSaved):
            made = max((r.made for r in self._ranks.values()), default=-1)
            has_tensors = any(not leaf.text for leaf in message.leaves.values())
            seen = self.life.saves if has_tensors else self.life.notes
            seen.append(SeenSave(made + 1, message.leaves, id(channel)))
        elif isinstance(message, AfterStep):
            for rank in self._ranks.values():
                if rank.channel is channel:
                    order = rank.segment.ticks[-1].optimizers
                    items = gathering.of_course(message.items, gathering.order[0], order)
                    rank.segment.add(TrainingTick(items, optimizers=order))
                    rank.made_last = True
        else:
            if message.attempt != attempt:
                gathering = Gathering()
                self._gatherings[channel] = message.attempt, gathering
            course = self.course.get(message.rank) or next(iter(self.course.values()), [])
            tick = gathering.add(message, course[-1].optimizers if course else ())
            if tick is None:
                channel.sendall(GO)
            elif self._is_none_of_training(message.rank, tick):
                gathering.again(tick)
                channel.sendall(GO)
            else:
                self._tick(channel, message, tick)

    def _is_none_of_training(self, rank: int, tick: TrainingTick) -> bool:
        """Whether a step only has states made: nothing came before it, as it does in training."""
        if tick.losses or tick.batches or any(s.rank == rank for s in self.life.segments):
            return False
        course = self.course.get(rank, [])
        return bool(course) and all(one.losses for one in course[:3])

    def _tick(self, channel: socket.socket, step: BeforeStep, tick: TrainingTick) -> None:
        self.life.world = step.world
        self.life.unseen |= step.unseen
        key = step.pid, step.attempt
        if key not in self._ranks or channel in self._anew:
            self._anew.discard(channel)
            course = self.course.get(step.rank) or next(iter(self.course.values()), [])
            segment = Segment(step.rank, 0, renamed=renamed(tick, course) if course else {})
            segment.add(tick)
            again = [s for s in self.life.segments if s.rank == step.rank and key in self._ranks]
            self.life.segments = [s for s in self.life.segments if s not in again] + [segment]
            for old in [k for k, r in self._ranks.items() if r.segment.rank == step.rank]:
                del self._ranks[old]
            self._ranks[key] = _Rank(channel, segment)
            self._find_begins()
        else:
            self._ranks[key].segment.add(tick)
        rank = self._ranks[key]
        if step.rank == min(r.segment.rank for r in self._ranks.values()):
            self._note_files(rank.made)
        if rank.made >= self.until:
            rank.is_held = True
        else:
            is_last = rank.made + 1 == self.until == self.last
            channel.sendall(LAST if is_last else GO)
            rank.is_held = is_last

    def _find_begins(self) -> None:
        """Find out where ranks go on: each by itself, and then as the others tell, be they late or not."""
        if not self.course:
            return
        segments = self.life.segments
        courses = [self.course.get(s.rank) or next(iter(self.course.values())) for s in segments]
        begins = [begin_of(s.ticks[0], course) for s, course in zip(segments, courses, strict=True)]
        for number, one in enumerate(segments):
            others = [b for s, b in zip(segments, begins, strict=True) if s.rank != one.rank]
            begins[number] = begin_of(one.ticks[0], courses[number], others)
            if len(one.ticks) < _FIRST or begins[number] + len(one.ticks) < self.until:
                one.begin = begins[number]

    def _is_done(self) -> bool:
        held = [
            r for r in self._ranks.values() if r.is_held and (r.made_last or self.until < self.last)
        ]
        begins = {r.segment.begin for r in self._ranks.values()}
        if len(begins) > 1 and len(self._ranks) == self.life.world and self.course:
            return True  # they train, if at all, what is no step of the course
        if not held:
            return False
        if len(held) < self.life.world and time.monotonic() - self._heard < _OTHERS_S:
            return False
        return self._is_quiet()

    def _is_quiet(self) -> bool:
        """Whether saves that go on in the background have come to their end."""
        began = self._seen_stopped = self._seen_stopped or time.monotonic()
        if self.until == self.last:
            return True
        now = self._look_at_files()
        while time.monotonic() - began < _MOST_QUIET_S:
            time.sleep(_QUIET_S)
            before, now = now, self._look_at_files()
            if now == before:
                break
        made = max(r.made for r in self._ranks.values())
        self._note_files(made)
        return True

    def _check(self) -> None:
        if self._trouble is not None and self._trouble.kind == "input":
            raise CannotProve(
                "asked-for-input", f"the training asked for input: {self._trouble.about!r}",
                hint="give it by arguments: nobody is there to answer",
            )  # fmt: skip
        if self._trouble is not None and self._trouble.kind == "observer":
            raise CannotProve("no-steps", f"a step could not be observed:\n{self._trouble.about}")
        if self._trouble is not None:
            raise CannotProve(
                "one-place",
                f"the training writes {self._trouble.about}, where its other runs would write, too",
                hint="name the folder with --state DIR, so that each run gets its own",
            )
        if time.monotonic() - self._heard > self.patience_s:
            held = sum(r.is_held for r in self._ranks.values())
            what = (
                f"{held} of {self.life.world} ranks made step {self.until}" if held else "no step"
            )
            raise CannotProve(
                "no-steps",
                f"{what} within {self.patience_s:.0f} s; the training printed\n{self.output()}",
                hint="only optimizers of torch.optim.Optimizer are seen; --patience S waits longer",
            )

    def _lose_one(self, selector: Any, listener: socket.socket, process: Any) -> None:
        """Kill the last rank, let the others go on, and see what comes of it."""
        pid, _ = max(self._ranks, key=lambda key: self._ranks[key].segment.rank)
        os.kill(pid, signal.SIGKILL)
        gone = self._ranks
        self.course = {s.rank: s.ticks for s in self.life.segments}
        self.until, self._seen_stopped, self._ranks = self.last, None, {}
        self.life = self.recovered = Life(world=self.life.world)
        for (one, _), rank in gone.items():
            if one != pid:
                with suppress(OSError):
                    rank.channel.sendall(GO)
        self._listen(selector, listener, process)

    def _look_at_files(self) -> dict[str, tuple[int, int, int]]:
        return {
            path: (found.st_ino, found.st_mtime_ns, found.st_size)
            for path, found in self.folder.files()
            if not path.endswith(_LOGS) and "tfevents" not in path
        }

    def _note_files(self, step: int) -> None:
        now = self._look_at_files()
        changed = sum(found[2] for path, found in now.items() if self._files.get(path) != found)
        self._files = now
        if changed:
            self.life.written.append((step, changed))


def kill_all(mark: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Kill every process whose environment has `mark`, until there is none."""
    for _ in range(100):
        found = [pid for pid in _with(mark)]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        if not found:
            return
        time.sleep(0.02)


def _with(mark: str) -> list[int]:
    out = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    out.append(int(entry.name))
    return out
