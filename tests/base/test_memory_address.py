"""The address of memory, as numpy says it."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from holdfast.base.memory_address import memory_address

MEMORY = {
    "read-only": memoryview(b"x" * 100),
    "a part": memoryview(bytearray(9000))[7:],
    "a map": mmap.mmap(-1, 8192),
    "a view of a map": memoryview(mmap.mmap(-1, 8192))[4096:],
    "an array": memoryview(np.zeros((3, 5), "f4")).cast("B"),
}


@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY)
def test_it_is_that_of_numpy(memory: memoryview | mmap.mmap) -> None:
    assert memory_address(memory) == np.frombuffer(memory, np.uint8).ctypes.data


def test_nothing_is_held() -> None:
    """Memory of which there is a view cannot grow or be closed."""
    memory, closed = bytearray(10), mmap.mmap(-1, 4096)
    memory_address(memoryview(memory))
    memory.append(1)
    memory_address(closed)
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        memory_address(closed)
