"""The store on a file system: by the suite, and what only shows on disks that fail."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.store.local import sweep_temp_files
from holdfast.errors import (
    Corrupt,
    Exists,
    HoldfastError,
    HoldfastWarning,
    NotFound,
    OutOfSpace,
    StoreError,
    Unavailable,
    UsageError,
)
from holdfast.store import LocalStore, Store, directories, tempfiles
from holdfast.testing import StoreTests
from holdfast.testing.stores import make, raised, read, sample

MIB = 1 << 20


class TestLocalStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "root")


class TestLocalStoreBuffered(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        store = LocalStore(tmp_path / "root")
        store.direct = False
        return store


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def files_in(root: str | Path) -> list[str]:
    """Every file below `root`, temporary ones too."""
    return sorted(os.path.relpath(path, root) for path in directories.walk(str(root)))


def aligned(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


# ---------------------------------------------------------------- durability


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to files, in order, by the paths it is done to."""
    done: list[str] = []

    def record(name: str, paths: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*args: Any, **named: Any) -> Any:
            text = f"{name} {paths(*args)}"
            result = real(*args, **named)
            done.append(text)
            return result

        monkeypatch.setattr(os, name, call)

    def of(path: str) -> str:
        return "temp" if ".tmp-" in path else os.path.basename(path)

    record("fsync", lambda fd: of(os.readlink(f"/proc/self/fd/{fd}")))
    record("link", lambda source, target: f"{of(source)} {of(target)}")
    record("replace", lambda source, target: f"{of(source)} {of(target)}")
    record("unlink", of)
    record("mkdir", of)
    return done


MADE = ["mkdir root", "fsync {base}", "mkdir d", "fsync root", "mkdir e", "fsync d"]
NAMED = ["fsync e", "fsync d", "fsync root"]


def test_put_is_durable_before_it_returns(store: LocalStore, calls: list[str]) -> None:
    store.put("d/e/a", b"x")
    made = [line.format(base=Path(store.root).parent.name) for line in MADE]
    assert calls == [*made, "fsync temp", "replace temp a", *NAMED]


def test_put_if_absent_is_durable_before_it_returns(store: LocalStore, calls: list[str]) -> None:
    store.put("d/e/b", b"x")
    calls.clear()
    store.put("d/e/a", b"x", if_absent=True)
    assert calls == ["fsync temp", "link temp a", "unlink temp", *NAMED]


def test_finish_is_durable_before_it_returns(store: LocalStore, calls: list[str]) -> None:
    store.put("d/e/b", b"x")
    writer = store.create("d/e/a", 5000)
    writer.write(0, bytes(5000))
    calls.clear()
    writer.finish()
    assert calls == ["fsync temp", "link temp a", "unlink temp", *NAMED]


def test_what_is_reported_to_exist_is_durable(store: LocalStore, calls: list[str]) -> None:
    store.put("d/e/a", b"x")
    calls.clear()
    raised(Exists, store.put, "d/e/a", b"y", if_absent=True)
    assert calls == ["fsync temp", *NAMED, "unlink temp"]


def test_delete_is_durable_before_it_returns(store: LocalStore, calls: list[str]) -> None:
    store.put("d/e/a", b"x")
    calls.clear()
    store.delete("d/e/a")
    assert calls == ["unlink a", "fsync e"]
    assert os.listdir(store.root) == []


def failing(
    monkeypatch: pytest.MonkeyPatch, name: str, code: int, when: Callable[..., bool]
) -> list[tuple[Any, ...]]:
    """Let `os.<name>` raise an OSError when `when(*args)`; returns the calls that did."""
    real, failed = getattr(os, name), []

    def call(*args: Any, **named: Any) -> Any:
        if when(*args):
            failed.append(args)
            raise OSError(code, os.strerror(code))
        return real(*args, **named)

    monkeypatch.setattr(os, name, call)
    return failed


def is_directory(fd: int) -> bool:
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def test_failed_fsync_is_not_tried_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = store.create("d/a", 3)
    writer.write(0, b"abc")
    with monkeypatch.context() as patch:
        failing(patch, "fsync", errno.EIO, lambda fd: not is_directory(fd))
        error = raised(Unavailable, writer.finish)
    assert error.retryable
    assert store.root in str(error)
    assert "EIO" in str(error)
    assert "abort" in str(raised(UsageError, writer.finish))
    writer.abort()
    assert files_in(store.root) == []


def test_abort_takes_back_a_name_that_may_not_last(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = store.create("d/a", 3)
    writer.write(0, b"abc")
    with monkeypatch.context() as patch:
        failing(patch, "fsync", errno.EIO, is_directory)
        raised(Unavailable, writer.finish)
    writer.abort()
    assert store.list() == []
    make(store, "d/a", b"again")
    assert store.get("d/a") == b"again"


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO])
def test_link_that_failed_but_was_done_counts_as_done(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.link

    def reply_lost(source: str, target: str) -> None:
        real(source, target)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", reply_lost)
    store.put("a", b"x", if_absent=True)
    make(store, "b", b"y")
    assert files_in(store.root) == ["a", "b"]
    assert raised(StoreError, store.put, "a", b"z", if_absent=True)
    assert store.get("a") == b"x"


def test_rename_that_failed_but_was_done_counts_as_done(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def reply_lost(source: str, target: str) -> None:
        real(source, target)
        raise OSError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "replace", reply_lost)
    store.put("a", b"x")
    assert store.get("a") == b"x"


def test_failed_put_leaves_the_old_object_and_nothing_else(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"old")
    for name in ("pwrite", "fsync", "replace"):
        with monkeypatch.context() as patch:
            assert failing(patch, name, errno.EIO, lambda *_: True) == []
            raised(Unavailable, store.put, "a", b"new")
        assert store.get("a") == b"old"
        assert files_in(store.root) == ["a"]


# ---------------------------------------------------------------- O_DIRECT


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether O_DIRECT was on, for every pwrite."""
    real, seen = os.pwrite, list[bool]()

    def call(fd: int, data: memoryview, offset: int) -> int:
        seen.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", call)
    return seen


def has_direct(path: Path) -> bool:
    try:
        os.close(os.open(path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


DATA = sample(3 * MIB + 5000)


@pytest.mark.parametrize("memory", [aligned(DATA), memoryview(DATA), memoryview(b"x" + DATA)[1:]])
def test_all_bytes_go_direct(
    store: LocalStore, tmp_path: Path, flags: list[bool], memory: memoryview
) -> None:
    if not has_direct(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    writer = store.create("a", len(DATA))
    writer.write(MIB, memory[MIB:])
    writer.write(0, memory[:MIB])
    writer.finish()
    assert all(flags)
    assert store.direct
    assert store.get("a") == DATA


def test_refusal_at_open_is_remembered(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, flags: list[bool]
) -> None:
    refused = failing(monkeypatch, "open", errno.EINVAL, lambda _, how, *__: how & os.O_DIRECT)
    for key in ("a", "b"):
        make(store, key, DATA)
        assert store.get(key) == DATA
    assert len(refused) == 1
    assert not any(flags)
    assert files_in(store.root) == ["a", "b"]


def test_file_left_by_a_refused_open_is_removed(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def make_then_refuse(path: str, how: int, *mode: int) -> int:
        fd = real(path, how & ~os.O_DIRECT, *mode)
        if how & os.O_DIRECT:
            os.close(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return fd

    monkeypatch.setattr(os, "open", make_then_refuse)
    make(store, "a", b"x")
    assert files_in(store.root) == ["a"]


def test_refusal_at_a_write_is_remembered(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_direct(fd: int, *_: Any) -> bool:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    refused = failing(monkeypatch, "pwrite", errno.EINVAL, is_direct)
    writer = store.create("a", len(DATA))
    writer.write(MIB, DATA[MIB:])
    writer.write(0, DATA[:MIB])
    writer.finish()
    make(store, "b", DATA)
    assert store.get("a") == store.get("b") == DATA
    assert len(refused) <= 1  # none where the file system refused at open
    assert not store.direct


def test_short_writes_are_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: 64 << 10], at))
    make(store, "a", DATA)
    store.put("b", DATA)
    assert store.get("a") == store.get("b") == DATA


def test_a_write_of_nothing_is_an_error(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    raised(Unavailable, store.put, "a", b"x")


def test_short_reads_are_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    store.put("a", DATA)
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:1000]], at))
    assert read(store, "a", 10, 20_000) == DATA[10:20_000]


def test_abort_waits_for_the_writes_of_other_threads(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else their descriptor would be closed, and soon be that of another file."""
    real, inside, go_on = os.pwrite, threading.Event(), threading.Event()

    def slow(fd: int, data: memoryview, at: int) -> int:
        inside.set()
        assert go_on.wait(120)
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", slow)
    writer = store.create("a", 3)
    threads = [threading.Thread(target=writer.write, args=(0, b"abc"))]
    threads[0].start()
    assert inside.wait(120)
    threads.append(threading.Thread(target=writer.abort))
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    assert len(files_in(store.root)) == 1
    go_on.set()
    for thread in threads:
        thread.join(120)
    assert files_in(store.root) == []


# ---------------------------------------------------------------- errors


@contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    """A small tmpfs at `path`, where this user may mount."""
    path.mkdir(exist_ok=True)
    if not shutil.which("mount"):
        pytest.skip("there is no mount command")
    command = ["mount", "-t", "tmpfs", "-o", options, "holdfast-test", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_full_disk(store: LocalStore, tmp_path: Path) -> None:
    with mounted(tmp_path / "root", "size=1m"):
        for call in (
            lambda: store.create("d/a", 2 * MIB),
            lambda: store.put("d/a", bytes(2 * MIB)),
        ):
            error = raised(OutOfSpace, call)
            assert f"{store.root}/d/a" in str(error)
            assert "No space left" in str(error)
            assert error.hint
            assert error.key == "d/a"
            assert files_in(store.root) == []
        store.put("d/a", b"small")
        assert store.get("d/a") == b"small"


def test_read_only_file_system(store: LocalStore, tmp_path: Path) -> None:
    with mounted(tmp_path / "root", "size=1m"):
        store.put("a", b"x")
        remount = ["mount", "-o", "remount,ro", store.root]
        if subprocess.run(remount, capture_output=True, check=False).returncode:
            pytest.skip("remounting is not permitted")
        for call in (
            lambda: store.put("b", b"y"),
            lambda: store.create("b", 1),
            lambda: store.delete("a"),
        ):
            error = raised(StoreError, call)
            assert type(error) is StoreError
            assert "EROFS" in str(error)
            assert "read-only" in str(error.hint)
        assert store.get("a") == b"x"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOENT, NotFound),
        (errno.EDQUOT, OutOfSpace),
        (errno.EACCES, StoreError),
        (errno.EIO, Unavailable),
        (errno.ESTALE, Unavailable),
        (errno.ETIMEDOUT, Unavailable),
        (errno.EMFILE, Unavailable),
        (errno.ENAMETOOLONG, StoreError),
    ],
)
def test_errors_are_translated(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StoreError]
) -> None:
    store.put("d/a", b"x")
    failing(monkeypatch, "open", code, lambda *_: True)
    error = raised(HoldfastError, read, store, "d/a", 0, 1)
    assert type(error) is kind
    assert error.key == "d/a"
    assert f"cannot read '{store.root}/d/a'" in str(error)
    assert errno.errorcode[code] in str(error)
    assert isinstance(error.__cause__, OSError)


def test_key_that_is_the_directory_of_another(store: LocalStore) -> None:
    store.put("a", b"x")
    store.put("d/b", b"x")
    for call in (lambda: store.put("a/b", b"y"), lambda: store.put("d", b"y")):
        assert "directory of other keys" in str(raised(StoreError, call))
    assert store.list() == ["a", "d/b"]


def test_name_too_long_for_the_file_system(store: LocalStore) -> None:
    assert "255 bytes" in str(raised(StoreError, store.put, "a" * 300, b"x"))


def test_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "no" / "such")
    (tmp_path / "file").write_bytes(b"")
    for name in ("dangling", "file"):
        raised(StoreError, LocalStore(tmp_path / name / "root").put, "a", b"x")


# ---------------------------------------------------------------- directories and leftovers


def test_directory_that_vanishes_is_made_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open
    removed: list[str] = []

    def vanish(path: str, how: int, *mode: int, dir_fd: int | None = None) -> int:
        if how & os.O_CREAT and len(removed) < 3:
            removed.append(path)
            directories.remove_empty_directories(os.path.dirname(path), store.root)
        return real(path, how, *mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", vanish)
    store.put("d/e/a", b"x")
    removed.clear()
    make(store, "f/g/b", b"y")
    assert len(removed) == 3
    assert store.list() == ["d/e/a", "f/g/b"]


def test_emptied_directories_go_but_not_the_root(store: LocalStore) -> None:
    store.put("d/e/a", b"x")
    store.put("d/b", b"x")
    store.delete("d/e/a")
    assert os.listdir(os.path.join(store.root, "d")) == ["b"]
    store.delete("d/b")
    assert os.listdir(store.root) == []
    store.create("f/g/a", 5).abort()
    assert os.listdir(store.root) == []


def test_list_survives_what_vanishes_under_it(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("a/1", "b/1", "c/1"):
        store.put(key, b"x")
    real = os.scandir

    def vanish(path: str) -> Any:
        if os.path.basename(path) == "b":
            os.unlink(os.path.join(path, "1"))
            os.rmdir(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", vanish)
    assert store.list() == ["a/1", "c/1"]


def test_list_shows_no_files_under_way(store: LocalStore) -> None:
    store.put("d/a", b"x")
    for name in (".tmp-foreign", ".nfs00000000deadbeef"):
        Path(store.root, "d", name).write_bytes(b"x")
    assert store.list() == ["d/a"]
    assert store.list("d/.") == []


def test_list_does_not_hide_a_sick_file_system(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"x")
    failing(monkeypatch, "scandir", errno.ESTALE, lambda _: True)
    raised(Unavailable, store.list)


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_sweep_removes_only_what_the_dead_of_this_host_left(store: LocalStore) -> None:
    store.put("d/a", b"x")
    writer = store.create("d/b", 3)
    mine, pid, dead = tempfiles.owner(), os.getpid(), dead_process()
    names = {
        f".tmp-{mine}-{dead}-{'0' * 16}": True,
        f".tmp-{mine}-{pid}-{'0' * 16}": False,
        f".tmp-{mine}-1-{'0' * 16}": False,
        f".tmp-other-{mine}-{dead}-{'0' * 16}": False,
        f".tmp-other.0-{dead}-{'0' * 16}": False,
        f".tmp-{mine}-{dead}": False,
        f".tmp-{mine}-{'9' * 30}-{'0' * 16}": False,
        f"x.tmp-{mine}-{dead}-{'0' * 16}": False,
    }
    for name in names:
        Path(store.root, "d", name).write_bytes(b"left over")
    stale = [name for name in names if names[name]]
    assert sweep_temp_files(store.root) == [os.path.join(store.root, "d", name) for name in stale]
    assert sweep_temp_files(store.root) == []
    left = [name for name in os.listdir(os.path.join(store.root, "d")) if name in names]
    assert sorted(left) == sorted(set(names) - set(stale))
    writer.write(0, b"abc")
    writer.finish()
    assert store.get("d/b") == b"abc"


def test_sweep_of_nothing(tmp_path: Path) -> None:
    assert sweep_temp_files(tmp_path / "no" / "such") == []


def test_killed_writer_leaves_no_object_and_is_swept(store: LocalStore) -> None:
    code = (
        "import os, signal, sys; from holdfast.store import LocalStore\n"
        "writer = LocalStore(sys.argv[1]).create('d/a', 8192)\n"
        "writer.write(0, bytes(4096)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, store.root], env=environment, check=False)
    assert store.list() == []
    assert len(files_in(store.root)) == 1
    assert len(sweep_temp_files(store.root)) == 1
    make(store, "d/a", b"x")
    assert files_in(store.root) == ["d/a"]


def test_no_descriptor_is_left_open(store: LocalStore) -> None:
    def use() -> None:
        make(store, "d/a", b"x")
        store.put("d/b", b"x")
        for call in (
            lambda: store.put("d/b", b"y", if_absent=True),
            lambda: make(store, "d/a", b"y"),
            lambda: read(store, "d/a", 0, 99),
        ):
            with suppress(HoldfastError):
                call()
        store.create("d/c", 10).abort()
        store.delete("d/a")

    before = os.listdir("/proc/self/fd")
    use()
    assert os.listdir("/proc/self/fd") == before


def test_not_durable_until_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is flushed for each object, and everything by `sync`: bytes, names, directories."""
    flushed: list[str] = []
    fsync = os.fsync

    def counted(fd: int) -> None:
        flushed.append(os.path.realpath(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", counted)
    store, keys = LocalStore(tmp_path / "s", durable=False), ["a/b/x", "a/c/y", "z"]
    for key in keys:
        writer = store.create(key, 5000)
        writer.write(0, bytes(5000))
        writer.finish()
    store.put("small", b"1")
    assert flushed == []
    store.sync([*keys, "small"])
    names = [*keys, "small", "", "a", "a/b", "a/c"]
    assert set(flushed) >= {os.path.normpath(os.path.join(store.root, name)) for name in names}
    with pytest.raises(StoreError, match="missing"):
        store.sync(["missing"])


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 3 * MIB + 5])
def test_what_is_read_once_is_what_was_written(tmp_path: Path, size: int) -> None:
    store, data = LocalStore(tmp_path), os.urandom(size)
    store.put("x", data)
    reader = store.open_once("x")
    for shift in (0, 1):  # where in a page the memory begins
        into = memoryview(mmap.mmap(-1, 4 * MIB))[shift:]
        for start, stop in ((0, size), (4096, size), (1, size - 1), (5000, 5001), (4095, 8193)):
            if start < stop <= size:
                reader.read(start, into[: stop - start])
                assert into[: stop - start] == data[start:stop], (shift, start, stop)
                assert into[stop - start :][:4096] == bytes(min(4096, len(into) - stop + start))
                into[: stop - start] = bytes(stop - start)
        for more in (1, 5000):
            with pytest.raises(Corrupt, match=str(size)):
                reader.read(0, into[: size + more])
            into[:size] = bytes(size)
    reader.close()
    with pytest.raises(UsageError):
        reader.read(0, into[:1])


def test_forks_read_into_memory_of_their_own(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    data = [bytes([number]) * (MIB + 1) for number in range(2)]
    for number in range(2):
        store.put(f"x{number}", data[number])

    def read(number: int) -> bool:
        reader, into = store.open_once(f"x{number}"), bytearray(MIB + 1)
        for _ in range(50):
            reader.read(0, memoryview(into))
            if into != data[number]:
                return False
        return True

    child = os.fork()
    if child == 0:
        os._exit(not read(1))
    assert read(0)
    assert os.waitpid(child, 0)[1] == 0


def test_read_once_where_direct_reads_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    store.put("x", b"abc" * 5000)
    refused: list[int] = []

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, views, offset)

    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    into = memoryview(bytearray(15000))
    reader = store.open_once("x")
    reader.read(0, into)
    assert into == b"abc" * 5000 and refused
    reader.read(3, into[:6])
    assert into[:6] == b"abcabc" and len(refused) == 1  # it does not ask again
    reader.close()


def test_read_once_where_direct_reads_are_refused_to_two_threads_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    store.put("x", b"abc" * 5000)
    both = threading.Barrier(2)

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            both.wait(120)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, views, offset)

    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    reader = store.open_once("x")

    def read(start: int) -> bytes:
        into = memoryview(bytearray(3000))
        reader.read(start, into)
        return bytes(into)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read, (0, 6000))) == [b"abc" * 1000] * 2
    reader.close()


def test_what_was_moved_elsewhere_is_listed_by_its_link(tmp_path: Path) -> None:
    """As a step on a larger disk, from which nothing is deleted; links that lead in a circle end."""
    store = LocalStore(tmp_path / "root")
    for key in ("a/1/x", "a/2/y"):
        store.put(key, b"")
    (tmp_path / "root/a/1").rename(tmp_path / "moved")
    (tmp_path / "root/a/1").symlink_to(tmp_path / "moved")
    (tmp_path / "root/a/3").symlink_to(tmp_path / "root/a")
    (tmp_path / "moved/back").symlink_to(tmp_path / "moved")
    (tmp_path / "root/p").symlink_to(tmp_path / "q")
    (tmp_path / "q").mkdir()
    (tmp_path / "q/p").symlink_to(tmp_path / "root/p")
    assert store.list("a/") == ["a/1/x", "a/2/y"]
    assert store.list("p/") == []
    with pytest.warns(HoldfastWarning, match="root/a/1' is a link"):
        store.delete("a/1/x")
    assert store.list("a/") == ["a/1/x", "a/2/y"]


def test_a_folder_behind_many_links_is_listed_once(tmp_path: Path) -> None:
    """Each of 40 folders has two links to the next: there are 2 ** 40 ways to the last one."""
    store = LocalStore(tmp_path / "root")
    for number in range(40):
        store.put(f"a/{number}/x", b"")
        for name in "pq" if number < 39 else "":
            (tmp_path / f"root/a/{number}" / name).symlink_to(f"../{number + 1}")
    plain = {f"a/{number}/x" for number in range(40)}
    assert plain <= {*store.list("a/")} and len(store.list("a/")) <= 2 * 40


def test_folders_deeper_than_a_key_is_long_are_not_looked_into(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    store.put("a/x", b"")
    store.put("a/" * 500 + "x", b"")
    folder = os.open(tmp_path / "root/a", os.O_RDONLY)
    try:
        for _ in range(1500):
            os.mkdir("b", dir_fd=folder)
            below = os.open("b", os.O_RDONLY, dir_fd=folder)
            os.close(folder)
            folder = below
    finally:
        os.close(folder)
    assert store.list("a/") == ["a/" * 500 + "x", "a/x"]
    subprocess.run(["rm", "-rf", tmp_path / "root"], check=True)


@pytest.mark.parametrize("name", ["b\\c", "\udcff", ".nfs0/x"])
def test_files_whose_names_are_no_keys_are_not_listed(tmp_path: Path, name: str) -> None:
    store = LocalStore(tmp_path / "root")
    store.put("a/x", b"12")
    path = tmp_path / "root/a" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"of another")
    assert store.list("a/") == store.list() == ["a/x"]
    assert store.entries("a/") == [("a/x", 2)]


def test_a_part_that_comes_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    writer = store.create("a", 6)
    writer.write(0, b"failed")
    writer.write(0, b"retry!")
    writer.finish()
    assert store.get("a") == b"retry!"


def test_entries_have_what_the_list_has(tmp_path: Path) -> None:
    """A link has the length of what it leads to; one that leads nowhere is listed, and has none."""
    store = LocalStore(tmp_path / "root")
    store.put("a/x", b"12345")
    (tmp_path / "root/a/y").symlink_to(tmp_path / "root/a/x")
    (tmp_path / "root/a/z").symlink_to(tmp_path / "nowhere")
    (tmp_path / "root/a/zz").symlink_to("x" * 3000)
    (tmp_path / "root/a/.tmp-w").write_bytes(b"under way")
    assert store.entries("a/") == [("a/x", 5), ("a/y", 5)]
    assert store.list("a/") == ["a/x", "a/y", "a/z", "a/zz"]
