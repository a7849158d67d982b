"""Namespaces that live as long as their owner wants, and programs in them.

Nothing outlives its owner.  The first process of a `Spaces` reads a pipe that only the owner holds.
However the owner ends, the pipe closes and that process ends; and with the first process of a process
namespace the kernel ends all others in it.  With the last of them go the mounts, the memory files and the
interfaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from pathlib import Path

KINDS = ("net", "uts", "ipc", "mnt", "pid")
_UNSHARE = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
_FIRST = """set -e
mount -t tmpfs -o size=$1 shm /dev/shm
mount -t tmpfs run /run
mkdir /run/tmp
echo $2 > /run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
mount --bind "$3" /etc/hosts
echo $4 > /proc/sys/kernel/hostname
ip link set lo up
exec 3<&0
echo ready
cat <&3 >/dev/null 2>&1 & wait
"""
"""The first process: it makes the place, then waits and reaps orphans, as an init does."""


def unavailable() -> str | None:
    """Why there can be no nodes on this machine, or None if there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} on this machine"
    try:
        trial = Spaces("trial", Path("/etc/hosts"), 1 << 20)
        trial.network("link add type bridge", "link add type veth")
        trial.end()
    except RuntimeError as error:
        return str(error)
    return None


def can_delay() -> bool:
    """Whether the kernel can hold packets back (sch_netem)."""
    trial = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(trial, capture_output=True).returncode == 0


class Process:
    """A program that runs, or ran, on a node.  What it and its children print goes to the file `output`."""

    def __init__(self, entered: subprocess.Popen[bytes], output: Path) -> None:
        self._entered = (
            entered  # nsenter: the parent of the program, which ends as the program does
        )
        self.output = output

    def poll(self) -> int | None:
        """Exit status as `subprocess` gives it, or None while it runs."""
        return self._entered.poll()

    def wait(self, timeout_s: float) -> int:
        """Exit status; AssertionError with the end of the output if it still runs by then."""
        try:
            return self._entered.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"runs after {timeout_s:g} s\n{self.text()[-3000:]}") from None

    def signal(self, number: int) -> None:
        """Send a signal to the program itself, not to its children."""
        if self.poll() is None:
            pid = self._entered.pid
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                os.kill(int(child), number)

    def text(self) -> str:
        """What has been printed so far."""
        return self.output.read_text(errors="replace")


class Spaces:
    """A set of namespaces, alive until `end` or the end of this process.

    `name` is the host name, `hosts` the file that is /etc/hosts there, `shm_bytes` the size of /dev/shm.
    RuntimeError if the kernel or its keeper does not allow it.
    """

    def __init__(self, name: str, hosts: Path, shm_bytes: int) -> None:
        arguments = [str(shm_bytes), str(uuid.uuid4()), str(hosts), name]
        self._holder = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _FIRST, "first", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._holder.stdin is not None and self._holder.stdout is not None
        with self._holder.stdout as output:
            said = output.readline().decode().strip()
        if said != "ready":
            raise RuntimeError(f"no namespaces: {said}")
        self.name, self.pid, self._pipe = name, self._holder.pid, self._holder.stdin
        self.programs: list[Process] = []

    def _path(self, kind: str) -> str:
        return f"/proc/{self.pid}/ns/{'pid_for_children' if kind == 'pid' else kind}"

    def enter(self, *kinds: str) -> list[str]:
        """How a command begins that shall run in these namespaces."""
        flags = {kind: "mount" if kind == "mnt" else kind for kind in kinds}
        return ["nsenter", *(f"--{flag}={self._path(kind)}" for kind, flag in flags.items())]

    def run(self, argv: list[str], env: dict[str, str], cwd: Path, output: Path) -> Process:
        """Start a program here."""
        with output.open("wb") as file:
            entered = subprocess.Popen(
                [*self.enter(*KINDS), "env", f"--chdir={cwd}", *argv],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.programs.append(Process(entered, output))
        return self.programs[-1]

    def network(self, *commands: str) -> None:
        """Commands of `ip` in this network, one after the other.  RuntimeError if one fails."""
        self._change(["ip", "-batch", "-"], "\n".join(commands))

    def queue(self, change: str) -> None:
        """A change of a queue of this network, as `tc qdisc` has it.  RuntimeError if it fails."""
        self._change(["tc", "qdisc", *change.split()])

    def _change(self, command: list[str], lines: str = "") -> None:
        command = [*self.enter("net"), *command]
        done = subprocess.run(command, input=lines, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")

    def processes(self) -> dict[int, int]:
        """Every process in it: its number there, and its number here."""
        found = {}
        for process in _all_in("pid", os.stat(self._path("pid")).st_ino):
            try:
                status = (process / "status").read_text()
            except OSError:
                continue  # it has just ended
            there = status.split("\nNSpid:", 1)[1].split("\n", 1)[0].split()[-1]
            found[int(there)] = int(process.name)
        return found

    def end(self) -> list[str]:
        """End every process in it; what is left in one of the namespaces nevertheless."""
        if self._holder.returncode is not None:
            return []
        held = [os.open(self._path(kind), os.O_RDONLY) for kind in KINDS]  # numbers are used again
        try:
            self._pipe.close()
            self._holder.wait(120)
            for program in self.programs:
                program.wait(120)
            spaces = [(kind, os.fstat(fd).st_ino) for kind, fd in zip(KINDS, held)]
            left = [(p.name, kind) for kind, number in spaces for p in _all_in(kind, number)]
        finally:
            for fd in held:
                os.close(fd)
        return [f"{self.name}: process {pid} is left in its {kind}" for pid, kind in left]


def _all_in(kind: str, number: int) -> list[Path]:
    """Folders under /proc of the processes in a namespace."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns" / kind) == f"{kind}:[{number}]":
                found.append(process)
        except OSError:
            continue  # it has just ended
    return found
