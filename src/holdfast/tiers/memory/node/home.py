"""The directory of a user's agent on a node: where it is, whose it is, and what is noted of the agent."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.base.errors import UsageError
from holdfast.base.wire import decode_json

SOCKET = "agent.sock"
MOST_SOCKET_BYTES = 107
"""Most bytes of a Unix socket's path, on Linux."""
ANEW = os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
"""Flags of a file that is written anew."""


def check_home(root: Path) -> None:
    """UsageError unless a directory is this user's alone: anybody may make one in /dev/shm."""
    seen = root.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise UsageError(
            f"{root} is not a directory of this user alone (mode {stat.filemode(seen.st_mode)}, user "
            f"{seen.st_uid})",
            hint="remove it, or set HOLDFAST_MEMORY_DIR to another place in memory",
        )


def make_home(root: Path) -> None:
    """Make a directory of this user alone, unless it is there.  UsageError if something else is."""
    with suppress(FileExistsError):
        root.mkdir(mode=0o700, parents=True)
    check_home(root)


def home() -> Path:
    """Return the directory of this user's agent on this node: HOLDFAST_MEMORY_DIR, or a folder of
    /dev/shm.  UsageError if its path is too long for a socket in it."""
    given = os.environ.get("HOLDFAST_MEMORY_DIR")
    found = Path(given).absolute() if given else Path(f"/dev/shm/holdfast-{os.getuid()}")
    size, most = len(os.fsencode(found)), MOST_SOCKET_BYTES - len(f"/{SOCKET}")
    if size > most:
        raise UsageError(
            f"HOLDFAST_MEMORY_DIR={found} has {size} bytes; with its socket's name it may have {most}",
            hint="a shorter path, in /dev/shm",
        )
    return found


class AgentNote(msgspec.Struct, frozen=True):
    """`agent.json`: the agent that is here, or was here last."""

    pid: int = 0
    started: str = ""
    address: str = ""
    ended: str = ""
    """How it ended; empty while it runs, and if it had no time to say so."""
    before: tuple[int, str] = (0, "")
    """Process and end of the agent before it."""


def last_agent(root: Path) -> AgentNote:
    """Return what is noted of the last agent that was here; process 0 if none was."""
    try:
        return decode_json((root / "agent.json").read_bytes(), AgentNote)
    except (OSError, msgspec.DecodeError):
        return AgentNote()


def note_agent(root: Path, note: AgentNote) -> None:
    """Write `agent.json`, in one piece; in a full /dev/shm in the place of the one before.  OSError."""
    path, data = root / "agent.json", msgspec.json.encode(note)
    try:
        replace_file(path, data)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        path.unlink(missing_ok=True)
        replace_file(path, data)


def replace_file(path: Path, data: bytes, at: int | None = None) -> None:
    """Replace a file in one piece; `at`: its time of change, in nanoseconds."""
    temp = path.with_name(f".{path.name}.new")
    fd = os.open(temp, os.O_WRONLY | ANEW, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
    if at is not None:
        os.utime(temp, ns=(at, at))
    os.replace(temp, path)
