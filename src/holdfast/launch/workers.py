"""The workers of one node: forked, told to leave and to enter, watched, replaced.

For torch's elastic agent, `Workers` is a set of processes.  It outlives an attempt, and so do workers that
leave their recoverable function upon a `Leave`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from string import Template
from typing import Any

from torch.distributed.elastic.multiprocessing.api import PContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from holdfast.base.background import ending
from holdfast.base.errors import AgentError, need
from holdfast.base.host import stat_fields
from holdfast.launch.channel import (
    Beat,
    Done,
    End,
    Enter,
    FromWorker,
    LauncherEnd,
    Leave,
    Left,
    Marked,
    Moved,
    Stuck,
)
from holdfast.launch.forkserver import ForkServer, Start
from holdfast.launch.hangs import SURE_S, RankProgress, StepPace
from holdfast.launch.nodes import may_be_of_a_peer
from holdfast.launch.sockets import SpareFiles, wait_readable
from holdfast.launch.worker import STACKS, write_error

GRACE_S = 0.25
"""Seconds before an error of a rank counts: the end of a peer may be its cause."""
SETTLE_S = 5.0
"""Seconds after an attempt has begun before a new spare is forked."""
_LEAVE_S = 10.0
"""Seconds for workers to leave their function before they are killed."""
STACKS_S = 2.0
"""Seconds that a process may take to write its stacks."""
SAVE_S = 30.0
"""Seconds for an unmarked script to save upon SIGTERM when a node joins; torch's limit as well."""
UNMARKED_S = 60.0
"""Seconds without a call of a recoverable function before options that need one are complained about."""
UNSTEPPED_S = 600.0
"""Seconds without a step of a marked script before --hang-s is complained about."""
BAD_SPARES = 3
"""Number of spares that may end without a rank before no more are forked."""


@dataclass(frozen=True)
class Launch:
    """The script of every worker of this node, and the options for managing workers."""

    server: ForkServer
    words: list[str]
    is_module: bool
    spares: int = 0
    nproc_min: int | None = None
    """Least number of ranks with which this node goes on while processes for the others start; None:
    all."""
    hang_s: float | None = None
    say: Callable[[str], None] = print
    spare_files: SpareFiles = field(default_factory=SpareFiles)


@dataclass
class RankProcess:
    """The process of a rank or a spare."""

    pid: int
    end: LauncherEnd
    attempt: int
    """The attempt for which the process was forked."""
    is_spare: bool = False
    """The process has no rank, and waits to replace a lost one."""
    is_marked: bool = False
    """The process has reached its recoverable function."""
    left: Left | None = None
    is_done: bool = False
    is_ending: bool = False
    """The process was told that the run is over, and hears nothing more."""
    is_put_down: bool = False
    """The process was killed without being at fault: it cannot recover in place, or nothing wakes it."""
    is_stuck: bool = False
    """The process was told to leave, but waits in a collective that nothing ends."""
    status: int | None = None
    """The exit status; None while the process runs."""
    progress: RankProgress = field(default_factory=lambda: RankProgress(time.monotonic()))
    left_at: float = 0.0
    commits: int = 0
    """Number of commits of a newer step that the process has reported, in memory or in storage."""
    doubtful_s: float = 0.0
    """For a doubtful hang: seconds without progress, though the process may have been at work."""

    @property
    def step(self) -> int:
        """The last step that the process has done."""
        return self.progress.step

    @property
    def is_out(self) -> bool:
        """The process is out of its function, and waits for a message."""
        return (
            self.status is None and not self.is_ending and (self.left is not None or self.is_done)
        )


need("torch", PContext, "_close", "_poll", "_start")


class Workers(PContext):  # type: ignore[misc]
    """All workers of this node, by their local ranks, and the spares."""

    def __init__(self, launch: Launch, **known: Any) -> None:
        super().__init__(**known)
        self.launch = launch
        self.attempt = 1
        self.hosts: list[str] = []
        """Addresses of the other nodes."""
        self.may_end: Callable[[], bool] = lambda: True
        """Called when all workers are done: tells whether the workers of all other nodes are done too."""
        self.slots = list(range(self.nprocs))
        """The slots that have a rank in this attempt, in the order of the local ranks."""
        self.left_out: set[int] = set()
        """Slots that no longer get a rank."""
        self.has_saved = False
        """A worker has reported a commit, in memory or in storage."""
        self._workers: dict[int, RankProcess] = {}
        self._spares: list[RankProcess] = []
        self._entered = time.monotonic()
        self._pace = StepPace(launch.hang_s)
        self._bad_spares = 0
        self.has_ended = False
        """All workers were told that the run has ended or failed."""
        self._complaints = set[str]()
        """Names of the complaints that were printed; each is printed once."""

    @property
    def everyone(self) -> list[RankProcess]:
        return [*self._workers.values(), *self._spares]

    # -- what the agent asks for ------------------------------------------------------------------

    def _start(self) -> None:
        for rank in range(self.nprocs):
            self._workers[rank] = self._fork(rank)

    def pids(self) -> dict[int, int]:
        return {rank: self._workers[slot].pid for rank, slot in enumerate(self.slots)}

    def _poll(self) -> RunProcsResult | None:
        self._listen()
        self._look_for_a_mark()
        self._look_for_a_step()
        failures = {self.slots.index(slot): failure for slot, failure in self._failures()}
        if failures:
            return RunProcsResult(failures=failures)
        if all(w.is_done or w.status == 0 for w in self._workers.values()):
            if self.may_end():
                self._end(is_good=True)
            if all(w.status == 0 for w in self._workers.values()):
                return RunProcsResult(return_values=dict.fromkeys(range(len(self.slots)), None))
        self._keep_spares()
        return None

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """End every worker by `death_sig`; kill those that remain after `timeout` seconds."""
        everyone = self.everyone
        with suppress(AgentError):  # if the fork server is gone, so are its workers
            for number, limit_s in ((death_sig, timeout), (signal.SIGKILL, 5.0)):
                for worker in everyone:
                    self._kill(worker, number)
                self._until(self._have_ended, limit_s)
        for worker in everyone:
            worker.end.close()
        self._spares.clear()

    def _have_ended(self) -> bool:
        """Tell whether every process has ended.  A process that waits for a message gets `End`: upon the
        signal it has saved and returned from its function, or it is a spare."""
        for worker in self.everyone:
            is_waiting = worker.is_out or (worker.is_spare and worker.is_marked)
            if is_waiting and not worker.is_ending:
                worker.end.say(End(False))
                worker.is_ending = True
        return all(worker.status is not None for worker in self.everyone)

    # -- from one attempt to the next -------------------------------------------------------------

    def worker(self, rank: int) -> RankProcess:
        return self._workers[self.slots[rank]]

    def leave(self, *, is_calm: bool = False) -> None:
        """Have every worker leave its function; kill workers that cannot leave, or not in time.

        If no rank has failed (`is_calm`), an unmarked script may save first, as with torchrun.
        """
        self._pace.rest()
        inside = [w for w in self._workers.values() if w.status is None and not w.is_out]
        saving = [w for w in inside if is_calm and not w.is_marked]
        for worker in saving:
            worker.is_put_down = True
            self._kill(worker, signal.SIGTERM)
        self._leave_in_place([w for w in inside if w not in saving])
        self._until(lambda: all(w.status is not None for w in saving), SAVE_S)
        for worker in saving:
            self._kill(worker, signal.SIGKILL)
        self._until(lambda: all(w.status is not None for w in saving), 5.0)

    def _leave_in_place(self, inside: list[RankProcess]) -> None:
        pids = [w.pid for w in self._workers.values()]
        for worker in inside:
            is_in_place = worker.is_marked and not worker.is_ending
            can_leave = is_in_place and not _is_stopped(worker.pid)
            if not can_leave or not worker.end.say(Leave(self.attempt, pids, self.hosts)):
                worker.is_put_down = not is_in_place
                self._kill(worker, signal.SIGKILL)
        self._until(
            lambda: all(w.is_out or w.is_stuck or w.status is not None for w in inside),
            _LEAVE_S,
        )
        left = [w for w in inside if not w.is_out and w.status is None]
        stuck, late = [w for w in left if w.is_stuck], [w for w in left if not w.is_stuck]
        for those, why in (
            (stuck, "wait in a collective for a lost rank, and nothing wakes them"),
            (late, f"did not leave within {_LEAVE_S:g} s"),
        ):
            if those:
                self.launch.say(f"killed, since they {why}: {', '.join(str(w.pid) for w in those)}")
                self._tell_stacks(those)
            for worker in those:
                worker.is_put_down = worker.is_stuck
                self._kill(worker, signal.SIGKILL)
        self._until(lambda: all(w.is_out or w.status is not None for w in inside), 5.0)

    def failed(self) -> list[int]:
        """Return the local ranks that ended badly, or left their function by their own error."""
        return [
            rank
            for rank, slot in enumerate(self.slots)
            if (worker := self._workers[slot]) and not worker.is_put_down
            if worker.status not in (None, 0) or (worker.left is not None and worker.left.is_own)
        ]

    def choose_slots(self) -> int:
        """Choose the slots that get a rank in the next attempt, and return their number.

        A slot without a process gets a spare.  If no spare is ready, the slot stays empty as long as
        `nproc_min` allows.
        """
        fit = [slot for slot in range(self.nprocs) if slot not in self.left_out]
        vacant = [
            slot for slot in fit if slot not in self._workers or not self._workers[slot].is_out
        ]
        without = vacant[len(self._ready()) :]
        least = self.launch.nproc_min
        if least is None or len(vacant) == len(fit):
            without = []
        else:
            without = without[max(least - (len(fit) - len(without)), 0) :]
        self.slots = [slot for slot in fit if slot not in without]
        return len(self.slots)

    def may_leave_out(self, slot: int) -> bool:
        least = self.launch.nproc_min
        return least is not None and self.nprocs - len(self.left_out | {slot}) >= least

    def failure(self, rank: int) -> ProcessFailure:
        """Return the failure of a rank, for torch."""
        worker = self.worker(rank)
        slot = self.slots[rank]
        if worker.left is not None:
            write_error(self.error_files[slot], worker.left.kind, worker.left.error)
        return ProcessFailure(slot, worker.pid, worker.status or 1, self.error_files[slot])

    @property
    def entered_s(self) -> float:
        """Seconds since this attempt began."""
        return time.monotonic() - self._entered

    @property
    def are_counting(self) -> bool:
        """Whether a worker has reported a step or a commit: it has a Checkpointer, which will save."""
        return self.has_saved or any(w.step > 0 for w in self._workers.values())

    @property
    def commits(self) -> int:
        """Number of commits of a newer step, by the worker that reported most; comparable within an
        attempt."""
        return max((w.commits for w in self._workers.values()), default=0)

    @property
    def is_marked(self) -> bool:
        """Whether every worker has reached its recoverable function."""
        return all(w.is_marked for w in self._workers.values())

    @property
    def can_grow(self) -> bool:
        """Whether a process is ready for a slot that has no rank."""
        return self._num_vacant > 0 and bool(self._ready())

    @property
    def _num_vacant(self) -> int:
        return int(self.nprocs) - len(self.left_out) - len(self.slots)

    def enter(self, envs: dict[int, dict[str, str]]) -> None:
        """Begin the next attempt, in processes that have left, spares, and new processes."""
        self._listen()  # a process may have ended meanwhile
        self.attempt += 1
        self.envs = envs
        self.has_ended = False
        self._bad_spares = 0
        self._entered = time.monotonic()
        for slot in [slot for slot in self._workers if slot not in self.slots]:
            self._dismiss(self._workers.pop(slot))
        for rank in self.slots:
            with suppress(OSError):
                if os.path.isfile(self.error_files[rank]):  # and not /dev/null
                    os.unlink(self.error_files[rank])  # of the last attempt
            worker = self._workers.get(rank)
            while worker is None or not self._enters(worker, rank):
                if worker is not None:
                    self._bury(worker)
                self._workers[rank] = worker = self._spare() or self._fork(rank)
            worker.left, worker.is_done = None, False
            worker.is_spare = worker.is_stuck = False
            worker.progress.enter(time.monotonic())
        self._pace.go_on(time.monotonic())

    def _enters(self, worker: RankProcess, rank: int) -> bool:
        """Have a process take a rank; False if it cannot."""
        if worker.status is not None or worker.is_ending:
            return False
        if worker.is_marked and (worker.is_out or worker.is_spare):
            files = (self.stdouts[rank], self.stderrs[rank]) if worker.is_spare else ()
            return worker.end.say(Enter(self.attempt, self._environment(rank), *files))
        return not worker.is_marked and worker.attempt == self.attempt

    def _bury(self, worker: RankProcess) -> None:
        """Close the channel of an ended process; if it was killed, kill its child processes."""
        worker.end.close()
        if worker.status is not None and worker.status < 0:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)

    def _dismiss(self, worker: RankProcess) -> None:
        """Kill a worker whose slot no longer has a rank."""
        self._kill(worker, signal.SIGKILL)
        worker.end.close()

    def give_up(self) -> None:
        """The run has failed: end the workers that wait for a message."""
        self._end(is_good=False)

    def _end(self, *, is_good: bool) -> None:
        if not self.has_ended:
            self.has_ended = True
            for worker in self.everyone:
                worker.end.say(End(is_good))
                worker.is_ending = True

    # -- processes --------------------------------------------------------------------------------

    def _environment(self, rank: int) -> dict[str, str]:
        error_file = self.error_files[rank]
        return {
            **self.envs[self.slots.index(rank)],
            **({} if self.launch.nproc_min is None else {"LOCAL_RANK": str(rank)}),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt - 1),
            "TORCHELASTIC_ERROR_FILE": "" if error_file == os.devnull else error_file,
            "HOLDFAST_ATTEMPT": str(self.attempt),
        }

    def _fork(self, rank: int, *, is_spare: bool = False) -> RankProcess:
        self.launch.spare_files.free()
        end = LauncherEnd()
        known = {} if is_spare else {"local_rank": str(rank)}
        start = Start(
            words=[Template(word).safe_substitute(known) for word in self.launch.words],
            is_module=self.launch.is_module,
            environment={} if is_spare else self._environment(rank),
            stdout="" if is_spare else self.stdouts[rank],
            stderr="" if is_spare else self.stderrs[rank],
            is_spare=is_spare,
        )
        pid = self.launch.server.start(start, end.other, end.stacks)
        end.other.close()
        return RankProcess(pid, end, self.attempt, is_spare)

    def _ready(self) -> list[RankProcess]:
        return [w for w in self._spares if w.is_marked and w.status is None]

    def _spare(self) -> RankProcess | None:
        for worker in self._ready():
            if not _is_stopped(worker.pid):
                self._spares.remove(worker)
                return worker
        return None

    def _keep_spares(self) -> None:
        """Fork missing spares while training goes on, if there is a recoverable function to wait at."""
        for worker in [w for w in self._spares if w.status is not None]:
            self._spares.remove(worker)
            self._tell_of_spare(worker)
        is_calm = time.monotonic() - self._entered > SETTLE_S or self.attempt == 1
        wanted = self.launch.spares * is_calm + self._num_vacant
        is_wanted = len(self._spares) < wanted and self._bad_spares < BAD_SPARES
        if is_wanted and self.is_marked and not self.has_ended:
            self._spares.append(self._fork(len(self._spares) % self.nprocs, is_spare=True))

    def _look_for_a_mark(self) -> None:
        """Complain once about options that do nothing for an unmarked script."""
        given = {"--spares": self.launch.spares > 0, "--hang-s": self.launch.hang_s is not None}
        named = [option for option, is_given in given.items() if is_given]
        workers = self._workers.values()
        is_late = self.entered_s > UNMARKED_S or any(w.status is not None for w in workers)
        if not named or not is_late or any(w.is_marked for w in workers):
            return
        self._complain(
            "mark",
            "no rank has called a function that is marked with @holdfast.recoverable: "
            f"until then {' and '.join(named)} {'do' if len(named) > 1 else 'does'} nothing",
        )

    def _look_for_a_step(self) -> None:
        """Complain once about a limit on steps for a marked script that reports none."""
        asked_s, is_late = self.launch.hang_s, self.entered_s > UNSTEPPED_S
        are_at_work = self.is_marked and not self.has_ended
        have_stepped = any(w.step > 0 for w in self._workers.values())
        if asked_s is None or not is_late or not are_at_work or have_stepped:
            return
        self._complain(
            "step",
            f"no rank has called Checkpointer.step: --hang-s {asked_s:g} limits the time between steps; "
            f"before the first step, ranks hang that do nothing for {max(asked_s, SURE_S):g} s",
        )

    def _complain(self, of: str, text: str) -> None:
        """Print a complaint, once by its name."""
        if of not in self._complaints:
            self._complaints.add(of)
            self.launch.say(text)

    def _tell_of_spare(self, worker: RankProcess) -> None:
        """Report the end of a spare, and that no more are forked if there were too many."""
        worker.end.close()
        if self.has_ended:
            return
        self._bad_spares += 1
        where = "waited for a rank" if worker.is_marked else "came to its recoverable function"
        when = "while it" if worker.is_marked else "before it"
        self.launch.say(
            f"a spare (process {worker.pid}) has ended {when} {where}: it {ending(worker.status or 0)}"
        )
        if self._bad_spares == BAD_SPARES:
            self.launch.say(
                f"that was the {BAD_SPARES}rd in a row: no spare is forked until the next recovery"
            )

    def _tell_stacks(self, workers: list[RankProcess]) -> None:
        """Print the stacks of all threads of workers."""
        before = {w.pid: w.end.stacks_size() for w in workers}
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, STACKS)
        self._until(lambda: all(w.end.stacks_size() > before[w.pid] for w in workers), STACKS_S)
        self._until(lambda: False, 0.1)  # a worker may be in the middle of writing
        for worker in workers:
            rank = next((r for r, w in self._workers.items() if w is worker), None)
            text = worker.end.stacks_since(before[worker.pid]).strip()
            text = text or "none: the process is stopped, or in the kernel"
            self.launch.say(f"stacks of local rank {rank} (process {worker.pid}):\n{text}")

    def _kill(self, worker: RankProcess, number: signal.Signals) -> None:
        if worker.status is not None:
            return
        numbers = [number] if number == signal.SIGKILL else [number, signal.SIGCONT]
        for each in numbers:
            with suppress(ProcessLookupError):
                try:
                    os.killpg(worker.pid, each)
                except ProcessLookupError:  # it was forked just now, and leads no group yet
                    os.kill(worker.pid, each)

    def _until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while not is_so() and (left := until - time.monotonic()) > 0:
            self.pause(min(left, 0.05))
            self._listen()

    def pause(self, limit_s: float) -> None:
        """Wait until a worker has ended or sent a message, for at most `limit_s`."""
        ends = [w.end for w in self.everyone if w.status is None]
        wait_readable([self.launch.server, *ends], limit_s)

    def _listen(self) -> None:
        ended = self.launch.server.ended()
        for worker in self.everyone:
            for message in worker.end.heard() if worker.status is None else ():
                self._note(worker, message)
            if worker.pid in ended:
                worker.status = ended[worker.pid]

    def _note(self, worker: RankProcess, message: FromWorker) -> None:
        now = time.monotonic()
        if isinstance(message, Marked):
            worker.is_marked = True
        elif isinstance(message, Beat):
            if message.attempt == self.attempt and message.step != worker.progress.reached:
                self._pace.stepped(worker.progress, message.step, now)
            worker.commits = message.commits
            self.has_saved = self.has_saved or message.commits > 0
        elif isinstance(message, Moved):
            self._pace.moved(worker.progress, now)
        elif isinstance(message, Stuck):
            worker.is_stuck = message.attempt == self.attempt
        elif isinstance(message, Left) and message.attempt == self.attempt:
            worker.left, worker.left_at = message, now
            worker.progress.step = max(worker.step, message.step)
        elif isinstance(message, Done) and message.attempt == self.attempt:
            worker.is_done = True

    # -- failures ---------------------------------------------------------------------------------

    def _failures(self) -> Iterator[tuple[int, ProcessFailure]]:
        dead = {r: w for r, w in self._workers.items() if w.status not in (None, 0)}
        for rank, worker in dead.items():
            yield rank, ProcessFailure(rank, worker.pid, worker.status or 0, self.error_files[rank])
        if dead:
            return
        now = time.monotonic()
        erred = [
            (may_be_of_a_peer(w.left.kind), w.left_at, r, w)
            for r, w in self._workers.items()
            if w.left is not None
        ]
        first = min((left_at for _, left_at, _, _ in erred), default=now)
        for _, _, rank, worker in sorted(erred, key=lambda e: e[:3])[:1]:
            if now - first > GRACE_S and worker.left is not None:
                write_error(self.error_files[rank], worker.left.kind, worker.left.error)
                yield rank, ProcessFailure(rank, worker.pid, 1, self.error_files[rank])
                return
        yield from self._hung(now)

    def _hung(self, now: float) -> Iterator[tuple[int, ProcessFailure]]:
        """Yield ranks that make no progress; print their stacks, and kill the ranks to blame.

        A rank whose function has returned does not count: it waits for the others.
        """
        running = {r: w for r, w in self._workers.items() if w.status is None and not w.is_out}
        if not any(w.is_marked for w in running.values()) or self.has_ended:
            return
        limit_s = self._pace.exceeded_s([w.progress for w in running.values()], now)
        if limit_s is None:
            return
        self._pace.rest()
        stopped = {r for r, w in running.items() if _is_stopped(w.pid)}
        reached = {r: w.progress.reached for r, w in running.items()}
        behind, ahead = min(reached.values()), max(reached.values())
        to_blame = stopped or {r for r, step in reached.items() if step == behind < ahead}
        self._tell_of_a_hang(limit_s, running, to_blame)
        self._tell_stacks([w for r, w in running.items() if r not in stopped])
        for rank in to_blame:
            self._kill(running[rank], signal.SIGKILL)
        self._until(lambda: all(running[r].status is not None for r in to_blame), 5.0)
        for rank in to_blame or running:
            worker = running[rank]
            yield rank, ProcessFailure(rank, worker.pid, worker.status or 1, self.error_files[rank])

    def _tell_of_a_hang(
        self, limit_s: float, running: dict[int, RankProcess], to_blame: set[int]
    ) -> None:
        """Report that ranks hang, and note whether that is in doubt."""
        whom = ", ".join(f"local rank {r}" for r in sorted(to_blame)) or "all"
        ahead = max(w.progress.reached for w in running.values())
        when = f"after step {ahead}" if ahead else "before the first step of this attempt"
        self.launch.say(f"no rank has done a step for {limit_s:.0f} s ({when}; to blame: {whom})")
        is_sure = bool(to_blame) or self._pace.is_sure(limit_s)
        for worker in running.values():
            worker.doubtful_s = 0.0 if is_sure else limit_s
        self._complain(
            "hang",
            "if the script was at work meanwhile, such as in an evaluation on another machine or in an "
            "upload, it needs a larger --hang-s",
        )

    def doubt(self, limit_s: float) -> None:
        """Raise the limit, since ranks without progress for `limit_s` may have been at work."""
        longer_s = self._pace.doubt(limit_s)
        self.launch.say(
            f"no rank is to blame: from now on the limit without progress is {longer_s:.0f} s"
        )


def _is_stopped(pid: int) -> bool:
    return stat_fields(pid)[:1] in ([b"T"], [b"t"])
