"""A launcher of scripts whose processes are forked from one that has imported torch: 0.1 s in place of 5.

    with forked.listening(folder) as command:
        prove(Plan([*command(ranks=2), "script.py", "--root", "r"]))

`holdfast prove` starts the launcher and sees to it that its processes are observed and killed; all that
differs from torchrun is where the processes come from.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import zygote
from ports import free_port

LAUNCHER = Path(__file__).with_name("launcher.py")


@contextmanager
def listening(folder: Path) -> Iterator[Callable[..., list[str]]]:
    """Give the beginning of a command that runs a script on some ranks, each a forked process."""
    address = folder / "forks"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen()
        threading.Thread(target=_serve, args=[listener], daemon=True).start()
        head = [sys.executable, "-I", "-S", str(LAUNCHER), str(address)]
        yield lambda ranks=1: [*head, str(ranks)]
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket) -> None:
    with suppress(OSError):  # the listener has been closed
        while True:
            channel, _ = listener.accept()
            threading.Thread(target=_launch, args=[channel], daemon=True).start()


def _launch(channel: socket.socket) -> None:
    """Run what a launcher asks for until it ends, or the launcher does."""
    text, files, _, _ = socket.recv_fds(channel, zygote.MOST_BYTES, 1)
    request: dict[str, Any] = json.loads(text)
    world = request["ranks"]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    programs = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} if world > 1 else {}
        programs.append(
            zygote.start(
                ["-m", "prove.armed", *request["words"]],
                out=files[0],
                env=request["env"] | own,
                cwd=Path(request["cwd"]),
            )
        )
    code = _wait(channel, programs)
    for program in programs:
        program.kill()
    with channel, suppress(OSError):
        channel.send(json.dumps(code).encode())


def _wait(channel: socket.socket, programs: Sequence[zygote.Program]) -> int:
    channel.setblocking(False)
    while True:
        codes = [program.poll() for program in programs]
        failed = [code for code in codes if code]
        if failed or None not in codes:
            return failed[0] if failed else 0
        try:
            if not channel.recv(1):
                return -signal.SIGKILL
        except BlockingIOError:
            pass
        except ConnectionError:
            return -signal.SIGKILL
        time.sleep(zygote.PAUSE_S)
