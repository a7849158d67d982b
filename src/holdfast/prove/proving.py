"""The runs that prove a resume, one after the other, and what they come to.

whole       up to the last step
killed      killed at a step behind a save, and started again: up to there it is the whole run *again*,
            alike, so what differs there is not deterministic by itself
twice       killed two times, each after a save
elsewhere   goes on with other ranks from what the killed run had left

Before anything is said of a resume, the steps in question have been run twice without a kill.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.base.arguments import choice_of, count_of, seconds_of, share_of
from holdfast.base.errors import UsageError
from holdfast.prove.causes import Evidence, Finding, cause_of, of_begin, of_ranks
from holdfast.prove.comparing import Apart, Tolerance, elsewhere, first_apart
from holdfast.prove.courses import Life, SeenSave, Segment, TrainingTick, kind_of, moving
from holdfast.prove.report import ResumeProof
from holdfast.prove.running import CannotProve, Trial, kill_all
from holdfast.prove.workspace import Folder, Workspace, check_program, words_of

SHARE = 0.05
"""Tolerance: of the way that a tensor has come since two runs parted."""
_FEWEST, _CALL = 3, "prove"
_OPTION = r"--(nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus)"
"""The number of ranks, for torchrun and holdfast run, for accelerate, for deepspeed."""
_RANKS = re.compile(rf"{_OPTION}(=)?(\d+)?$")
_RANKS_IN_LINE = re.compile(rf"({_OPTION}[= ] *)[^\s'\"]+")


@dataclass(frozen=True)
class Plan:
    """What is to be proved, and how."""

    command: Sequence[str]
    steps: int = 20
    kill_at: int | None = None
    kill: str = "all"
    resume_with: str = ""
    ranks: int | None = None
    then: str = ""
    state: Sequence[str] = ()
    seed: int | None = None
    tolerance: float | None = None
    keep: bool = False
    patience_s: float = 300.0

    def __post_init__(self) -> None:
        count_of(self.steps, _CALL, "steps", least=_FEWEST)
        choice_of(self.kill, ("all", "one"), _CALL, "kill")
        seconds_of(self.patience_s, _CALL, "patience")
        for name in ("kill_at", "ranks"):
            if getattr(self, name) is not None:
                count_of(getattr(self, name), _CALL, name)
        if self.seed is not None:
            count_of(self.seed, _CALL, "seed", least=0)
        if self.tolerance is not None:
            share_of(self.tolerance, _CALL, "tolerance")
        if self.kill_at is not None and self.kill_at >= self.steps:
            raise UsageError(f"--kill-at {self.kill_at}: the runs go from step 1 to {self.steps}")
        words_of(self.resume_with)
        if self.then:
            check_program(words_of(self.then))
        elif self.ranks is not None:
            _for_ranks(self.command, self.ranks)


Said = Callable[[str], None]


def prove(
    plan: Plan, say: Said = lambda _: None, *, env: Mapping[str, str] = os.environ
) -> ResumeProof:
    """Run a training several times, and compare; blocks until it is done, and leaves nothing behind.

    `say` is told in a sentence what is being done; `env`: the environment of the command.  Raises
    CannotProve for a training that saves nothing, makes no step, ends early, asks for input or writes to
    where its other runs would; UsageError for a plan that does not fit the command.
    """
    began = time.monotonic()
    workspace = Workspace(plan.command, plan.state, env)
    try:
        proof = _Proving(plan, workspace, say).run()
    finally:
        kill_all(workspace.temporary.name)
        for name in os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []:
            if name.startswith(workspace.temporary.name):
                shutil.rmtree(f"/dev/shm/{name}", ignore_errors=True)
        workspace.remove_temporary()
        if not plan.keep:
            workspace.remove()
    proof.kept = str(workspace.path) if plan.keep else ""
    proof.seconds = time.monotonic() - began
    return proof


class _Proving:
    """The runs of one proof."""

    def __init__(self, plan: Plan, workspace: Workspace, say: Said) -> None:
        self.plan, self.workspace, self.say = plan, workspace, say
        self.seed = random.randrange(1 << 16) if plan.seed is None else plan.seed
        self.random = random.Random(self.seed)
        self.proof = ResumeProof(seed=self.seed)
        self.course: dict[int, list[TrainingTick]] = {}
        self.tolerance: Tolerance | None = None
        self.again_up_to = 0
        self.beyond = False
        self.steps = plan.steps

    def run(self) -> ResumeProof:
        """Make the runs in turn, and stop at the first that differs."""
        self._whole()
        kill_at = self._kill_steps()
        left = self._killed(kill_at[:1])
        if self.proof.finding is None and kill_at[1:]:
            self._killed(kill_at[1:])
        if self.proof.finding is None and (self.plan.ranks or self.plan.then) and left is not None:
            self._elsewhere(left)
        proof = self.proof
        proof.exact = proof.finding is None and proof.nondeterminism is None
        is_near = proof.finding is None and not self.beyond
        proof.within = (
            proof.nondeterminism is not None and is_near and self.plan.tolerance is not None
        )
        return proof

    def _whole(self) -> None:
        self.say(f"whole: up to step {self.steps}")
        folder = self.workspace.new()
        launch = Trial(folder, self.steps, self.steps, {}, self.plan.patience_s)
        life = launch.run(folder.command)
        self.course = {s.rank: s.ticks for s in life.segments}
        made = min((len(t) for t in self.course.values()), default=0) - (life.status is None)
        if life.status is not None:
            what = (
                f"made {made} steps of {self.steps}" if made > 0 else "made no step of an optimizer"
            )
            raise CannotProve(
                "ended-early" if made > 0 else "no-steps",
                f"the training {what} and ended with status {life.status}; it printed\n{launch.output()}",
                hint=f"--steps {made} goes as far as it does" if made >= _FEWEST else None,
            )
        self.proof.steps, self.proof.ranks = self.steps, max(life.world, len(self.course))
        self.proof.unseen = life.unseen
        self.moves = {rank: moving(ticks) for rank, ticks in self.course.items()}
        self.proof.saved = [s for s in life.saved() if s > 0]
        if not any(tick.batches for ticks in self.course.values() for tick in ticks):
            self.proof.unseen["batches"] = "no DataLoader gave any"
        if not [s for s in self.proof.saved if s < self.steps]:
            raise CannotProve(
                "nothing-saved",
                f"the training saved nothing in {self.steps} steps",
                hint="let it save more often, or make more steps: --steps N",
            )

    def _kill_steps(self) -> list[int]:
        """Draw a step to be killed at, and two to be killed at one after the other, each behind a save."""
        first, last = min(self.proof.saved), self.steps - 1
        if self.plan.kill_at is not None:
            return [self.plan.kill_at]
        low = min(first + 1, last)
        one = self.random.randint(low, last)
        if self.plan.kill == "one" or last - low < 2:
            return [one]
        two = self.random.randint(low, last - 2)
        return [one, two, self.random.randint(two + 1, min(last, two + 4))]

    def _killed(self, kill_at: Sequence[int]) -> Folder | None:
        """Kill a run at each of some steps, go on, and compare; returns its folder as it was left first."""
        plan, folder = self.plan, self.workspace.new()
        words = ", then at ".join(map(str, kill_at))
        self.say(f"killed at step {words}, and started again")
        lives: list[Life] = []
        own = dict(self.course)
        left = None
        for until in (*kill_at, self.steps):
            launch = Trial(folder, until, self.steps, own if lives else {}, plan.patience_s)
            command = _with(folder.command, plan.resume_with) if lives else folder.command
            life = launch.run(command, "all" if lives else plan.kill)
            lives.append(life)
            if len(lives) == 1:
                self._compare_again(life)
            elif life.segments and not self._compare(life, lives, own, kill_at):
                return None  # what differs is said, though it may have ended early, too
            self._check_end(life, launch)
            if self.tolerance is not None:
                own = _joined(life, own)
            if len(lives) == 1 and (plan.ranks or plan.then):
                left = self.workspace.copy(folder)
            if launch.recovered is not None and launch.recovered.segments:
                lives.append(launch.recovered)
                if not self._compare(launch.recovered, lives, own, kill_at):
                    return None
                self._check_end(launch.recovered, launch)
                break
        self._note_resumes(kill_at, lives)
        return left

    def _note_resumes(self, kill_at: Sequence[int], lives: Sequence[Life]) -> None:
        begins = [min(s.begin for s in life.segments) for life in lives[1:] if life.segments]
        self.proof.resumes.append((tuple(kill_at), tuple(begins)))

    def _check_end(self, life: Life, launch: Trial, ranks: Collection[int] | None = None) -> None:
        """Raise CannotProve for a life that ended by itself, or in which a rank made no step."""
        missing = sorted(
            {*(self.course if ranks is None else ranks)} - {s.rank for s in life.segments}
        )
        if life.status is None and not missing:
            return
        made = max((s.begin + len(s.ticks) - 1 for s in life.segments), default=0)
        where = f"behind step {made}" if life.segments else "without a step"
        what = f"ended with status {life.status} {where}"
        if life.status is None:
            what = f"went on without {', '.join(f'rank {r}' for r in missing[:8])}"
        raise CannotProve(
            "ended-early",
            f"run once more, the training {what}; it printed\n{launch.output()}",
            hint="--resume-with ARGS adds what it needs to go on",
        )

    def _first_apart(self, segment: Segment, course: Sequence[TrainingTick]) -> Apart | None:
        return first_apart(segment, course, self.moves.get(segment.rank, set()), self.tolerance)

    def _compare_again(self, life: Life) -> None:
        """Compare what is not resumed: where it differs, the training is not deterministic by itself."""
        if self.tolerance is not None:
            return
        for segment in sorted(life.segments, key=lambda s: s.rank):
            if segment.begin or segment.rank not in self.course:
                continue
            self.again_up_to = max(self.again_up_to, len(segment.ticks))
            while (apart := self._first_apart(segment, self.course[segment.rank])) is not None:
                if not apart.kinds <= {"counter", "tensor"}:
                    break
                clocks = {d.key for d in apart.differences}
                self.moves[segment.rank] -= clocks
                self.proof.unseen |= {
                    k.partition(" ")[2]: "as a clock, it differs in each run" for k in clocks
                }
            if apart is not None:
                self._is_not_deterministic(apart)
                return

    def _is_not_deterministic(self, apart: Apart) -> None:
        names = ", ".join(sorted(apart.kinds))
        one = cause_of(Evidence(apart, Life(), (), 0, self.course))
        self.proof.nondeterminism = replace(
            one, cause="not-deterministic",
            why=f"two runs alike differ there by themselves ({names})",
        )  # fmt: skip
        share = self.plan.tolerance if self.plan.tolerance is not None else SHARE
        self.tolerance = Tolerance(
            share, {"param", "state", "grad", "loss", "buffer", "average"} | apart.kinds
        )
        params = [(k, i) for k, i in apart.expected.items.items() if kind_of(k) == "param"]
        blind = {
            k: "too long, or of a layout, for a tolerance" for k, i in params if i.sketch is None
        }
        self.proof.unseen |= blind
        self.beyond = len(blind) == len(params)

    def _compare(
        self,
        life: Life,
        lives: Sequence[Life],
        own: Mapping[int, list[TrainingTick]],
        kill_at: Sequence[int],
    ) -> bool:
        """Compare a resumed life with the course; False, and a finding, where it differs."""
        killed = kill_at[min(len(lives) - 2, len(kill_at) - 1)]
        saves = [s for one in lives[:-1] for s in one.saves if s.step <= killed]
        notes = [s for one in lives[:-1] for s in one.notes if s.step <= killed]
        written = [s for s in self.proof.saved if s <= killed]
        finding = of_ranks(life)
        for segment in sorted(life.segments, key=lambda s: s.rank) if finding is None else ():
            course = own.get(segment.rank) or next(iter(own.values()))
            finding = finding or of_begin(segment, written, saves, course)
        finding = finding or self._apart(life, saves, notes, own)
        self.proof.finding = finding
        if finding is not None:
            self._note_resumes(kill_at, lives)
        return finding is None

    def _apart(
        self,
        life: Life,
        saves: Sequence[SeenSave],
        notes: Sequence[SeenSave],
        own: Mapping[int, list[TrainingTick]],
    ) -> Finding | None:
        """Return what differs first, of all ranks: what does not follow from what another rank has."""
        found = [
            (apart, segment)
            for segment in life.segments
            if (apart := self._first_apart(segment, own.get(segment.rank) or []))
        ]
        found.sort(key=lambda pair: pair[0].order)
        if not found:
            return None
        if self.tolerance is None and found[0][0].step > self.again_up_to:
            self.say("again, whole: is it the training itself that differs there?")
            folder = self.workspace.new()
            launch = Trial(folder, self.steps, self.steps, {}, self.plan.patience_s)
            self._compare_again(launch.run(folder.command))
            self.again_up_to = self.steps  # though it may have ended early
            return self._apart(life, saves, notes, own)
        findings = [
            cause_of(Evidence(apart, life, saves, segment.begin, own, notes))
            for apart, segment in found
        ]
        named = [one for one in findings if one.cause != "unexplained"]
        if not named and self.tolerance is not None:
            self.beyond = (
                True  # no sign tells whether the resume, or the training itself, is the reason
            )
            return None
        return (named or findings)[0]

    def _elsewhere(self, left: Folder) -> None:
        plan = self.plan
        command = words_of(plan.then) if plan.then else _for_ranks(plan.command, plan.ranks or 1)
        folder = self.workspace.copy(left, command)
        self.say(f"elsewhere: {shlex.join(command)}")
        launch = Trial(folder, self.steps, self.steps, self.course, plan.patience_s)
        life = launch.run(_with(folder.command, "" if plan.then else plan.resume_with))
        self._check_end(life, launch, range(life.world))
        begins = {s.begin for s in life.segments}
        self.proof.elsewhere_ranks = life.world
        finding = of_ranks(life)
        found = {s.rank: s.ticks for s in life.segments}
        if finding is None:
            result = elsewhere(found, min(begins), self.course)
            self.proof.elsewhere = result
            if not result.compared:
                raise CannotProve(
                    "elsewhere",
                    f"on {life.world} ranks no parameter has the name of one on {self.proof.ranks}, and a "
                    "layout that can be compared",
                )
            share = plan.tolerance if plan.tolerance is not None else SHARE
            if not min(begins):
                finding = Finding(
                    "no-resume", 1, 0, "the step at which training went on: 0", "it began anew"
                )
            elif result.worst > share:
                finding = Finding(
                    "elsewhere", result.step, 0, result.where.partition(" ")[2],
                    f"it is {result.worst:.0%} of the way that it came since step {min(begins)} away from "
                    f"where {self.proof.ranks} ranks brought it; the tolerance is {share:.0%}",
                )  # fmt: skip
            elif result.samples:
                finding = Finding(
                    "elsewhere", result.step, 0, f"{result.samples} samples",
                    "they were given on these ranks or on those, and not on both",
                )  # fmt: skip
        self.proof.finding = finding


def _joined(life: Life, course: Mapping[int, list[TrainingTick]]) -> dict[int, list[TrainingTick]]:
    """The course of a run that is not deterministic: what it went through, then that of the whole run."""
    own = dict(course)
    for one in life.segments:
        ticks = own.get(one.rank, [])
        own[one.rank] = [*ticks[: one.begin], *one.ticks, *ticks[one.begin + len(one.ticks) :]]
    return own


def _with(command: Sequence[str], words: str) -> list[str]:
    """A command with more arguments at its end; in a line for the shell, too."""
    if not words:
        return list(command)
    if command[:2] == ["sh", "-c"]:
        return ["sh", "-c", f"{command[2]} {words}"]
    return [*command, *words_of(words)]


def _for_ranks(command: Sequence[str], ranks: int) -> list[str]:
    """A command of a launcher, or one line for the shell, for another number of ranks."""
    if len(command) == 1:
        line, found = _RANKS_IN_LINE.subn(rf"\g<1>{ranks}", command[0])
        out, is_found = [line], found > 0
    else:
        out, is_found = _words_for_ranks(command, ranks)
    if not is_found:
        raise UsageError(
            f"--ranks {ranks}: the command has no --nproc-per-node, --num_processes or --num_gpus",
            hint='--then "COMMAND" names the whole command',
        )
    return out


def _words_for_ranks(command: Sequence[str], ranks: int) -> tuple[list[str], bool]:
    """The words for another number of ranks, and whether any of them is the number."""
    out, is_next, is_found = [], False, False
    for word in command:
        match = _RANKS.match(word)
        if is_next:
            word, is_next, is_found = str(ranks), False, True
        elif match and match[2]:
            word, is_found = f"--{match[1]}={ranks}", True
        elif match:
            is_next = True
        out.append(word)
    return out, is_found
