"""Two ranks that call things alone, in another order, or after one of them has given up.

Each function is a case; an assertion that fails is a rank that fails.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
import zygote
from holdfast.base.wire import encode_error
from holdfast.core.group import board, exchange, meet
from holdfast.core.group.listening import TAKES_LISTENER
from holdfast.core.group.meeting import meeting_of_job, meeting_over
from holdfast.core.group.message_auth import Seal
from holdfast.errors import Deadline, HoldfastError, HoldfastWarning, OutOfSpace, UsageError
from holdfast.session import checkpointer
from holdfast.tiers.memory.node import messages
from holdfast.tiers.memory.node.client import Client
from system.distributed.cases import Case, run_all

DEADLINE_S = 2.0
LONG_S = 60.0


def state_of(value: float = 0.0) -> dict[str, Any]:
    torch.manual_seed(0)  # ranks have replicas
    return {"model": nn.Linear(4, 4), "value": value}


# -- one order of keys ----------------------------------------------------------------------------


class Together:
    """An object both of whose methods have a collective of its own size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def talk(self) -> None:
        told = torch.full((self.size,), 1.0)
        dist.all_reduce(told)
        assert told.tolist() == [dist.get_world_size()] * self.size

    def state_dict(self) -> dict[str, int]:
        self.talk()
        return {"size": self.size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.talk()
        assert state == {"size": self.size}


def turned(one: dict[str, Any]) -> dict[str, Any]:
    """The same on rank 0, and on the other rank in another order."""
    return one if dist.get_rank() == 0 else dict(reversed(one.items()))


def keys_may_have_another_order_on_each_rank(root: Path) -> None:
    state = turned({"b": Together(1), "a": Together(2), "c": Together(3)})
    holdfast.save(root, state, step=1)
    assert holdfast.load(root, state) == 1
    with holdfast.Checkpointer(root, state, on_error="raise") as ckpt:
        assert ckpt.restore() == 1
        ckpt.save(2).wait()


def so_may_keys_of_dicts_inside(root: Path) -> None:
    inside = turned({"b": Together(1), "a": [Together(2)], "c": {"d": Together(3)}})
    config = turned({"lr": 0.1, "betas": {"one": 0.9, "two": 0.99}})
    holdfast.save(root, {"inside": inside, "config": config}, step=1)
    with holdfast.open(root) as saved:
        assert saved.manifest.per_rank == {}, "the same values in another order are the same"
        assert saved.extras["config"] == {"lr": 0.1, "betas": {"one": 0.9, "two": 0.99}}


# -- who has not called ---------------------------------------------------------------------------


def a_rank_that_calls_alone_is_told_and_all_may_call_again(root: Path) -> None:
    begun = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(Deadline, match=r"^rank 1 has not called save\(\) within 2 s") as told:
            holdfast.save(root, state_of(), step=1, deadline_s=DEADLINE_S)
        assert time.monotonic() - begun >= DEADLINE_S
        assert told.value.rank == 1
    dist.barrier()
    assert not list(root.glob("steps/*"))
    state = state_of(float(dist.get_rank()))
    holdfast.save(root, state, step=2)
    assert holdfast.load(root, state) == 2


def who_comes_late_hears_that_the_other_has_given_up(root: Path) -> None:
    if dist.get_rank() == 0:
        with pytest.raises(Deadline):
            holdfast.save(root, state_of(), step=1, deadline_s=DEADLINE_S)
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(Deadline, match=r"rank 0 gave up its save\(\) after 2 s"):
            holdfast.save(root, state_of(), step=1, deadline_s=DEADLINE_S)
    dist.barrier()
    holdfast.save(root, state_of(), step=1)


def ranks_at_different_calls_hear_so_at_once(root: Path) -> None:
    with holdfast.Checkpointer(root, state_of(), on_error="raise") as ckpt:
        begun = time.monotonic()
        said = r"rank 0 called save\(\), rank 1 called restore\(\)"
        with pytest.raises(UsageError, match=said):
            ckpt.restore() if dist.get_rank() else holdfast.save(root / "o", state_of(), step=1)
        assert time.monotonic() - begun < LONG_S
        ckpt.save(1).wait()
        assert ckpt.restore() == 1


def a_rank_0_that_leaves_by_an_error_waits_for_nobody_for_long(root: Path) -> None:
    """Another rank may be in a collective, which only that error's way out of the process ends."""
    with pytest.MonkeyPatch.context() as patch, suppress(KeyError):
        patch.setattr(checkpointer, "LINGER_S", 0.1)
        patch.setattr(board, "_LEAVE_S", 1e6)
        with holdfast.Checkpointer(root, state_of(), deadline_s=1e6):
            if dist.get_rank() == 0:
                raise KeyError
            dist.barrier()
    if dist.get_rank() == 0:
        dist.barrier()
    holdfast.save(root, state_of(), step=1)


def a_call_that_failed_in_the_middle_leaves_nothing_broken(root: Path) -> None:
    """One rank's collectives are of no more use; the next call makes them anew on all."""
    holdfast.save(root, state_of(), step=1)
    state = state_of()
    assert holdfast.load(root, state) == 1
    meeting = meeting_of_job()
    assert meeting is not None and meeting.held
    if dist.get_rank() == 1:
        for _, gloo in meeting.held.values():
            gloo.end()
        meeting.held.clear()
    assert holdfast.load(root, state) == 1


def ranks_of_before_are_not_counted(root: Path) -> None:
    """The store of a launch that was killed while one of its ranks waited in a meeting."""
    store = dist.PrefixStore("before", dist.distributed_c10d._get_default_store())
    if dist.get_rank() == 0:
        dead = meeting_over(store, 1, 2)
        dead.line.ask("die", lambda s: dead._enter(s, "load()", "", 1, []), LONG_S)
    dist.barrier()
    meeting = meeting_over(store, dist.get_rank(), 2)
    if dist.get_rank() == 0:
        with pytest.raises(Deadline, match=r"^rank 1 has not called save\(\) within 8 s"):
            meeting.meet("save()", 8.0)
    dist.barrier()
    assert meeting.meet("save()", LONG_S).call == "save()"


def many_calls_leave_no_keys_behind(root: Path) -> None:
    store = dist.distributed_c10d._get_default_store()
    holdfast.save(root, state_of(), step=1)
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(10):
        assert holdfast.load(root, state_of()) == 1
    dist.barrier()
    assert store.num_keys() <= before + 4
    dist.barrier()


# -- processes that ranks start -------------------------------------------------------------------


def conversion(
    root: Path, *, meet_s: float, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one as a rank would: with RANK and WORLD_SIZE inherited."""
    script = (
        "import sys, holdfast.formats.write.converting_ranks as ranks; from holdfast.cli.main import main;"
        f"ranks.MEET_S, ranks._TELL_S = {meet_s}, 0.2; sys.argv[0] = 'holdfast'; main()"
    )
    command = ["-c", script, "convert", str(root), f"{root}-new"]
    return zygote.run(command, env=os.environ | (env or {}), timeout=2 * LONG_S)


def a_process_of_one_rank_says_for_whom_it_waits_and_ends(root: Path) -> None:
    holdfast.save(root, state_of(), step=1)
    if dist.get_rank() == 0:
        ran = conversion(root, meet_s=5.0)
        text = ran.stderr
        assert ran.returncode == 1
        assert "waiting, for at most 5 s: rank 1 has not called convert()" in text, text
        assert "error: rank 1 has not called convert() within 5 s" in text, text
        assert "env -u WORLD_SIZE" in text, text
    dist.barrier()
    assert not os.path.exists(f"{root}-new")
    holdfast.save(root, state_of(), step=2)  # the ranks themselves go on


def processes_of_all_ranks_convert_together(root: Path) -> None:
    holdfast.save(root, state_of(), step=1)
    ran = conversion(root, meet_s=LONG_S)
    assert ran.returncode == 0, ran.stderr
    with holdfast.open(f"{root}-new") as made:
        assert made.step == 1


def those_of_nodes_that_count_attempts_otherwise_do_too(root: Path) -> None:
    """Under `holdfast run` a node that has joined later has seen fewer of them."""
    holdfast.save(root, state_of(), step=1)
    before = dist.get_rank()
    counted = {"TORCHELASTIC_RESTART_COUNT": str(before), "HOLDFAST_ATTEMPT": str(before + 1)}
    ran = conversion(root, meet_s=LONG_S, env=counted)
    assert ran.returncode == 0, ran.stderr


# -- strangers at the stores, which have no password ----------------------------------------------


def a_stranger_at_the_board_decides_nothing(root: Path) -> None:
    group = meet(LONG_S, "a call")
    assert group._line is not None
    host, port = group._line.ask("where", lambda board: (board.host, board.port), LONG_S)
    assert host == "127.0.0.1"
    if TAKES_LISTENER:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), LONG_S)
    mine = "x/1/answer" if dist.get_rank() else "x/1/1"
    stranger = dist.TCPStore(host, port, None, False, wait_for_workers=False)
    stranger.set(mine, b"\1" + encode_error(OutOfSpace("forged")))
    with pytest.warns(HoldfastWarning, match="was not written by a rank of this run"):
        assert group.peek(mine) is None
    dist.barrier()
    assert group.ask("x/1", b"%d" % dist.get_rank(), b"".join) == b"01"
    dist.barrier()
    group.close()


def ranks_without_gloo_have_one_key_too(root: Path) -> None:
    for find in (exchange.gloo_of_torch, lambda: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "gloo_of_torch", find)
            group = meet(LONG_S, "a call")
        assert group.ask("x/1", b"%d" % dist.get_rank(), b"".join) == b"01"
        theirs: list[Any] = [None, None]
        dist.all_gather_object(theirs, group.hide("a word"))
        assert theirs[0] == theirs[1] != Seal(b"").hide("a word")
        group.close()


def no_message_has_the_token_of_an_agent(root: Path) -> None:
    home = Path(f"/tmp/holdfast-tokens-{os.getppid()}")
    said: list[bytes] = []
    close = Seal.close

    def recorded(seal: Seal, name: str, message: bytes) -> bytes:
        said.append(close(seal, name, message))
        return said[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_MEMORY_DIR", str(home))
        patch.setattr(Seal, "close", recorded)
        memory = holdfast.Memory("none", budget="16MiB")
        every = holdfast.Every(memory=1)
        with holdfast.Checkpointer(root, state_of(), every=every, memory=memory) as ckpt:
            ckpt.restore()
            for step in (1, 2):
                ckpt.step(step)
                ckpt.wait()
            token = ckpt._tiers.get("memory").agent.card.token.encode()
        assert len(token) == 64
        assert any(b"agent" in one or b"127.0.0.1" in one or b":" in one for one in said)
        assert not [one for one in said if token in one]
        dist.barrier()
        if dist.get_rank() == 0:
            with suppress(HoldfastError):  # it has left by itself
                Client(home).ask(messages.Stop(free=True))
            shutil.rmtree(home, ignore_errors=True)
    dist.barrier()


CASES: list[Case] = [
    keys_may_have_another_order_on_each_rank,
    so_may_keys_of_dicts_inside,
    a_rank_that_calls_alone_is_told_and_all_may_call_again,
    who_comes_late_hears_that_the_other_has_given_up,
    ranks_at_different_calls_hear_so_at_once,
    a_rank_0_that_leaves_by_an_error_waits_for_nobody_for_long,
    a_call_that_failed_in_the_middle_leaves_nothing_broken,
    ranks_of_before_are_not_counted,
    many_calls_leave_no_keys_behind,
    a_process_of_one_rank_says_for_whom_it_waits_and_ends,
    processes_of_all_ranks_convert_together,
    those_of_nodes_that_count_attempts_otherwise_do_too,
    a_stranger_at_the_board_decides_nothing,
    ranks_without_gloo_have_one_key_too,
    no_message_has_the_token_of_an_agent,
]

if __name__ == "__main__":
    run_all(CASES)
