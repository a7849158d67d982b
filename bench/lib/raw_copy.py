"""Reads files and writes as many bytes with O_DIRECT: what a conversion could cost at least.

`python -m bench.lib.raw_copy FOLDER OUT BYTES` reads the largest files of FOLDER (again from the start if
they are too few), 4 threads, 8 MiB at a time, into a file OUT; prints {"seconds": ...}.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK = 8 << 20
THREADS = 4


def main(folder: str, out: str, size: int) -> None:
    paths = sorted(Path(folder).rglob("*"), key=lambda p: -p.stat().st_size if p.is_file() else 0)
    sources = [
        (os.open(p, os.O_RDONLY), at)
        for p in paths
        if p.is_file()
        for at in range(0, p.stat().st_size - BLOCK, BLOCK)
    ]
    local = threading.local()
    began = time.perf_counter()
    fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    os.posix_fallocate(fd, 0, size)

    def one(number: int) -> None:
        if not hasattr(local, "view"):
            local.view = memoryview(mmap.mmap(-1, BLOCK))
        source, at = sources[number % len(sources)]
        assert os.preadv(source, [local.view], at) == BLOCK
        os.pwrite(fd, local.view, number * BLOCK)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(one, range(size // BLOCK)))
    os.fsync(fd)
    os.close(fd)
    print(json.dumps({"seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
