"""The erasure code on one core, against a plain memory copy of the same data bytes.

Data of 1.5 GB, as k blocks; groups of 4 with one parity (k = 3) and two (k = 2), and k = 6 with two.
Encoding makes all parity blocks; one member's part is a row of them; contributions come one block at a
time, as from peers; rebuilding gives one lost data block, and as many as may be lost, from the rest.  All
memory has been touched before.  Ratios are the copy's time over the code's.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.lib.claims import Claim
from bench.lib.common import GB, Seconds, measuring, ratio, report, row, seconds, take_turns

CLAIMS = (
    Claim(
        "One core makes XOR parity, and rebuilds from it, at half a plain copy's speed.",
        r"^\d data and 1 parity blocks of [\d.]+ GB: (.+?) \|",
        at_least=0.5,
    ),
    Claim(
        "One core makes two parities, and rebuilds from them, at a quarter of a plain copy's speed.",
        r"^(\d) data and 2 parity blocks of [\d.]+ GB: (.+?) \|",
        at_least=0.25,
    ),
)
CODES = (3, 1), (2, 2), (6, 2)
DATA_BYTES = 1_500_000_000


class Blocks:
    """A code's data, parity, and room for what is rebuilt, in memory that has been touched."""

    def __init__(self, k: int, m: int, data_bytes: int) -> None:
        from holdfast.core.codec.erasure import Erasure

        self.code, self.k, self.m = Erasure(k, m), k, m
        size = self.code.padded(data_bytes // k)
        self.data_bytes = k * size
        pattern = np.frombuffer(np.random.default_rng(k).bytes(1 << 20), np.uint8)
        self.data = np.resize(pattern, k * size)
        self.copied = np.zeros(k * size, np.uint8)
        self.blocks = list(self.data.reshape(k, size))
        self.parity = dict(enumerate(np.zeros((m, size), np.uint8)))
        self.room = list(np.zeros((m, size), np.uint8))

    def copy(self) -> None:
        np.copyto(self.copied, self.data)

    def encode(self) -> None:
        self.code.encode(self.blocks, self.parity)

    def row(self) -> None:
        self.code.encode(self.blocks, {self.m - 1: self.parity[self.m - 1]})

    def contributions(self) -> None:
        for j, block in enumerate(self.blocks):
            self.code.accumulate(self.parity, j, block, fresh=not j)

    def rebuild_one(self) -> None:
        self._rebuild(1)

    def rebuild(self) -> None:
        self._rebuild(self.m)

    def _rebuild(self, num_wanted: int) -> None:
        """Without the first m data blocks."""
        have = dict(enumerate(self.blocks)) | {self.k + r: p for r, p in self.parity.items()}
        for number in range(self.m):
            del have[number]
        self.code.rebuild(have, dict(enumerate(self.room[:num_wanted])))

    def check(self) -> None:
        """What was rebuilt is what was lost."""
        for number, found in enumerate(self.room):
            assert np.array_equal(found, self.blocks[number])


def timed(work: Callable[[], None]) -> Callable[[int], float]:
    def once(_: int) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return once


def measure(k: int, m: int, args: argparse.Namespace) -> dict[str, Any]:
    blocks = Blocks(k, m, DATA_BYTES // (10 if args.small else 1))
    contestants = {"copy": blocks.copy, "encode": blocks.encode, "row": blocks.row,
                   "contributions": blocks.contributions, "rebuild one": blocks.rebuild_one,
                   "rebuild": blocks.rebuild}  # fmt: skip
    for work in contestants.values():
        work()
    blocks.check()
    samples = take_turns({name: timed(work) for name, work in contestants.items()}, args.rounds)
    blocks.check()
    return {"k": k, "m": m, "data_bytes": blocks.data_bytes, "samples": samples}


WHAT = {
    "encode": "all parity",
    "row": "one member's parity row (the last)",
    "contributions": "all parity, a block at a time",
    "rebuild one": "one data block, without as many as may be lost",
    "rebuild": "as many data blocks as may be lost",
}


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [line for f in found.values() for line in rows_of(f)]


def rows_of(f: dict[str, Any]) -> list[dict[str, Any]]:
    samples: Seconds = f["samples"]
    size, m = f["data_bytes"], f["m"]
    title = f"{f['k']} data and {m} parity blocks of {size / f['k'] / GB:.2f} GB: "
    return [
        row(
            title + what,
            seconds(samples, name, size),
            f"copying the data {seconds(samples, 'copy', size)}",
            ratio(samples, "copy", name),
        )
        for name, what in WHAT.items()
        if m > 1 or name not in ("row", "rebuild one")  # the same as all
    ]


def main() -> None:
    args = measuring(__doc__, rounds=12).parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    started = time.time()
    found = {f"{k}+{m}": measure(k, m, args) for k, m in CODES}
    report(CLAIMS, __doc__, args, found, rows(found), started)


if __name__ == "__main__":
    main()
