"""The cap on bandwidth: one for all that an agent does for a rank, whoever asks for it.

The last piece that is moved may begin when all before it were moved at the cap: so the time that everything
takes is bounded from below, on however busy a machine.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.base.threads import in_threads
from holdfast.core.codec.stripes import Stripes, copy
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.client import Client
from holdfast.tiers.memory.node.persist import WRITE_BYTES
from holdfast.tiers.memory.node.protect import WINDOW_BYTES, guard_bytes
from holdfast.tiers.memory.node.throttle import Throttle
from tiers.memory.agents import JOB, agent, hello, kill, noise, put

pytestmark = pytest.mark.slow

MIB = 1 << 20
DATA = noise(24 * MIB, 1)
LAST = max(WRITE_BYTES, WINDOW_BYTES)
"""The most that may be moved at once."""
GRAIN_S = 0.05
"""Of a file system's times."""


def test_several_threads_share_a_cap() -> None:
    """61 MB at 200 MB/s."""
    pace, began = Throttle(200_000_000), time.monotonic()
    in_threads(lambda _: pace.wait(1_000_000), list(range(61)), 4)
    assert 0.28 < time.monotonic() - began < 600


def persist(client: Client, place: Path, attempt: str) -> None:
    url = f"file://{place}/root"
    client.ask(w.Persist(JOB, attempt, 0, os.getpid(), url, f"steps/1/{attempt}/r0", 60.0))


def protect(client: Client, attempt: str) -> None:
    """Rank 0 keeps a copy of rank 1's image."""
    held = client.ask(w.Ask(JOB), w.Held)
    images = {i.rank: i for i in held.images if (i.kind, i.attempt) == ("share", attempt)}
    stripes: Stripes = copy(tuple(images[r].bytes for r in (0, 1)), 2)
    take = w.Take(JOB, os.getpid(), "guard", 0, attempt, 1, guard_bytes(stripes))
    lease = client.ask(take, w.Lease)
    members = tuple(
        w.Member(r, i.bytes, i.table, i.digest, held.card) for r, i in sorted(images.items())
    )
    order = w.Protect(
        JOB, lease.name, attempt, 0, members, stripes.num_data, stripes.num_parity,
        stripes.kept_bytes, guard_bytes(stripes),
    )  # fmt: skip
    assert client.ask(order, str)


def test_protection_and_storage_share_the_cap_of_a_rank(tmp_path: Path) -> None:
    """Both at once take as long as both one after the other."""
    cap = 32 * MIB
    with agent(tmp_path / "node") as client:
        hello(client, bytes_per_s=cap)
        for rank in (0, 1):
            put(client, "0001-000001", DATA, rank=rank, commit=False)
        began = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            both = [
                pool.submit(persist, client, tmp_path, "0001-000001"),
                pool.submit(protect, client, "0001-000001"),
            ]
            for one in both:
                one.result(300)
        assert time.monotonic() - began >= (2 * len(DATA) - LAST) / cap


def test_the_next_agent_keeps_the_cap(tmp_path: Path) -> None:
    """It is asked by a rank that it has never met: what the last one noted holds."""
    cap = 16 * MIB
    with agent(tmp_path / "node") as client:
        hello(client, bytes_per_s=cap)
        put(client, "0001-000001", DATA)
        kill(client.root)
        client.start("127.0.0.1")
        began = time.monotonic()
        persist(client, tmp_path, "0001-000001")
        assert time.monotonic() - began >= (len(DATA) - LAST) / cap


def test_what_is_flushed_keeps_to_the_cap(tmp_path: Path) -> None:
    """Nobody asks for it; it is written beside the other jobs of a node all the same."""
    cap, root = 16 * MIB, tmp_path / "root"
    with agent(tmp_path / "node") as client:
        hello(client, root=f"file://{root}", flush_s=0.1, bytes_per_s=cap)
        put(client, "0001-000001", DATA)
        client.ask(w.Bye(JOB, os.getpid(), finished=False))
        image = root / "steps/0000000001/0001-000001/r00000.safetensors"
        until = time.monotonic() + 120
        while not image.exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        began = image.parents[1].stat().st_mtime  # when the directory of the attempt was made
        assert image.stat().st_mtime - began >= (len(DATA) - LAST) / cap - GRAIN_S
        assert image.read_bytes().startswith(DATA)
