"""Obstacles on the way to a path, in words, from the top down.

    obstacle("/scratch/run/steps")        # "'/scratch/run' is a file, not a folder"

The system's own word (ENOTDIR, ELOOP, ENOENT) is said of the whole path, and not of the part that is wrong:
of a link to a volume that is not mounted it says that a file deep below is not there.
"""

from __future__ import annotations

import errno
import os
import stat

MAX_NAME_BYTES = 255
_SHOWN = 40
NESTED = "a key cannot also be the directory of other keys"


def obstacle(path: str, *, folder: bool = False) -> tuple[str, str] | None:
    """The first part of an absolute path that cannot be passed, and what to do; None if there is none.

    `folder`: the path itself ought to be one.  A part that is only missing is no obstacle.
    """
    parts = path.split(os.sep)
    for name in parts:
        length = len(os.fsencode(name))
        if length > MAX_NAME_BYTES:
            hint = "file systems allow 255 bytes for a name"
            return f"the name '{name[:_SHOWN]}...' has {length} bytes", hint
    for i in range(1, len(parts)):
        here = os.sep.join(parts[: i + 1])
        try:
            status = os.stat(here)
        except PermissionError:
            above = os.path.dirname(here)
            return (
                f"this user may not look into '{above}'",
                "ask for the right to (x of the folder)",
            )
        except OSError as error:
            return _of_link(here, error.errno)
        if not stat.S_ISDIR(status.st_mode) and (folder or i < len(parts) - 1):
            return f"'{here}' is a file, not a folder", f"give a folder for checkpoints; {NESTED}"
    return None


def _of_link(path: str, code: int | None) -> tuple[str, str] | None:
    """Say why a link leads nowhere; None if there is no link."""
    if not os.path.islink(path):
        return None
    target = os.readlink(path)
    if code == errno.ELOOP:
        return f"'{path}' is a link to '{target}', which leads back to it", "remove the link"
    return (
        f"'{path}' is a link to '{target}', which is not there",
        "mount or make what it leads to, or remove the link",
    )
