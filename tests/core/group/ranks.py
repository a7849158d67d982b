"""Ranks of which one lets the others down, in a public call; what becomes of the others, as JSON lines.

    python -m core.group.ranks FOLDER save-never-0 load-stopped-1 step+memory+delta-dies-1 save-full-1 ...

A case names the call and what the Checkpointer has beside storage (memory, records, frequencies that are
tuned), what the victim does, and which rank it is.  *never*: it does not make the call.
*stopped*, *dies*: it gets SIGSTOP or SIGKILL where it would make it.  *stops*, *killed*: the same, where
all have come to the call and it goes on by itself.  *full*, *short*: it makes the call with the others, and
none of its files may grow, or its node has too little memory for a snapshot.  Ranks are forked from this
process, which has imported torch; the cases given run side by side.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # two seconds for each rank, else
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.dcp
import holdfast.session.checkpointer
import holdfast.session.save_and_load
from holdfast import extend
from holdfast.core.group.ranks import SeveralRanks
from holdfast.formats.write import converting_ranks as converting
from holdfast.tiers.memory.node import messages
from holdfast.tiers.memory.node.client import Client
from ports import free_port

RANKS = 3
DEADLINE_S = 4.0
ENOUGH_S = 60.0
"""The deadline where every rank makes the call: none has to wait for it."""
TORCH_S = 10.0
"""Seconds that torch's own collectives wait, in which `torch.distributed.checkpoint` makes its calls."""
BRIEF_S = 1.0
"""A timeout that a script gives, over before any deadline."""
BOUND_S = 150.0
"""How long a case may take beyond the deadline on a machine that does much else; then it has hung."""
LITTLE_BYTES = 4096
"""Memory of a node that is short of it: less than the smallest image takes."""
SIGNALS = {
    "stopped": signal.SIGSTOP,
    "stops": signal.SIGSTOP,
    "dies": signal.SIGKILL,
    "killed": signal.SIGKILL,
}


@dataclass(frozen=True)
class Case:
    """One call with one victim."""

    call: str
    fate: str
    victim: int
    tiers: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> Case:
        call, fate, victim = text.split("-")
        call, *tiers = call.split("+")
        return Case(call, fate, int(victim), tuple(tiers))

    def __str__(self) -> str:
        return f"{'+'.join((self.call, *self.tiers))}-{self.fate}-{self.victim}"

    @property
    def is_full(self) -> bool:
        """True if the victim makes the call as the others do, and lacks space or memory."""
        return self.fate in ("full", "short")


class Run:
    """What a rank holds."""

    ckpt: holdfast.Checkpointer
    """Made before the call, if that is one of its methods."""
    group: dist.ProcessGroup
    """For the calls that torch makes: its collectives give up after `TORCH_S`."""

    def __init__(self, root: str, case: Case) -> None:
        self.root = root
        self.deadline_s = ENOUGH_S if case.is_full else DEADLINE_S
        is_short = case.fate == "short" and dist.get_rank() == case.victim
        budget = LITTLE_BYTES if is_short else None
        self.memory = holdfast.Memory("none", budget=budget) if "memory" in case.tiers else None
        self.delta = holdfast.Delta() if "delta" in case.tiers else None
        self.is_tuned = "auto" in case.tiers
        self.grace_s = self.deadline_s if case.call == "door_stop" else None
        torch.manual_seed(0)  # ranks have replicas
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": self.model, "seen": dist.get_rank()}
        if self.delta is not None:
            self.state["optim"] = self.optimizer

    def open(self, every: int | None = None) -> holdfast.Checkpointer:
        frequency: Any = None if every is None else holdfast.Every(durable=every)
        if self.is_tuned:
            frequency = holdfast.Auto()
        if self.delta is not None and every is not None:
            frequency = holdfast.Every(durable=every, delta=1)
        return holdfast.Checkpointer(
            self.root,
            self.state,
            every=frequency,
            memory=self.memory,
            delta=self.delta,
            on_error="raise",
            deadline_s=self.deadline_s,
            sigterm_s=self.grace_s,
            anew=True,
        )

    def train(self) -> None:
        """A step of this rank alone."""
        self.model(torch.ones(1, 8)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


# -- the calls ------------------------------------------------------------------------------------


def save(run: Run) -> None:
    holdfast.save(run.root, run.state, step=2, deadline_s=run.deadline_s)


def load(run: Run) -> None:
    assert holdfast.load(run.root, {"model": run.model}, deadline_s=run.deadline_s) == 1


def construct(run: Run) -> None:
    run.open()


def restore(run: Run) -> None:
    assert run.ckpt.restore() == 1


def find(run: Run) -> None:
    found = run.ckpt.find()
    assert found is not None and found.step == 1


def pin(run: Run) -> None:
    run.ckpt.pin(1, "best")


def unpin(run: Run) -> None:
    run.ckpt.unpin("best")


def metrics(run: Run) -> None:
    run.ckpt.metrics(1, loss=0.5)


def save_in_background(run: Run) -> None:
    run.ckpt.save(2).wait()


def save_in_time(run: Run) -> None:
    run.ckpt.save(2).wait(BRIEF_S)


def step(run: Run) -> None:
    run.ckpt.step(2)
    run.ckpt.wait()


def steps(run: Run) -> None:
    """Several, of which no save is due; all are recorded after the first."""
    run.ckpt.every = holdfast.Every(durable=1000, delta=1)
    for step in range(2, 8):
        run.train()
        run.ckpt.step(step)
    run.ckpt.wait()


def tenth_step(run: Run) -> None:
    """At which ranks hear from rank 0 how often they save from now on."""
    run.ckpt.step(10)


def snapshot(run: Run) -> None:
    """Into memory alone."""
    run.ckpt.every = holdfast.Every(memory=1)
    run.ckpt.step(2)
    run.ckpt.wait()


def wait(run: Run) -> None:
    """For a save that was begun before."""
    run.ckpt.save(2)
    run.ckpt.wait()


def wait_in_time(run: Run) -> None:
    run.ckpt.save(2)
    run.ckpt.wait(BRIEF_S)


def close(run: Run) -> None:
    """With a save under way that the victim has no part in."""
    run.ckpt.save(2)
    run.ckpt.close()


def close_in_time(run: Run) -> None:
    run.ckpt.save(2)
    run.ckpt.close(BRIEF_S)


def close_with_a_callback(run: Run) -> None:
    """It waits for the save once more, to call what was handed over."""
    run.ckpt.on_commit(lambda step: None)
    run.ckpt.save(2)
    run.ckpt.close()


def convert(run: Run) -> None:
    holdfast.convert(run.root, f"{run.root}-new")


def go_on_from(run: Run) -> None:
    extend.go_on_from(run.ckpt, 1)


def stop_if_told(run: Run) -> None:
    """No rank was told."""
    extend.stop_if_told(run.ckpt, 2)


def dcp_save(run: Run) -> None:
    """Torch's own collectives raise torch's errors, and what a Writer raises on a rank is in a
    CheckpointException on all.  What a Writer promises is that the step is not there then."""
    state = {"model": run.model.state_dict(), f"rank{dist.get_rank()}": torch.ones(8)}
    writer = holdfast.dcp.Writer(run.root)
    try:
        dcp.save(state, storage_writer=writer, checkpoint_id="2", process_group=run.group)
    finally:
        assert holdfast.steps(run.root) == [1]


def dcp_load(run: Run) -> None:
    state = {"model": run.model.state_dict()}
    dcp.load(state, storage_reader=holdfast.dcp.Reader(run.root), process_group=run.group)


THE_VICTIM = r"\branks? {victim}\b"
ANYBODY = r"\branks? \d"


@dataclass(frozen=True)
class Call:
    """A call in which ranks have to do with each other, and how it fails on those that are let down."""

    make: Callable[[Run], None]
    names: tuple[str, ...]
    """The public calls that it consists of, or that torch makes in it, as `public_calls` names them."""
    awaited: str = ""
    """What a message says when this is awaited; empty: it is open which error comes first, or what is."""
    who: str = THE_VICTIM
    """Whom a message names, as a regular expression."""
    is_told: bool = False
    """True if rank 0 does the work and tells each other rank: who has heard of it is done."""
    is_torchs: bool = False
    """True if the collectives are torch's, and so are the errors that they raise."""
    needs_checkpointer: bool = True
    """True if it is made with a Checkpointer that all ranks have."""

    @property
    def raises(self) -> tuple[type[BaseException], ...]:
        if self.is_torchs:
            return (RuntimeError, CheckpointException)
        return (holdfast.HoldfastError,)


SAVE, SAVED = ("Checkpointer.save", "Save.wait"), "the save of step 2"
STEP, WAIT = ("Checkpointer.step", "Checkpointer.wait"), ("Checkpointer.save", "Checkpointer.wait")
CLOSE = ("Checkpointer.save", "Checkpointer.close")
OF_WRITER = tuple(
    f"dcp.Writer.{name}"
    for name in (
        "reset",
        "storage_meta",
        "set_up_storage_writer",
        "prepare_local_plan",
        "prepare_global_plan",
        "write_data",
        "prepare",
        "finish",
    )
) + tuple(f"extend.PlannedSaves.{name}" for name in ("begin", "begun", "prepare", "commit"))
OF_READER = tuple(
    f"dcp.Reader.{name}"
    for name in (
        "reset",
        "read_metadata",
        "set_up_storage_reader",
        "prepare_local_plan",
        "prepare_global_plan",
        "read_data",
    )
)
CALLS: dict[str, Call] = {
    "save": Call(save, ("save",), "save()", needs_checkpointer=False),
    "load": Call(load, ("load",), "load()", needs_checkpointer=False),
    "construct": Call(construct, ("Checkpointer",), "Checkpointer()", needs_checkpointer=False),
    "restore": Call(restore, ("Checkpointer.restore",), "restore()"),
    "find": Call(find, ("Checkpointer.find",), "find()"),
    "pin": Call(pin, ("Checkpointer.pin",), is_told=True),
    "unpin": Call(unpin, ("Checkpointer.unpin",), is_told=True),
    "metrics": Call(metrics, ("Checkpointer.metrics",), is_told=True),
    "background": Call(save_in_background, SAVE, SAVED),
    "background_in_time": Call(save_in_time, SAVE, SAVED, who=""),
    "step": Call(step, STEP, SAVED),
    "steps": Call(steps, STEP, who=ANYBODY),
    "tenth": Call(tenth_step, ("Checkpointer.step",), is_told=True),
    "snapshot": Call(snapshot, STEP, "the snapshot of step 2"),
    "wait": Call(wait, WAIT, SAVED),
    "wait_in_time": Call(wait_in_time, WAIT, SAVED, who=""),
    "close": Call(close, CLOSE, who=ANYBODY),
    "close_in_time": Call(close_in_time, CLOSE, "close()", who=""),
    "called": Call(close_with_a_callback, ("Checkpointer.on_commit", *CLOSE), who=ANYBODY),
    "door_go_on": Call(go_on_from, ("extend.go_on_from",), "load"),
    "door_stop": Call(stop_if_told, ("extend.stop_if_told",)),
    "convert": Call(convert, ("convert",), "convert()", needs_checkpointer=False),
    "dcp_save": Call(dcp_save, OF_WRITER, who="", is_torchs=True, needs_checkpointer=False),
    "dcp_load": Call(dcp_load, OF_READER, who="", is_torchs=True, needs_checkpointer=False),
}

READS = "reads storage by itself; what does not answer is in tests/system/disks"
LOOKS = "looks at what this process has, or computes with it"
MARKS = "notes something in this process"
CHECKS = "checks an argument"
WRITES = "writes storage by itself; what does not answer is in tests/system/disks"
BETWEEN = "is one rank's part between `begin` and `commit` of extend.PlannedSaves"
ALONE: dict[str, str] = {
    "open": READS,
    "steps": READS,
    "wait_newer": READS,
    "testing.prove": "starts ranks of its own",
    "Checkpoint.open": READS,
    "Checkpoint.read": READS,
    "Checkpoint.rank_extras": READS,
    "Checkpoint.file_extras": READS,
    "Checkpoint.close": "closes files that are read",
    "Checkpoint.index": LOOKS,
    "Checkpoint.info": LOOKS,
    "Checkpoint.names": LOOKS,
    "Box.within": LOOKS,
    "Save.done": LOOKS,
    "Checkpointer.status": LOOKS,
    "Save.add_done_callback": MARKS,
    "Checkpointer.restore_rng": "sets this process's generators, from what `restore` has read",
    "Rng.state_dict": LOOKS,
    "Rng.load_state_dict": "sets this process's generators",
    "ignore": MARKS,
    "silence": MARKS,
    "trainable_only": MARKS,
    "kept": "keeps what a function of the script's own has returned",
    "recoverable": "is a plain call, but for `holdfast run`, which is in tests/launching",
    "compression.rounded": MARKS,
    "compression.sparse": MARKS,
    "compression.TopK.register": "hands a hook to DDP, whose collectives are torch's",
    "compression.TopK.num_sent": LOOKS,
    "compression.TopK.rows_of_rank": LOOKS,
    "compression.TopK.state_dict": LOOKS,
    "compression.TopK.load_state_dict": "takes the rows that `restore` has read for this rank",
    "dcp.Writer.wait": "waits for what this process deletes",
    "events.count": MARKS,
    "events.emit": MARKS,
    "events.listen": MARKS,
    "events.span": MARKS,
    "events.subscribe": MARKS,
    **dict.fromkeys(
        (
            f"extend.{name}"
            for name in ("check_engine", "check_metrics", "path_of", "step_of", "unfit")
        ),
        CHECKS,
    ),
    **dict.fromkeys(
        (
            f"extend.{name}"
            for name in (
                *("StateDictNames.extras", "StateDictNames.inner", "StateDictNames.of"),
                *("StateDictNames.path", "data_of", "decode", "decode_torch", "encode"),
                *("engine_counters", "gradients_text", "inline_tensor", "notes_of", "notices_of"),
                *("order_of", "referred", "samplers_of", "torch_dtype", "unwrap", "writes_to"),
            )
        ),
        LOOKS,
    ),
    **dict.fromkeys(
        (
            f"extend.{name}"
            for name in (
                *("check_root", "labels_of", "newest_where", "read_files", "read_into"),
                *("run_at_work", "saved_in", "values_in"),
            )
        ),
        READS,
    ),
    **dict.fromkeys(
        (
            f"extend.PreparedPart.{name}"
            for name in ("staged", "take_note", "write", "write_and_note")
        ),
        BETWEEN,
    ),
    "extend.PlannedSaves.go_on_from": MARKS,
    "extend.PlannedSaves.wait": "waits for what this process deletes",
    "extend.give_label": WRITES,
    "extend.put_engine_counters": MARKS,
    "extend.put_order": "puts back what `restore` has read for this rank",
    "extend.tell_other_data": "tells of what `restore` has read for this rank",
    "extend.wait_for_copies": "waits for copies of this process's own tensors",
    "sources.flat_cut": LOOKS,
    "sources.register": MARKS,
    "store.open_store": "touches nothing",
    "store.register": MARKS,
}
"""Public calls that have to do with no other rank, and what they do instead."""


# -- the ranks ------------------------------------------------------------------------------------


def node_of(case: Case, rank: int, folder: Path) -> Path:
    """Where a rank's agent has its memory: a short path, for a socket's name has little room.  All ranks of
    a case share a node, unless one of them is to have less memory than the others."""
    digest = hashlib.sha256(str(folder / str(case)).encode()).hexdigest()
    return Path("/dev/shm") / f"hf-{digest[:16]}{f'-{rank}' if case.fate == 'short' else ''}"


def rank_of(case: Case, rank: int, port: int, folder: Path) -> dict[str, Any]:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "GLOO_SOCKET_IFNAME": "lo",
        "HOLDFAST_MEMORY_DIR": str(node_of(case, rank, folder)),
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    root, call, is_victim = str(folder / str(case)), CALLS[case.call], rank == case.victim
    run = Run(root, case)
    holdfast.save(root, run.state, step=1)
    converting.MEET_S = converting.SILENT_S = run.deadline_s
    if call.needs_checkpointer:
        run.ckpt = run.open(every=1)
    if call.is_torchs:
        run.group = dist.new_group(timeout=timedelta(seconds=TORCH_S))
    dist.barrier()
    if is_victim and not case.is_full:
        let_down(case)
    begun, error = time.monotonic(), ""
    with without_space() if is_victim and case.fate == "full" else nullcontext():
        try:
            call.make(run)
        except call.raises as failed:
            error = f"{type(failed).__name__}: {failed}"
    return {"rank": rank, "error": error, "took_s": time.monotonic() - begun}


def let_down(case: Case) -> None:
    if case.fate == "never":
        signal.pause()
    if case.fate in ("stopped", "dies"):
        os.kill(os.getpid(), SIGNALS[case.fate])
    together = SeveralRanks.together

    def then(group: SeveralRanks, call: str) -> None:
        together(group, call)
        os.kill(os.getpid(), SIGNALS[case.fate])

    SeveralRanks.together = then  # type: ignore[method-assign]


@contextmanager
def without_space() -> Iterator[None]:
    """In this block no file of this process may grow by a byte.

    All ranks write below one root, and its disk cannot be full for one of them alone.  By RLIMIT_FSIZE the
    kernel says EFBIG to one process, in the calls in which a full disk says ENOSPC to all.  Python ignores
    the signal that comes with it.  Disks that are full are in tests/system/disks
    and tests/system/crash: they need root.
    """
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


def forked(case: Case, rank: int, port: int, folder: Path) -> int:
    """A process that is this rank; it writes what it has seen to a file: how the call ended, or as `raised`
    the traceback of an error that none may let out."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        log = os.open(folder / f"{case}.{rank}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            found = rank_of(case, rank, port, folder)
        except BaseException:
            found = {"rank": rank, "raised": traceback.format_exc()}
        written = folder / f"{case}.{rank}.part"
        written.write_text(json.dumps(found))
        written.rename(written.with_suffix(".json"))
        signal.pause()  # whoever ends takes what it hosts with it
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def await_all(pids: dict[tuple[Case, int], int], folder: Path) -> None:
    """Until all but the victims have said how they fared, or the bound is over; then end every process."""
    until = time.monotonic() + DEADLINE_S + BOUND_S
    answering = [(case, rank) for case, rank in pids if case.is_full or rank != case.victim]
    awaited = {folder / f"{case}.{rank}.json" for case, rank in answering}
    while time.monotonic() < until and not all(path.exists() for path in awaited):
        time.sleep(0.02)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def stop_agent(node: Path) -> None:
    """What the ranks of a case had started."""
    client = Client(node, deadline_s=BOUND_S)
    if client.look() != "nobody":
        client.ask(messages.Stop(free=True))


def main() -> None:
    warnings.simplefilter("ignore")
    folder, cases = Path(sys.argv[1]), [Case.parse(text) for text in sys.argv[2:]]
    pids = {}
    for case in cases:
        port = free_port()
        for rank in range(RANKS):
            pids[case, rank] = forked(case, rank, port, folder)
    try:
        await_all(pids, folder)
    finally:
        for node in {node_of(case, rank, folder) for case, rank in pids}:
            stop_agent(node)
            shutil.rmtree(node, ignore_errors=True)
    for case in cases:
        for rank in range(RANKS):
            seen, log = (folder / f"{case}.{rank}.{kind}" for kind in ("json", "log"))
            found = json.loads(seen.read_text()) if seen.exists() else {"rank": rank}
            text = log.read_text(errors="replace") if log.exists() else ""
            print(json.dumps({"case": str(case), "log": text, **found}), flush=True)


if __name__ == "__main__":
    main()
