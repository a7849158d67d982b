"""Directories that come and go with the objects in them.

Keys know no directories, so they are made when the first object needs one and removed with the
last.  Several processes do both at once: whoever finds that a directory has just vanished makes it
again, and whoever cannot remove one leaves it.

Reading may pass links: a step may lie on a larger disk.  Deleting never does (`opened_below`), or one link,
planted or unpacked, would have us delete whatever it leads to.  A look at each part of a path does not do,
for any part may be replaced by a link between the look and the call.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.core.store.contract import MAX_KEY_CHARS
from holdfast.core.store.oserrors import REFUSED

_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Errors by which a link leads nowhere."""


class LinkedFolder(OSError):
    """A folder below a root is a link; `filename` is its path."""


@contextmanager
def opened_below(directory: str, root: str) -> Iterator[list[int]]:
    """The descriptors of `root`, which alone may be a link, and of each directory from there down to
    `directory`.  LinkedFolder if the way there leads through another link."""
    here, way = root, [os.open(root, _FOLDER)]
    try:
        for name in _names_below(directory, root):
            here = os.path.join(here, name)
            try:
                way.append(os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=way[-1]))
            except OSError:
                if os.path.islink(here):
                    raise LinkedFolder(errno.ELOOP, os.strerror(errno.ELOOP), here) from None
                raise
        yield way
    finally:
        for fd in way:
            os.close(fd)


def _names_below(directory: str, root: str) -> list[str]:
    return os.path.relpath(directory, root).split(os.sep) if directory != root else []


def unlink_below(path: str, root: str) -> None:
    """Remove a file, or a link, that lies below `root`.  LinkedFolder if it lies behind a link."""
    with opened_below(os.path.dirname(path), root) as way:
        os.unlink(os.path.basename(path), dir_fd=way[-1])


def fsync_directory(path: str) -> None:
    """Make the names in a directory durable; one that is gone has none left."""
    try:
        fd = os.open(path, _FOLDER)
    except FileNotFoundError:
        return
    try:
        fsync_open(fd)
    finally:
        os.close(fd)


def fsync_open(fd: int) -> None:
    """Make the names in an open directory durable."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in REFUSED:  # some network file systems: names are durable at once
            raise


def fsync_file(path: str) -> None:
    """Make the bytes of a file durable."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_directories(path: str, root: str) -> None:
    """Make the names in `path`, and of all directories from there up to `root`, durable.

    All of them, not only those made by this process: another may have made one a moment ago and
    died before it was durable.  An fsync of an unchanged directory costs next to nothing.
    """
    fsync_directory(path)
    while path != root:
        path = os.path.dirname(path)
        fsync_directory(path)


def make_directory(path: str, *, durable: bool = True) -> None:
    """Make a directory, durable if asked, and those above it that are missing.

    FileNotFoundError if one above was removed in the meantime: try again.
    """
    parent = os.path.dirname(path)
    with suppress(FileExistsError):
        try:
            os.mkdir(path)
        except FileNotFoundError:
            make_directory(parent, durable=durable)
            os.mkdir(path)
        if durable:
            fsync_directory(parent)


def remove_empty_directories(path: str, root: str) -> None:
    """Remove `path` and the directories above it, up to but not `root`, while they are empty."""
    with suppress(OSError), opened_below(path, root) as way:
        remove_if_empty(path, root, way)


def remove_if_empty(path: str, root: str, way: list[int]) -> None:
    """The same, where the way there is open."""
    with suppress(OSError):  # not empty, or another does the same: all fine
        for name, above in zip(_names_below(path, root)[::-1], way[-2::-1]):
            os.rmdir(name, dir_fd=above)


def walk(directory: str, *, forbidden: bool = True, links: bool = False) -> Iterator[str]:
    """Paths of all files below `directory`; what vanishes meanwhile is left out, and what lies deeper than
    a key is long.

    A directory that may not be read is a PermissionError, or left out too unless `forbidden`.  `links`:
    also what lies in directories that there are links to, but for those that these lie in, each folder by
    one link alone; and links that lead nowhere, for something was there.
    """
    todo, seen = [(directory, "")], set[str]()
    while todo:
        path, real = todo.pop()  # `real`: where it lies, if there is a link on the way
        if real in seen or len(path) > len(directory) + MAX_KEY_CHARS:
            continue
        if real:
            seen.add(real)
        for entry in _entries(path, forbidden):
            if entry.is_dir(follow_symlinks=False):
                todo.append((entry.path, real and os.path.join(real, entry.name)))
            elif entry.is_symlink() and _leads_nowhere(entry):
                if links:
                    yield entry.path
            elif entry.is_file():
                yield entry.path
            elif links and entry.is_dir():
                there, here = os.path.realpath(entry.path), real or os.path.realpath(path)
                if os.path.commonpath([there, here]) != there:
                    todo.append((entry.path, there))


def _entries(directory: str, forbidden: bool) -> list[os.DirEntry[str]]:
    """Return what lies in a directory, by name: nothing if it is gone, or, unless `forbidden`, may not be
    read."""
    try:
        with os.scandir(directory) as scan:
            return sorted(scan, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError:
        if forbidden:
            raise
        return []


def first_link(path: str) -> str | None:
    """Return the path of a link that `path` is, or that lies below it; None if there is none."""
    todo = [path]
    while todo:
        path = todo.pop()
        if os.path.islink(path):
            return path
        if os.path.isdir(path):
            todo += [entry.path for entry in _entries(path, True)]
    return None


def _leads_nowhere(entry: os.DirEntry[str]) -> bool:
    """True if a link's target is gone, or is the link itself by a detour."""
    try:
        entry.stat()
    except OSError as error:
        if error.errno in _NOWHERE:
            return True
        raise
    return False
