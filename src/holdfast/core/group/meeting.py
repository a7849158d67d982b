"""The meeting: no rank begins a collective call before all ranks have made it.

If one rank never makes a collective call, the others hang for the timeout of the process group, usually
half an hour, and the error names neither rank nor call.  So every collective call of holdfast begins with
a meeting over the job's store, without a collective: each rank writes what it calls, and waits until all
have.

    rank 0    save() ──► in += 1 ─ ─ ─ waits for the outcome ─ ─ ─┬──► goes on
    rank 1         save() ──► in += 1 ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┤
    rank 2                                save() ──► in += 1 = 3 ─┴─ outcome: all

Meetings are numbered in the store: `now` is the first that is not over.  One counter decides each
(`<number>/in`): it counts the ranks that have come and sums up marks of their calls, so the last rank
sees whether all called the same.  A rank that times out marks the same counter as over.  So a meeting
takes place for all ranks or for none; a later rank comes to the next one, and ranks that gave up may call
again.

A rank sends two messages, and then polls for the outcome less and less often.  Only after the deadline
does it look which ranks are missing.
"""

from __future__ import annotations

import os
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from holdfast.base.errors import AgentError, Deadline, UsageError, need, warn_user
from holdfast.base.wire import decode_json
from holdfast.core.group.gloo import Gloo
from holdfast.core.group.store_requests import StoreLine

_COUNT = 20
"""Bits of a meeting's counter that count ranks; above them lies the sum of their marks, of 16 bits each."""
_OVER = 1 << 60
"""Added to the counter of a meeting that a rank has given up."""
_CONFIRM_S = 5.0
"""Seconds in which the ranks must confirm that they have come."""
_ANSWER_S = 1.0
"""Seconds in which the store must answer the last questions of a rank that gives up."""
_FIRST_PAUSE_S = 0.0001
_HOST_STAYS_S = 1.5
"""Seconds that rank 0 stays after a failed call, so that others read the outcome before it ends."""
_HINT = "every rank must make this call; look at that rank's log: it may have died, hang, or be elsewhere"


class _Card(msgspec.Struct, frozen=True, array_like=True):
    """The last call of a rank."""

    number: int
    call: str
    holds: str
    gave_up_s: float = 0.0
    """Seconds after which the rank gave up; 0 if it did not."""


class _Outcome(msgspec.Struct, frozen=True, array_like=True):
    """End of a meeting: `all`; `anew`: all, whose `holds` differ; or in vain: `differ`, `missing`."""

    kind: str
    text: str = ""
    rank: int | None = None
    there: int = 0
    """If in vain: number of ranks that have come, and will read this."""


@dataclass(frozen=True, slots=True)
class Met:
    """A meeting that has taken place."""

    number: int
    call: str
    is_anew: bool
    """True if `holds` of the ranks differ: an earlier call ended in the middle."""


class Meeting:
    """The ranks of a job, and the store over which they meet."""

    def __init__(self, line: StoreLine, rank: int, size: int) -> None:
        self.line = line
        self.rank = rank
        self.size = size
        self._is_sure = False
        """True once a meeting has taken place: later counts include no rank of an earlier attempt."""
        self.held: dict[float, tuple[int, Gloo]] = {}
        """gloo groups by deadline, each with the number of the meeting at which it was made."""

    def meet(
        self, call: str, limit_s: float, *, holds: str = "", tell_after_s: float | None = None
    ) -> Met:
        """Block until every rank has come to `call`.

        Deadline names the ranks missing after `limit_s`; UsageError if ranks called something else.
        `holds`: identity of this rank's shared resources, which should be equal on all.  `tell_after_s`:
        seconds after which to warn which ranks are missing.
        """
        until = time.monotonic() + limit_s
        came: list[int] = []
        """Meetings that this rank came to, even if the store answered too late."""
        try:
            while True:
                number, outcome = self._once(call, holds, came, limit_s, until, tell_after_s)
                if outcome.kind == "missing" or self._confirm(number, call, until):
                    break
        except BaseException:
            self.line.leave_word(lambda s: self._leave(s, came, call, holds, limit_s))
            raise
        if outcome.there:
            self._have_read(number, call, outcome.there)
        if outcome.kind == "differ":
            raise UsageError(
                f"the ranks are at different calls: {outcome.text}",
                hint="all ranks make the same calls in the same order",
            )
        if outcome.kind == "missing":
            raise Deadline(outcome.text, rank=outcome.rank, hint=_HINT)
        return Met(number, call, outcome.kind == "anew")

    # -- within a call that has begun -------------------------------------------------------------

    def roll_call(self, met: Met, limit_s: float) -> list[int]:
        """Report that a call failed, and return the ranks that do not report it, too, within `limit_s`."""

        def names(ranks: Iterable[int]) -> dict[int, str]:
            return {rank: f"{met.number}/trouble/{rank}" for rank in ranks}

        until, missing = time.monotonic() + limit_s, names(range(self.size))
        until += _HOST_STAYS_S * (self.rank == 0)
        self._ask(met.call, lambda s: s.set(f"{met.number}/trouble/{self.rank}", b"1"), until)
        for pause in self.pauses():
            asked = missing
            there = self._ask(
                met.call, lambda s: [r for r, k in asked.items() if s.check([k])], until
            )
            missing = names(r for r in asked if r not in there)
            if not missing or time.monotonic() > until:
                return list(missing)
            time.sleep(pause)
        raise AssertionError

    # -- the protocol -----------------------------------------------------------------------------

    def _once(
        self,
        call: str,
        holds: str,
        came: list[int],
        limit_s: float,
        until: float,
        tell_after_s: float | None,
    ) -> tuple[int, _Outcome]:
        """Come to the next meeting; return its number, and how it ended."""
        mark = zlib.crc32(f"{call} {holds}".encode()) & 0xFFFF
        number, total = self._ask(call, lambda s: self._enter(s, call, holds, mark, came), until)
        if total & _mask(_COUNT) == self.size:
            same = total >> _COUNT == mark * self.size
            return number, self._ask(call, lambda s: self._settle(s, number, same), until)
        return number, self._await(number, call, holds, limit_s, until, tell_after_s)

    def _confirm(self, number: int, call: str, until: float) -> bool:
        """True if all counted ranks are alive; the same on all ranks.

        A torchrun that restarts its workers may give them the store of dead workers, some of which died
        during a meeting.  So all ranks must confirm the first meeting of a process.
        """
        if self._is_sure:
            return True
        key, stop = f"{number}/sure", min(until, time.monotonic() + _CONFIRM_S)
        count = self._ask(call, lambda s: s.add(key, 1), until)
        for pause in self.pauses():
            if count == self.size or time.monotonic() > stop:
                break
            time.sleep(pause)
            count = self._ask(call, lambda s: s.add(key, 0), until)
        mine = "yes" if count == self.size else "no"
        first = self._ask(call, lambda s: s.compare_set(f"{number}/all", "", mine), until)
        self._is_sure = bytes(first) == b"yes"
        return self._is_sure

    def _enter(
        self, store: Any, call: str, holds: str, mark: int, came: list[int]
    ) -> tuple[int, int]:
        """Come to the first meeting that is not over; return its number and new counter."""
        number = store.add("now", 0)
        while True:
            card = _Card(number, call, holds)
            store.set(f"at/{self.rank}", msgspec.json.encode(card))
            came.append(number)
            total = store.add(f"{number}/in", 1 + (mark << _COUNT))
            if not _is_over(total, self.size):
                return number, total
            number += 1

    def _settle(self, store: Any, number: int, same: bool) -> _Outcome:
        """All ranks have come: write the outcome, `all` or how they differ."""
        outcome = _Outcome("all")
        if not same:
            cards = self._cards(store)
            calls = {r: c.call for r, c in cards.items()}
            alike = len(set(calls.values())) == 1
            outcome = _Outcome("anew")
            if not alike:
                outcome = _Outcome("differ", _by_call(calls), None, self.size)
        for name in (
            "in",
            "outcome",
            "late",
            "read",
            "sure",
        ):  # all ranks have left the meeting before
            store.delete_key(f"{number - 1}/{name}")
        return self._close(store, number, outcome)

    def _close(self, store: Any, number: int, outcome: _Outcome) -> _Outcome:
        store.add("now", 1)
        store.set(f"{number}/outcome", msgspec.json.encode(outcome))
        return outcome

    def _await(
        self,
        number: int,
        call: str,
        holds: str,
        limit_s: float,
        until: float,
        tell_after_s: float | None,
    ) -> _Outcome:
        tell_at = None if tell_after_s is None else until - limit_s + tell_after_s
        for pause in self.pauses():
            found = self._ask(call, lambda s: _look(s, f"{number}/outcome"), until)
            if found is not None:
                return decode_json(found, _Outcome)
            now = time.monotonic()
            if now > until:
                card = _Card(number, call, holds, limit_s)
                failed: _Outcome = self._ask(call, lambda s: self._give_up(s, card), until)
                return failed
            if tell_at is not None and now > tell_at:
                tell_at = None
                text, *_ = self._ask(call, lambda s: self._missing(s, number, call), until)
                warn_user(f"waiting, for at most {limit_s:g} s: {text}")
            time.sleep(min(pause, max(until - now, 0.001)))
        raise AssertionError

    def _give_up(self, store: Any, card: _Card) -> _Outcome:
        """Mark the meeting as over, unless it has just taken place."""
        number = card.number
        within = f" within {card.gave_up_s:g} s"
        failed = _Outcome("missing", *self._missing(store, number, card.call, within))
        if store.add(f"{number}/late", 1) > 1:  # another rank gives up at this moment
            found = _look(store, f"{number}/outcome")
            return failed if found is None else decode_json(found, _Outcome)
        if store.add(f"{number}/in", _OVER) & _mask(_COUNT) == self.size:
            return _Outcome("all")  # the last rank has come, and will write the outcome
        store.set(f"at/{self.rank}", msgspec.json.encode(card))
        return self._close(store, number, failed)

    def _leave(self, store: Any, came: list[int], call: str, holds: str, limit_s: float) -> None:
        """Give up a meeting that this rank left early, as by an interrupt."""
        if came and _look(store, f"{came[-1]}/outcome") is None:
            self._give_up(store, _Card(came[-1], call, holds, limit_s))

    def _cards(self, store: Any) -> dict[int, _Card]:
        found = {rank: _look(store, f"at/{rank}") for rank in range(self.size)}
        return {r: decode_json(c, _Card) for r, c in found.items() if c is not None}

    def _missing(
        self, store: Any, number: int, call: str, within: str = ""
    ) -> tuple[str, int | None, int]:
        """Return the missing ranks in words, the first of them, and the number of ranks that have come."""
        cards = self._cards(store)
        there = {r: c.call for r, c in cards.items() if c.number == number}
        others = {r: c for r, c in there.items() if c != call}
        missing = [r for r in range(self.size) if r not in there]
        texts = (
            [f"{ranks_text(missing)} {_have(missing)} not called {call}{within}"] if missing else []
        )
        texts += [f"{_by_call(others)}"] if others else []
        for rank in missing[:4]:
            if (last := cards.get(rank)) is not None and last.gave_up_s:
                texts.append(f"rank {rank} gave up its {last.call} after {last.gave_up_s:g} s")
        first = min([*missing, *others], default=None)
        text = "; ".join(texts) or f"not all ranks have called {call}"
        return text, first, len(there)

    def _have_read(self, number: int, call: str, there: int) -> None:
        """Rank 0, which may host the store, waits until the others have read the outcome before it
        raises."""
        until, key = time.monotonic() + _HOST_STAYS_S, f"{number}/read"
        with suppress(AgentError):
            count = self._ask(call, lambda s: s.add(key, 1), until)
            for pause in self.pauses():
                if self.rank != 0 or count >= there or time.monotonic() > until:
                    return
                time.sleep(pause)
                count = self._ask(call, lambda s: s.add(key, 0), until)

    def _ask(self, call: str, question: Callable[[Any], Any], until: float) -> Any:
        return self.line.ask(call, question, max(until - time.monotonic(), 0.0) + _ANSWER_S)

    def pauses(self) -> Iterator[float]:
        """Seconds between polls: growing, up to 0.01 s for 64 ranks and 0.25 s for thousands."""
        return growing(_FIRST_PAUSE_S, min(max(0.01, 0.01 * self.size / 64), 0.25))


def growing(pause_s: float, most_s: float) -> Iterator[float]:
    """Yield pauses between polls, each longer than the one before, up to `most_s`."""
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, most_s)


def _mask(bits: int) -> int:
    return (1 << bits) - 1


def _is_over(total: int, size: int) -> bool:
    return total >= _OVER or total & _mask(_COUNT) > size


def _look(store: Any, key: str) -> bytes | None:
    return bytes(store.get(key)) if store.check([key]) else None


# -- words ----------------------------------------------------------------------------------------


def ranks_text(ranks: Iterable[int], most: int = 8) -> str:
    """Ranks in words: `rank 2`, `ranks 1 to 3`, `ranks 0, 2 and 5 to 7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{r[0]} to {r[-1]}" if len(r) > 1 else str(r[0]) for r in runs[:most]]
    if rest := sum(map(len, runs[most:])):
        texts.append(f"{rest} more")
    said = " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
    return f"rank{'s' * (sum(map(len, runs)) > 1)} {said}"


def _have(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _by_call(calls: dict[int, str]) -> str:
    """`rank 0 called save(), ranks 1 to 3 called restore()`."""
    by: dict[str, list[int]] = {}
    for rank, call in calls.items():
        by.setdefault(call, []).append(rank)
    return ", ".join(f"{ranks_text(ranks)} called {call}" for call, ranks in by.items())


# -- the job's store ------------------------------------------------------------------------------

_meetings: weakref.WeakKeyDictionary[Any, Meeting] = weakref.WeakKeyDictionary()
"""The meeting of each default process group."""


def meeting_of_job() -> Meeting:
    """The meeting of the default process group."""
    world = dist.group.WORLD
    known = _meetings.get(world)
    if known is None:
        (of_job,) = need("torch", dist.distributed_c10d, "_get_default_store")
        store = dist.PrefixStore("holdfast", of_job())
        known = _meetings[world] = meeting_over(store, dist.get_rank(), dist.get_world_size())
    return known


def meeting_over(store: Any, rank: int, size: int) -> Meeting:
    """Return the meeting of the ranks of a store, over that store's connection.

    A new connection would need a name look-up, which takes 5 s if the name server does not answer.
    """
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = "torchrun on the first node" if by_launcher else "rank 0"
    line = StoreLine(
        lambda: store,
        f"{host}, which hosts the store of the job,",
        None if by_launcher else 0,
    )
    return Meeting(line, rank, size)


def store_of_launch(limit_s: float) -> tuple[Any, int, int]:
    """Return the store, the rank and the number of ranks from torchrun's environment variables.

    If a process that started this one hosts this rank's store already, that store is used.
    """
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"WORLD_SIZE is set, and this process cannot join the others: {error}",
            hint="torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without WORLD_SIZE a "
            "process is alone",
        ) from None
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    for is_host in (True, False) if rank == 0 and not by_launcher else (False,):
        try:
            store = _tcp_store(host, port, is_host, limit_s)
            break
        except (RuntimeError, dist.DistError) as error:
            if not is_host:
                raise AgentError(
                    f"no connection to {host}:{port} (MASTER_ADDR, MASTER_PORT) within {limit_s:g} s, "
                    f"where rank 0 meets the others: {error}",
                    rank=0,
                ) from error
    # torchrun may keep one store for all attempts.  `holdfast run` has one for each, and a node that has
    # joined later counts its attempts from there.
    is_of_attempt = "HOLDFAST_ATTEMPT" in os.environ
    attempt = "0" if is_of_attempt else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"holdfast/{attempt}", store), rank, size


def _tcp_store(host: str, port: int, is_host: bool, limit_s: float) -> Any:
    limit = timedelta(seconds=limit_s)
    return dist.TCPStore(host, port, None, is_host, timeout=limit, wait_for_workers=False)
