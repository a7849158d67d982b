"""`holdfast run`: a rank is lost, and the others go on in their processes, to the same parameters."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server import local_elastic_agent

import zygote
from docs.commands import ROOT, commands_of
from docs.test_docs import blocks
from holdfast.launch import recovery
from holdfast.launch.command import main
from ports import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("train.py")
RANKS = 3
STEPS = 12


@dataclass
class Ran:
    """A run that is over: its exit status, what the launcher printed, and what the ranks told."""

    status: int
    printed: str
    told: list[dict[str, Any]]

    @property
    def begun(self) -> list[dict[int, dict[str, Any]]]:
        """For each attempt that got so far, what each rank began with."""
        attempts: list[dict[int, dict[str, Any]]] = [{}]
        for line in self.told:
            if "begins" in line:
                if line["rank"] in attempts[-1]:
                    attempts.append({})
                attempts[-1][line["rank"]] = line
        return attempts

    @property
    def digest(self) -> str:
        found: str = next(line["digest"] for line in self.told if "digest" in line)
        return found


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    return kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}


def begin(root: Path, *words: object, options: tuple[str, ...] = (), steps: int = STEPS) -> Any:
    command = [sys.executable, "-m", "holdfast", "run", f"--nproc-per-node={RANKS}", *options]
    command += [str(SCRIPT), str(root), str(steps), *map(str, words)]
    return subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(started: Any, root: Path) -> Ran:
    try:
        printed, _ = started.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        printed, _ = started.communicate()
        raise AssertionError(f"it hangs:\n{printed[-4000:]}") from None
    return Ran(started.returncode, printed, told(root))


def told(root: Path) -> list[dict[str, Any]]:
    path = Path(f"{root}.told")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(root: Path, *words: object, options: tuple[str, ...] = ()) -> Ran:
    return end(begin(root, *words, options=options), root)


def until(is_so: Callable[[], bool], limit_s: float = 120.0) -> None:
    stop = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < stop
        time.sleep(0.05)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the uninterrupted run, under torchrun: there `recoverable` is a plain call."""
    root = tmp_path_factory.mktemp("whole") / "root"
    command = ["-m", "forking", "--standalone", f"--nproc-per-node={RANKS}", SCRIPT, root, STEPS]
    env = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    ran = zygote.run(command, env=env, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return Ran(0, "", told(root)).digest


def test_a_spare_takes_the_place_of_a_killed_rank(tmp_path: Path, expected: str) -> None:
    words = ("--memory", "--fail", "kill", 1, 8, 1)
    ran = run(tmp_path / "root", *words, options=("--spares=1",))
    assert ran.status == 0, ran.printed[-4000:]
    assert ran.digest == expected
    first, second = ran.begun
    assert len({second[r]["begins"] for r in second}) == 1
    assert 0 < second[0]["begins"] <= 7  # the last snapshots may not have been over
    assert {second[r]["tier"] for r in second} == {"memory"}
    for rank in (0, 2):  # in place, with what was kept
        assert (second[rank]["pid"], second[rank]["kept"]) == (
            first[rank]["pid"],
            first[rank]["kept"],
        )
    assert second[1]["pid"] not in {line["pid"] for line in first.values()}
    assert ": it was killed by SIGKILL" in ran.printed


OPEN = """
import gc, json, os, signal, sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
import holdfast

root, lost = Path(sys.argv[1]), Path(f"{sys.argv[1]}.lost")

@holdfast.recoverable
def main():
    dist.init_process_group("gloo")
    kept = [one for one in gc.get_objects() if isinstance(one, torch.nn.Linear) and one.in_features == 500]
    model = torch.nn.Linear(500, 500)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ckpt = holdfast.Checkpointer(root, {"model": model, "optim": optim}, every=1, sigterm_s=5.0)
    first = ckpt.restore() or 0
    told = {"rank": dist.get_rank(), "of": dist.get_world_size(), "pid": os.getpid(), "begins": first,
            "models": len(kept), "threads": threading.active_count()}
    with open(f"{root}.told", "a") as file:
        file.write(json.dumps(told) + "\\n")
    for step in range(first + 1, 100_000):
        dist.all_reduce(torch.ones(1))
        model(torch.ones(500)).sum().backward()
        optim.step()
        ckpt.step(step)
        time.sleep(0.02)
        losses = len(lost.read_text()) if lost.exists() else 0
        if step - first > 20 and dist.get_world_size() == 2:
            if losses == 2:
                break
            dist.barrier()
            if dist.get_rank() == 0:
                lost.write_text("x" * (losses + 1))
                os.kill(os.getpid(), signal.SIGKILL)
    ckpt.wait()

main()
"""
"""It leaves its Checkpointer open.  Rank 0 is killed twice; each time the other goes on as rank 0, until a
new process is ready, which is rank 0 again."""


@pytest.mark.soak
def test_a_checkpointer_that_is_left_open_keeps_neither_the_root_nor_memory(tmp_path: Path) -> None:
    script, root = tmp_path / "script.py", tmp_path / "root"
    script.write_text(OPEN)
    command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node=2", "--nproc-min=1"]
    ran = subprocess.run(
        [*command, str(script), str(root)],
        env=environment(), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    first = {line["pid"] for line in told(root)[:2]}
    (survivor,) = {line["pid"] for line in told(root)[2:]} & first
    lives = [line for line in told(root) if line["pid"] == survivor]
    assert [(one["rank"], one["of"]) for one in lives] == [(1, 2), (0, 1), (1, 2), (0, 1), (1, 2)]
    assert [one["models"] for one in lives] == [0] * 5
    assert max(one["threads"] for one in lives) <= lives[0]["threads"] + 3
    begun = [one["begins"] for one in lives]
    assert sorted(set(begun)) == begun


TELLING = """
import os, pathlib, sys
import beside
name = os.environ["ROLE_NAME"] + os.environ["LOCAL_RANK"]
numbers = [os.environ[name] for name in ("RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")]
pathlib.Path(sys.argv[1], name).write_text(" ".join([*numbers, *sys.argv[2:]]))
"""


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["torch.distributed.run", "holdfast run"])
def test_what_a_script_is_told_is_as_under_torchrun(launcher: str, tmp_path: Path) -> None:
    """Nodes of two roles; a script that is a link, beside which there is nothing."""
    for folder in ("there", "told"):
        (tmp_path / folder).mkdir()
    (tmp_path / "there/script.py").write_text(TELLING)
    (tmp_path / "there/beside.py").touch()
    (tmp_path / "link.py").symlink_to("there/script.py")
    words = [sys.executable, "-m", *launcher.split(), "--nnodes=2", "--rdzv-backend=c10d"]
    words += [f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=roles", "--nproc-per-node=2"]
    begun = [
        subprocess.Popen(
            [*words, f"--role={role}", "link.py", "told", "${local_rank}", "$$5"],
            cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True,
        )
        for role in ("actor", "critic")
    ]  # fmt: skip
    for one in begun:
        _, printed = one.communicate(timeout=240)
        assert one.returncode == 0, printed[-3000:]
    told = {path.name: path.read_text().split() for path in (tmp_path / "told").iterdir()}
    ranks = {name: words.pop(0) for name, words in told.items()}
    assert sorted(ranks.values()) == ["0", "1", "2", "3"]
    assert told == {
        f"{role}{r}": [str(r), "2", str(r), "$5"] for role in ("actor", "critic") for r in (0, 1)
    }


@pytest.mark.soak
@pytest.mark.parametrize(
    "words", [["./there/../script.py"], ["-m", "script"]], ids=["file", "module"]
)
def test_what_a_script_knows_of_its_file_is_as_under_python(
    words: list[str], tmp_path: Path
) -> None:
    """It finds what lies beside it after it has gone elsewhere."""
    (tmp_path / "there").mkdir()
    code = "(lambda: 0).__code__.co_filename"
    (tmp_path / "script.py").write_text(
        f"import sys\nprint(__file__, {code}, *sys.argv, sys.path[0])\n"
    )
    printed = [
        subprocess.run(
            [sys.executable, *launcher, *words, "5"],
            cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240, check=True,
        ).stdout
        for launcher in ([], ["-m", "holdfast", "run"])
    ]  # fmt: skip
    assert printed[0] == printed[1]


THREADS = """
import ctypes, os
import numpy, torch
numpy.ones((300, 300)) @ numpy.ones((300, 300))  # those of its OpenBLAS begin when it is imported
torch.ones(300, 300) @ torch.ones(300, 300)
print(os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads(), len(os.listdir("/proc/self/task")))
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("options", "variables", "cpus"),
    [
        (["--nproc-per-node=2"], {}, 2),
        pytest.param(["--nproc-per", "cpu"], {}, 1, marks=pytest.mark.soak),
        pytest.param([], {"PET_NPROC_PER_NODE": "2"}, 2, marks=pytest.mark.soak),
        pytest.param([], {}, 2, marks=pytest.mark.soak),
        pytest.param(["--nproc-per-node=2"], {"OMP_NUM_THREADS": "2"}, 2, marks=pytest.mark.soak),
    ],
    ids=["several", "counted", "environment", "alone", "set"],
)
def test_ranks_have_as_many_threads_as_under_torchrun(
    options: list[str], variables: dict[str, str], cpus: int, tmp_path: Path
) -> None:
    """Also where the number of ranks is that of the processors."""
    script = tmp_path / "script.py"
    script.write_text(THREADS)
    given = {k: v for k, v in environment().items() if k != "OMP_NUM_THREADS"} | variables
    some = sorted(os.sched_getaffinity(0))[:cpus]
    printed = [
        subprocess.run(
            [sys.executable, "-m", *launcher.split(), *options, str(script), "--nproc-per-node=2"],
            env=given, preexec_fn=lambda: os.sched_setaffinity(0, some),
            capture_output=True, text=True, timeout=240, check=True,
        ).stdout.splitlines()
        for launcher in ("torch.distributed.run --standalone", "holdfast run")
    ]  # fmt: skip
    assert sorted(printed[0]) == sorted(printed[1])


PRINTING = """
import os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
import holdfast

@holdfast.recoverable
def main():
    dist.init_process_group("gloo")
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("rank", rank, "in", attempt)
    print("error of rank", rank, "in", attempt, file=sys.stderr)
    if (rank, attempt) == ("2", "0"):
        while not spare.exists():
            time.sleep(0.05)
        time.sleep(2.0)  # until it waits for a rank
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()

spare = Path(sys.argv[1])
if "RANK" not in os.environ:
    spare.touch()
main()
"""
"""Prints which rank it is; rank 2 is killed once, when there is a spare."""


@pytest.mark.soak
@pytest.mark.parametrize("redirected", [(0, 1, 2), (0,)], ids=["all", "rank 0"])
def test_a_spare_prints_to_the_log_of_its_rank(redirected: tuple[int, ...], tmp_path: Path) -> None:
    """To the file that torch keeps for the rank, and shows with the rank before each line; that of a rank
    without such a file to the launcher's output."""
    script = tmp_path / "script.py"
    script.write_text(PRINTING)
    which = ",".join(f"{rank}:3" for rank in redirected)
    options = ["--nproc-per-node=3", "--spares=1", f"--redirects={which}", "--tee=0:1"]
    command = [sys.executable, "-m", "holdfast", "run", *options, f"--log-dir={tmp_path / 'logs'}"]
    ran = subprocess.run(
        [*command, str(script), str(tmp_path / "spare")],
        env=environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    for rank in range(3):
        printed, told = [f"rank {rank} in 0", f"rank {rank} in 1"], ran.stderr
        if rank in redirected:
            (log,) = tmp_path.glob(f"logs/*/attempt_0/{rank}/stdout.log")
            assert log.read_text().splitlines() == printed
            told = log.with_name("stderr.log").read_text()
        else:
            assert [one for one in ran.stdout.splitlines() if one in printed] == printed
        errors = re.findall(rf"error of rank ({rank} in \d)", told)
        assert errors == [f"{rank} in 0", f"{rank} in 1"]
    assert "[default0]:rank 0 in 1" in ran.stdout


@pytest.mark.soak
@pytest.mark.parametrize("is_broken", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_spare_serves_however_the_script_has_set_torch(is_broken: bool, tmp_path: Path) -> None:
    """Its warm-up is on the CPU and with gradients; where it fails nonetheless, that is told."""
    script = tmp_path / "script.py"
    settings = "import torch\ntorch.set_grad_enabled(False)\ntorch.set_default_device('meta')\n"
    script.write_text(settings + "torch.optim.AdamW.step = None\n" * is_broken + PRINTING)
    command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node=3", "--spares=1"]
    ran = subprocess.run(
        [*command, str(script), str(tmp_path / "spare")],
        env=environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "rank 2 in 1" in ran.stdout
    assert "a spare (process" not in ran.stderr
    assert ("the first step of this spare will be slow" in ran.stderr) is is_broken


ENDING = """
import os, sys, threading, time
from pathlib import Path
import holdfast

folder = Path(sys.argv[1])

@holdfast.recoverable
def main():
    spares = []
    while len(spares) < 3 or any(Path("/proc", spare.name).exists() for spare in spares):
        time.sleep(0.05)
        spares = list(folder.iterdir())
    time.sleep(1)

if "RANK" not in os.environ:
    (folder / str(os.getpid())).touch()
    threading.Timer(0.3, os._exit, (4,)).start()
main()
"""
"""Its spares end while they wait; it goes on until three have, and a second more."""


@pytest.mark.soak
def test_spares_that_end_while_they_wait_are_not_forked_for_ever(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "spares"
    script.write_text(ENDING)
    folder.mkdir()
    command = [sys.executable, "-m", "holdfast", "run", "--spares=1", str(script), str(folder)]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert len(list(folder.iterdir())) == 3
    assert ran.stderr.count("has ended while it waited for a rank: it ended with 4") == 3
    assert "no spare is forked until the next recovery" in ran.stderr


FEWER = """
import os, signal
import torch.distributed as dist
import holdfast

@holdfast.recoverable
def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    print("rank", rank, "of", size)
    dist.barrier()
    if (rank, size) == (0, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()

main()
"""


@pytest.mark.soak
def test_lines_are_shown_with_the_rank_that_has_written_them(tmp_path: Path) -> None:
    """Also where it has changed: without the first process, the second has rank 0."""
    script = tmp_path / "script.py"
    script.write_text(FEWER)
    given = environment() | {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}] "}
    command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node=3", "--nproc-min=2"]
    command += ["--tee=1", f"--log-dir={tmp_path / 'logs'}", str(script)]
    ran = subprocess.run(command, env=given, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    last = [line for line in ran.stdout.splitlines() if line.endswith("of 2")]
    assert sorted(last) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]


WAITS = """
import os, sys
import torch.distributed as dist
import holdfast

@holdfast.recoverable
def main():
    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["LOCAL_RANK"] == os.environ["WAITS"]:
        no_writer = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=no_writer)
    dist.barrier()

main()
"""
"""A rank waits in the kernel for a process that it begins, which waits for a writer."""


def listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.soak
@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_rank_that_waits_in_the_kernel_ends_the_run(nodes: int, tmp_path: Path) -> None:
    """As torch has it, a new process would find there what the lost one holds: a status that is not 0."""
    if not hasattr(local_elastic_agent, "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"):
        pytest.skip("this torch does not look for it")
    script, fifo = tmp_path / "script.py", tmp_path / "fifo"
    script.write_text(WAITS)
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "holdfast", "run", f"--nproc-per-node={2 // nodes}"]
    command += ["--shutdown-timeout=2", f"--nnodes={nodes}", "--rdzv-backend=c10d", "--rdzv-id=one"]
    port = free_port()
    command += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    given = environment() | {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "1"}
    log = tmp_path / "log"
    with log.open("w") as file:
        words = [*command, str(script), str(fifo)]
        begun = []
        for waits in (
            ["1"] if nodes == 1 else ["", "0"]
        ):  # not on the node that hosts the rendezvous
            until(lambda: not begun or listens(port))
            begun += [subprocess.Popen(words, env={**given, "WAITS": waits}, stderr=file)]
    try:
        assert [one.wait(120) for one in begun] == [1] * nodes, log.read_text()
    finally:
        os.close(os.open(fifo, os.O_RDWR))
        for one in begun:
            one.kill()
    printed = log.read_text()
    assert re.search(
        r"rank \d \(process \d+\) failed after step 0: it waits in the kernel", printed
    )
    assert "attempt 2 begins" not in printed


FOLDS = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
import holdfast

@holdfast.recoverable
def main(fold):
    dist.init_process_group("gloo")
    dist.barrier()
    first = Path(f"{sys.argv[1]}/first")
    if fold == 1 and os.environ["RANK"] == "1" and not first.exists():
        first.touch()
        os._exit(3)
    dist.barrier()
    dist.destroy_process_group()
    return fold

folds = [main(fold) for fold in range(3)]
Path(f"{sys.argv[1]}/folds{os.environ['RANK']}").write_text(str(folds))
"""
"""Calls its function three times; a rank is lost in the second."""


@pytest.mark.soak
def test_a_function_that_is_called_after_it_has_returned_is_plain(tmp_path: Path) -> None:
    """All processes begin anew when a rank is lost in it, and at once: none could be told to leave."""
    script = tmp_path / "script.py"
    script.write_text(FOLDS)
    command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node=2"]
    ran = subprocess.run(
        [*command, str(script), str(tmp_path)],
        env=environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    for rank in range(2):
        assert (tmp_path / f"folds{rank}").read_text() == "[0, 1, 2]"
    assert "it ended with 3" in ran.stderr
    assert "did not leave within" not in ran.stderr


@pytest.mark.soak_except("raise")
@pytest.mark.parametrize("kind", ["raise", "exit"])
def test_what_the_script_itself_does(kind: str, tmp_path: Path, expected: str) -> None:
    """An exception is recovered from in all processes; one that exits is replaced."""
    ran = run(tmp_path / "root", "--fail", kind, 1, 8, 1)
    assert ran.status == 0, ran.printed[-4000:]
    assert ran.digest == expected
    first, second = ran.begun
    same = {r for r in first if first[r]["pid"] == second[r]["pid"]}
    assert same == ({0, 1, 2} if kind == "raise" else {0, 2})
    assert (
        "ValueError: a fault at step 8" if kind == "raise" else "it ended with 3"
    ) in ran.printed


@pytest.mark.soak
def test_a_rank_that_hangs(tmp_path: Path, expected: str) -> None:
    ran = run(tmp_path / "root", "--fail", "stop", 1, 8, 1, options=("--hang-s=10",))
    assert ran.status == 0, ran.printed[-4000:]
    assert ran.digest == expected
    text = r"no rank has done a step for 10 s \(after step [78]; to blame: local rank 1\)"
    assert re.search(text, ran.printed), ran.printed[-4000:]  # the others may be one step ahead


@pytest.mark.soak
def test_a_rank_that_fails_when_all_are_done(tmp_path: Path, expected: str) -> None:
    """Processes that were told the end are on their way out: the next attempt has new ones, and ends."""
    ran = run(tmp_path / "root", "--late")
    assert ran.status == 0, ran.printed[-4000:]
    assert ran.digest == expected
    first, second = ran.begun
    assert {second[r]["begins"] for r in second} == {STEPS}
    assert not {f["pid"] for f in first.values()} & {s["pid"] for s in second.values()}


@pytest.mark.soak
def test_the_same_failure_three_times_ends_the_run(tmp_path: Path) -> None:
    ran = run(tmp_path / "root", "--fail", "raise", 1, 8, 9)
    assert ran.status == 1
    assert len(ran.begun) == 3
    assert "rank 1" in ran.printed and "after step 7: ValueError: a fault at step 8" in ran.printed
    assert "3rd time in the same way" in ran.printed
    assert 'raise ValueError(f"a fault at step {step}")' in ran.printed  # the traceback


@pytest.mark.soak
@pytest.mark.parametrize("has_port", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_script_that_is_not_marked_is_started_again(
    has_port: bool, tmp_path: Path, expected: str
) -> None:
    """Also where a port is given: torch's rendezvous for one has one store, in which the next attempt would
    find the last one's keys."""
    options = (f"--master-port={free_port()}",) if has_port else ()
    ran = run(tmp_path / "root", "--plain", "--fail", "kill", 1, 8, 1, options=options)
    assert ran.status == 0, ran.printed[-4000:]
    assert ran.digest == expected
    assert ran.printed.count("each attempt of one node has a free port") == has_port
    first, second = ran.begun
    assert {second[r]["begins"] for r in second} <= {6, 7}  # a save of step 7 may not be over
    assert not {f["pid"] for f in first.values()} & {s["pid"] for s in second.values()}


@pytest.mark.soak
def test_what_a_stuck_survivor_began_ends_with_it(tmp_path: Path) -> None:
    script = Path(__file__).with_name("stuck.py")
    command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node=2", str(script)]
    ran = subprocess.run(
        [*command, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "wait in a collective for a lost rank, and nothing wakes them" in ran.stderr
    assert (tmp_path / "alive").read_text() == ""


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_launcher_ends(number: signal.Signals, tmp_path: Path) -> None:
    root = tmp_path / "root"
    started = begin(root, options=("--spares=1",), steps=1_000_000)
    until(lambda: len(told(root)) >= RANKS)
    pids = [line["pid"] for line in told(root)]
    started.send_signal(number)
    assert end(started, root).status == (-number if number == signal.SIGKILL else 128 + number)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


RETURNS = """
import atexit, os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
import holdfast

folder, is_told = Path(sys.argv[1]), []
signal.signal(signal.SIGTERM, lambda *_: is_told.append(True))

@holdfast.recoverable
def main():
    dist.init_process_group("gloo")
    dist.barrier()
    (folder / f"begun{os.environ['RANK']}").touch()
    while not is_told:
        time.sleep(0.01)
    dist.destroy_process_group()

main()
rank = os.environ["RANK"]
(folder / f"after{rank}").touch()
atexit.register((folder / f"exit{rank}").touch)
"""
"""Handles SIGTERM: its function returns."""


@pytest.mark.soak
def test_who_returns_upon_a_signal_to_the_launcher_ends_as_it_likes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RETURNS)
    command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node=2", "--spares=1"]
    command += ["--shutdown-timeout=300"]
    started = subprocess.Popen([*command, str(script), str(tmp_path)], env=environment())
    try:
        until(lambda: all((tmp_path / f"begun{rank}").exists() for rank in range(2)))
        began = time.monotonic()
        started.terminate()
        assert started.wait(300) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 150  # half of --shutdown-timeout
    finally:
        started.kill()
    for rank in range(2):
        assert (tmp_path / f"after{rank}").exists()
        assert (tmp_path / f"exit{rank}").exists()


@pytest.mark.soak
def test_what_ranks_print_is_seen_at_once(tmp_path: Path) -> None:
    """Not only when a buffer is full: torchrun starts `python -u`."""
    script, stop = tmp_path / "script.py", tmp_path / "stop"
    script.write_text(
        "import pathlib, sys, time\nprint('a line')\n"
        "while not pathlib.Path(sys.argv[1]).exists():\n    time.sleep(0.05)\n"
    )
    given = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "holdfast", "run", str(script), str(stop)]
    with (tmp_path / "printed").open("w") as file:
        started = subprocess.Popen(command, env=given, stdout=file)
    try:
        until(lambda: (tmp_path / "printed").read_text() == "a line\n", 40)
        stop.touch()
        assert started.wait(300) == 0
    finally:
        started.kill()


@pytest.mark.soak
@pytest.mark.parametrize("options", [(), ("-r", "3"), ("-t", "3")])
def test_logs_that_were_asked_for_stay(options: tuple[str, ...], tmp_path: Path) -> None:
    """As torchrun's do; without options nothing is left."""
    script = tmp_path / "script.py"
    script.write_text("print('a line')\n")
    command = [sys.executable, "-m", "holdfast", "run", *options, str(script)]
    given = environment() | {"TMPDIR": str(tmp_path)}
    ran = subprocess.run(command, env=given, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    logs = list(tmp_path.glob("torchelastic_*/**/stdout.log"))
    assert [log.read_text() for log in logs] == ["a line\n"] * bool(options)
    assert len(list(tmp_path.glob("torchelastic_*"))) == len(logs)
    assert ("the logs of the ranks are in" in ran.stderr) == bool(options)


@pytest.mark.soak
def test_the_file_that_a_failure_is_told_with_stays(tmp_path: Path) -> None:
    """torch's report names it.  PET_MAX_RESTARTS is heeded, and options that do nothing here are named."""
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('as ever')\n")
    command = [sys.executable, "-m", "holdfast", "run", "--hang-s=60", "--spares=1", str(script)]
    given = environment() | {"TMPDIR": str(tmp_path), "PET_MAX_RESTARTS": "1"}
    ran = subprocess.run(command, env=given, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 1
    assert ran.stderr.count("failed after step 0: ValueError: as ever") == 2
    (error,) = tmp_path.glob("torchelastic_*/**/error.json")
    assert "as ever" in error.read_text() and str(error) in ran.stderr
    assert ran.stderr.count("--spares and --hang-s do nothing") == 1


WATCHED = """
import os
import holdfast

@holdfast.recoverable
def main():
    print("attempt", os.environ["HOLDFAST_ATTEMPT"], os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])
    if os.environ["HOLDFAST_ATTEMPT"] == "1":
        raise ValueError("once")

print("before", os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])
main()
"""


@pytest.mark.soak
@pytest.mark.parametrize(("told", "expected"), [(None, "0"), ("3", "3")])
def test_the_watchdog_of_nccl_lets_a_marked_function_leave(
    told: str | None, expected: str, tmp_path: Path
) -> None:
    """torch's agent sets 1 for every rank, unless the user has set another."""
    script = tmp_path / "script.py"
    script.write_text(WATCHED)
    given = environment() | ({} if told is None else {recovery.WATCHDOG: told})
    command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node=1", str(script)]
    ran = subprocess.run(command, env=given, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines() == [
        f"before {told or 1}",
        f"attempt 1 {expected}",
        f"attempt 2 {expected}",
    ]


@pytest.mark.soak
def test_what_the_page_prints(tmp_path: Path) -> None:
    """Its command, with its program as the script."""
    page = ROOT / "docs" / "how-to" / "in-place.md"
    (program,) = (block.text for block in blocks(page, "python"))
    (tmp_path / "train.py").write_text(program)
    for block in blocks(page, "console"):
        for command in commands_of(block.text, block.options, page.name):
            words = [sys.executable, "-m", *command.text.split()]
            ran = subprocess.run(
                words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240
            )
            assert ran.returncode == 0, ran.stderr[-3000:]


def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*words: str) -> str:
        assert main(words) == 2
        return capsys.readouterr().err

    assert "there is no script 'nowhere.py'" in said("nowhere.py")
    assert "torchrun has --no-python" in said("--no-python", "ls")
    assert "--spares -1" in said("--spares", "-1", str(SCRIPT))
    assert "--hang-s 0" in said("--hang-s", "0", str(SCRIPT))
    for option in ("--spares=1", "--nproc-min=1"):
        assert "a spare has them before" in said(option, str(SCRIPT), "--seed=${local_rank}")
    assert "--preload no_such" in said("--preload", "no_such", str(SCRIPT))
    assert "--preload '': ValueError" in said("--preload", "", str(SCRIPT))
    monkeypatch.setenv("PYTHON_EXEC", "/usr/bin/pypy")
    assert "PYTHON_EXEC=/usr/bin/pypy" in said(str(SCRIPT))


@pytest.mark.soak
@pytest.mark.parametrize(("told", "expected"), [(None, True), ("0", False)])
def test_tensors_lie_in_huge_pages_unless_told_otherwise(
    told: str | None, expected: bool, tmp_path: Path
) -> None:
    """Where PyTorch asks for them, a tensor begins with a page."""
    script = tmp_path / "script.py"
    script.write_text("import torch\nprint(torch.empty(1 << 22).data_ptr() % 4096 == 0)\n")
    given = environment() | ({} if told is None else {"THP_MEM_ALLOC_ENABLE": told})
    command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node=1", str(script)]
    ran = subprocess.run(command, env=given, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split() == [str(expected)]
