"""Parts are written in multiples of what a store asks for by `Writer.block_bytes`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
import holdfast.live.roots
from builders import memory
from holdfast.core.checkpoint.names import read_manifest, step_prefix
from holdfast.core.checkpoint.verifying import verify
from holdfast.errors import UsageError
from holdfast.formats.converting import convert
from holdfast.formats.write.begun import BegunFiles
from holdfast.live.saving.writing import WRITE_BYTES
from holdfast.store import Store, Writer

MIB = 1 << 20


class Coarse:
    """A store that takes parts in multiples of `block_bytes`, as object storage does."""

    def __init__(self, inner: Store, block_bytes: int) -> None:
        self.inner = inner
        self.block_bytes = block_bytes
        self.parts: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def create(self, key: str, size: int) -> Writer:
        return CoarseWriter(self, self.inner.create(key, size), size)  # type: ignore[return-value]


class CoarseWriter:
    """Refuses a part that does not begin and end at a block."""

    def __init__(self, store: Coarse, inner: Writer, size: int) -> None:
        self.block_bytes = store.block_bytes
        self._store, self._inner, self._size = store, inner, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, offset: int, data: memoryview) -> None:
        stop = offset + len(data)
        assert offset % self.block_bytes == 0, offset
        assert stop % self.block_bytes == 0 or stop == self._size, stop
        self._store.parts.append((offset, stop))
        self._inner.write(offset, data)


@pytest.mark.parametrize("block_bytes", [4096, 4 * MIB, 16 * MIB, 64 * MIB])
def test_a_save(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Coarse(memory(), block_bytes)
    monkeypatch.setattr(holdfast.live.roots, "open_store", lambda url: store)
    values = torch.arange(10 * MIB, dtype=torch.float32)  # 40 MiB
    holdfast.save(store.url, {"data": {"x": values}}, step=1)
    assert verify(store.inner, 1).good
    (file,) = read_manifest(store.inner, 1).files
    size = store.inner.size(step_prefix(1) + file.path)
    part = max(block_bytes, WRITE_BYTES)
    assert sorted(store.parts) == [(at, min(at + part, size)) for at in range(0, size, part)]


def test_who_cannot_choose_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.save(tmp_path / "a", {"data": {"x": torch.ones(8)}}, step=1)
    create = BegunFiles.create
    monkeypatch.setattr(
        BegunFiles,
        "create",
        lambda self, key, size: CoarseWriter(
            Coarse(self, 64 * MIB), create(self, key, size), size
        ),
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"takes multiples of 67,108,864 \(Writer.block_bytes\)"):
        convert(tmp_path / "a", tmp_path / "b", to="dcp", memory_bytes=64 * MIB)
