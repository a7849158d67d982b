"""Directories that come and go with the objects in them.

A directory is made for its first object and removed with its last.  Several processes do both at once: a
directory that has just vanished is made again, and one that cannot be removed is left.

Reads follow links: a step may lie on a larger disk.  Deletions never do (`opened_below`): a link from an
attacker or an archive could lead anywhere.  Checking each part of the path first is not enough, for a part
may be replaced by a link between the check and the deletion.
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
"""Errors of `stat` for a link without a target."""


class LinkedFolder(OSError):
    """A folder below a root is a link; `filename` is its path."""


@contextmanager
def opened_below(directory: str, root: str) -> Iterator[list[int]]:
    """Open `root` and each directory from there down to `directory`; yield their descriptors in that order.
    Only `root` may be a link: LinkedFolder for any other."""
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
    """Remove a file or link below `root`.  LinkedFolder if a folder on the way is a link."""
    with opened_below(os.path.dirname(path), root) as way:
        os.unlink(os.path.basename(path), dir_fd=way[-1])


def fsync_directory(path: str) -> None:
    """Make the names in a directory durable; a missing directory is no error."""
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
    """Make the names in `path` and in all directories above it, up to `root`, durable.

    That includes directories of other processes: one may have died between mkdir and fsync.  An fsync of an
    unchanged directory costs next to nothing.
    """
    fsync_directory(path)
    while path != root:
        path = os.path.dirname(path)
        fsync_directory(path)


def make_directory(path: str, *, durable: bool = True) -> None:
    """Make a directory and its missing parents, durable if asked.

    FileNotFoundError if a parent was removed in the meantime: try again.
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
    """`remove_empty_directories`, with the descriptors that `opened_below` yielded."""
    with suppress(OSError):  # not empty, or another does the same: all fine
        for name, above in zip(_names_below(path, root)[::-1], way[-2::-1]):
            os.rmdir(name, dir_fd=above)


def walk(directory: str, *, forbidden: bool = True, links: bool = False) -> Iterator[str]:
    """Yield the paths of all files below `directory`, except those deeper than a key is long.

    Files that vanish meanwhile are left out.  An unreadable directory is a PermissionError if `forbidden`,
    else left out.  `links`: follow links to directories, each directory by one link and none in a circle,
    and yield links without a target, where a file may have been.
    """
    todo, seen = [(directory, "")], set[str]()
    while todo:
        path, real = todo.pop()  # `real`: `path` with its links resolved
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
    """Return the entries of a directory by name; none if it is gone, or unreadable and not `forbidden`."""
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
    """Return the path of the first link at or below `path`; None if there is none."""
    todo = [path]
    while todo:
        path = todo.pop()
        if os.path.islink(path):
            return path
        if os.path.isdir(path):
            todo += [entry.path for entry in _entries(path, True)]
    return None


def _leads_nowhere(entry: os.DirEntry[str]) -> bool:
    """True if a link has no target, or leads back to itself."""
    try:
        entry.stat()
    except OSError as error:
        if error.errno in _NOWHERE:
            return True
        raise
    return False
