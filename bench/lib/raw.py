"""The raw device: the same bytes by plain O_DIRECT writes, or by preadv into the same tensors."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

BLOCK = 8 << 20
READ = 2 << 20
THREADS = 2


def filled(size: int) -> memoryview:
    """Page-aligned memory with something in every page."""
    area = mmap.mmap(-1, -(-size // 4096) * 4096)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    some = np.random.default_rng(0).integers(0, 1 << 63, 1 << 17, np.int64).view(np.uint8)
    into = np.frombuffer(area, np.uint8)
    into[:] = np.resize(some, len(into))
    return memoryview(area)


def write(path: Path, memory: memoryview) -> None:
    """Two threads of 8 MiB O_DIRECT writes into reserved space, then fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    try:
        os.posix_fallocate(fd, 0, len(memory))
        starts = range(0, len(memory), BLOCK)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda at: os.pwrite(fd, memory[at : at + BLOCK], at), starts))
        os.fsync(fd)
    finally:
        os.close(fd)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def write_tensors(path: Path, tensors: list[torch.Tensor]) -> None:
    with open(path, "wb") as f:
        for t in tensors:
            f.write(bytes_of(t))
        f.flush()
        os.fsync(f.fileno())


def read_tensors(path: Path, tensors: list[torch.Tensor]) -> None:
    """Two threads of 2 MiB preadv straight into the tensors; nothing is verified."""
    work, at = [], 0
    for t in tensors:
        view = bytes_of(t)
        for start in range(0, len(view), READ):
            work.append((at + start, view[start : start + READ]))
        at += len(view)
    fd = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda w: _read(fd, *w), work))
    finally:
        os.close(fd)


def _read(fd: int, at: int, view: memoryview) -> None:
    while view:
        done = os.preadv(fd, [view], at)
        assert done, "file ends early"
        at, view = at + done, view[done:]
