"""FIFOs, sockets, devices and endless files in the place of a checkpoint's: refused at once, and never
between a restart and the older step that is sound."""

from __future__ import annotations

import io
import os
import socket
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.base.storage_deadlines import opening
from holdfast.core.checkpoint.names import manifest_key, read_manifest, step_prefix
from holdfast.core.store.contract import SMALL_FILE_BYTES, WHOLE_BYTES
from holdfast.core.store.regular import has_hole
from holdfast.errors import Corrupt, Exists, HoldfastWarning, NotFound, StoreError
from holdfast.formats.read.folder import ListedFolder, OneFile
from holdfast.store import LocalStore, get_small
from holdfast.tiers.records import segment

TERA = 3 << 40


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        name = f"/proc/self/fd/{(folder := os.open(path.parent, os.O_RDONLY))}/{path.name}"
        made.bind(name)  # the path itself may be too long for a socket
        os.close(folder)


def device(path: Path) -> None:
    path.symlink_to("/dev/null")


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(TERA)


def memory(path: Path) -> None:
    """A regular file that states no length, and whose reading fails."""
    path.symlink_to("/proc/self/mem")


IRREGULAR = {"a FIFO": fifo, "a socket": listening, "a device": device}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """One that waits for 30 s and not for ten minutes, should something wait after all."""
    with opening(30):
        made = LocalStore(tmp_path / "root")
    os.mkdir(made.root)
    return made


@pytest.mark.parametrize("kind", IRREGULAR)
def test_what_is_no_file_is_not_read(store: LocalStore, kind: str) -> None:
    IRREGULAR[kind](Path(store.root, "a"))
    reads: list[Callable[[], object]] = [
        lambda: store.get("a"),
        lambda: store.get_small("a"),
        lambda: store.open("a"),
        lambda: store.open_once("a"),
        lambda: store.read("a", 0, memoryview(bytearray(8))),
    ]
    for read in reads:
        with pytest.raises(Corrupt, match=f"/a' is {kind}, not a file"):
            read()
    with pytest.raises(NotFound):
        store.size("a")
    with pytest.raises((Exists, StoreError)):
        store.put("a", b"new", replacing=b"old")


def test_syncing_does_not_wait_for_a_writer(store: LocalStore) -> None:
    fifo(Path(store.root, "a"))
    with pytest.raises(StoreError):
        store.sync(["a"])


def test_a_folder_is_no_object(store: LocalStore) -> None:
    os.mkdir(Path(store.root, "a"))
    for read in (store.get, store.get_small, store.open, store.open_once):
        with pytest.raises(NotFound):
            read("a")


def test_a_link_to_a_file_is_read(store: LocalStore, tmp_path: Path) -> None:
    Path(tmp_path, "elsewhere").write_bytes(b"bytes")
    Path(store.root, "a").symlink_to(tmp_path / "elsewhere")
    assert store.get("a") == store.get_small("a") == b"bytes"


@pytest.mark.parametrize(
    "view", [lambda s: s, lambda s: OneFile(s, "a"), ListedFolder], ids=["itself", "one", "listed"]
)
def test_the_length_is_looked_at_first(store: LocalStore, view: Callable[..., LocalStore]) -> None:
    """Else so much memory would be asked for."""
    sparse(Path(store.root, "a"))
    with pytest.raises(Corrupt, match=f"has {TERA:,} bytes; .* at most {WHOLE_BYTES:,}"):
        view(store).get("a")
    os.truncate(Path(store.root, "a"), SMALL_FILE_BYTES + 1)
    with pytest.raises(Corrupt, match=f"at most {SMALL_FILE_BYTES:,} are read"):
        get_small(view(store), "a")
    with pytest.raises(Exists):
        store.put("a", b"new", replacing=b"old")


def test_no_more_is_read_than_a_file_says_to_have(store: LocalStore) -> None:
    memory(Path(store.root, "a"))
    assert store.get("a") == b""
    for reader in (store.open("a"), store.open_once("a")):
        with pytest.raises(Corrupt, match="ends at byte 0"):
            reader.read(0, memoryview(bytearray(8)))
        reader.close()


# ------------------------------------------------------------------ restarts


@pytest.fixture
def root(tmp_path: Path) -> LocalStore:
    for step in (1, 2):
        holdfast.save(tmp_path / "run", {"w": torch.full((1000,), float(step))}, step=step)
    return LocalStore(tmp_path / "run")


def restored(root: LocalStore) -> float:
    """The value that a restart begins with; it saves a step as well."""
    state = {"w": torch.zeros(1000)}
    with opening(30), holdfast.Checkpointer(root.root, state) as ck:
        ck.restore()
        value = float(state["w"][0])
        ck.save(3).wait()
    assert read_manifest(root, 3).step == 3
    return value


@pytest.mark.parametrize("kind", [fifo, listening, device, sparse, memory, os.mkdir])
def test_an_image_that_is_no_file(root: LocalStore, kind: Callable[[Path], None]) -> None:
    image = Path(root.root, step_prefix(2), read_manifest(root, 2).files[0].path)
    image.unlink()
    kind(image)
    with pytest.raises((Corrupt, NotFound)), opening(30):
        holdfast.open(root.root, step=2).read("w")
    with pytest.warns(HoldfastWarning, match="step 2"):
        assert restored(root) == 1


def test_a_manifest_that_never_ends(root: LocalStore) -> None:
    """It begins as it did, so that the step is taken for the newest."""
    os.truncate(Path(root.root, manifest_key(2)), TERA)
    with pytest.warns(HoldfastWarning, match="step 2"):
        assert restored(root) == 1


def test_a_claim_that_never_ends(root: LocalStore) -> None:
    claims = Path(root.root, "claims")
    claims.mkdir(exist_ok=True)
    sparse(claims / "0000000007.json")
    assert restored(root) == 2


def test_a_manifest_of_which_parts_were_never_written(root: LocalStore) -> None:
    """It is as long as one may be, and takes next to nothing of the disk."""
    path = Path(root.root, manifest_key(2))
    os.truncate(path, SMALL_FILE_BYTES + 1)
    with path.open("rb") as file:
        if not has_hole(io.FileIO(file.fileno(), closefd=False), SMALL_FILE_BYTES + 1):
            pytest.skip("this file system does not tell holes")
    with pytest.raises(Corrupt, match="parts that were never written"):
        root.get(manifest_key(2))
    with pytest.warns(HoldfastWarning, match="step 2"):
        assert restored(root) == 1


def test_a_header_of_a_segment_is_there_before_memory_is_set_aside(store: LocalStore) -> None:
    store.put("x", segment.MAGIC + (1 << 28).to_bytes(8, "little") + bytes(8))
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt), closing(store.open("x")) as reader:
            segment.read_header(reader, "x")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
