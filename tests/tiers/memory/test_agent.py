"""The agent as a process: what it holds outlives it, strangers learn nothing, limits hold."""

import asyncio
import fcntl
import http.client
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from core.store.test_local import mounted
from holdfast.base.host import start_time
from holdfast.base.threads import in_threads
from holdfast.core.codec.stripes import copy
from holdfast.errors import (
    AgentUnreachable,
    Corrupt,
    HoldfastError,
    NotFound,
    OutOfSpace,
    SegmentLost,
    UsageError,
)
from holdfast.tiers.memory.node import client as c
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.agent import THREADS, Agent
from holdfast.tiers.memory.node.client import Client
from holdfast.tiers.memory.node.fetch import Peer
from holdfast.tiers.memory.node.persist import WRITE_BYTES
from holdfast.tiers.memory.node.protect import guard_bytes
from holdfast.tiers.memory.node.segment import Segments, with_table
from holdfast.tiers.memory.node.tls import serving
from tiers.memory.agents import JOB, agent, await_gone, hello, is_gone, kill, noise, pid_of, put

DATA = noise(3_000_000, 1)
LARGE = noise(2 * WRITE_BYTES + len(DATA), 2)
"""Stored in three parts."""

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "node"


def image(client: Client, lease: w.Lease) -> bytes:
    return (client.root / "jobs" / JOB / lease.name).read_bytes()


def test_several_starts_make_one_agent(root: Path) -> None:
    """Several ranks come up at once: one agent, and everybody is served."""
    clients = [Client(root, deadline_s=120.0) for _ in range(4)]
    threads = [threading.Thread(target=c.start, args=("127.0.0.1",)) for c in clients]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    pids = {c.ask(w.Status(), w.AgentReport).pid for c in clients}
    assert pids == {pid_of(root)}
    clients[0].ask(w.Stop())
    await_gone(pid_of(root))


def test_it_is_in_a_session_of_its_own(root: Path) -> None:
    with agent(root):
        pid = pid_of(root)
        assert os.getsid(pid) == pid != os.getsid(0)


def priorities(pid: int) -> Counter[int]:
    """The number of an agent's threads by their priority."""
    found: Counter[int] = Counter()
    for task in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):  # it may just have ended
            found[os.getpriority(os.PRIO_PROCESS, int(task))] += 1
    return found


def test_what_the_training_waits_for_has_its_priority(root: Path, tmp_path: Path) -> None:
    """Answers, memory, digests; what goes to storage gives way, also where the kernel weighs sessions
    against each other, and a process within its own only: while no snapshot is being made.

    Not at a restart, which waits for whatever there is.
    """
    order = w.Persist(JOB, "0001-000001", 0, os.getpid(), f"file://{tmp_path}", "r0", 60.0)
    with agent(root) as client, ThreadPoolExecutor(1) as pool:
        pid, mine = pid_of(root), os.getpriority(os.PRIO_PROCESS, 0)
        weight = Path(f"/proc/{pid}/autogroup")

        def await_weight(nice: int, ask: w.Message) -> None:
            until = time.monotonic() + 120  # Linux takes ten changes a second
            while weight.exists() and not weight.read_text().endswith(f"nice {nice}\n"):
                client.ask(ask)
                assert time.monotonic() < until

        hello(client, bytes_per_s=1)
        put(client, "0001-000001", LARGE)
        assert priorities(pid)[mine] >= 2  # one answers, one has made memory and digested it
        await_weight(0, w.Status())
        writing = pool.submit(client.ask, order)
        while client._moved(order) == 0:
            time.sleep(0.02)
        assert priorities(pid)[19] >= 1
        await_weight(19, w.Status())
        lease = client.ask(w.Take(JOB, os.getpid(), "share", 0, "0001-000002", 8, 1000), w.Lease)
        await_weight(0, w.Status())
        client.ask(w.Drop(JOB, "0001-000002"))
        assert lease.name
        await_weight(19, w.Status())
        await_weight(0, w.Ask(JOB))
        client.abort_waits()
        with pytest.raises(AgentUnreachable):
            writing.result()


def test_what_it_holds_outlives_it(root: Path) -> None:
    """SIGKILL; the next agent has the same image, and knows it as committed."""
    with agent(root) as client:
        hello(client)
        lease = put(client, "0001-000001", DATA, step=7)
        before = image(client, lease)
        kill(root)
        with pytest.raises(AgentUnreachable):
            client.ask(w.Status())
        client.start("127.0.0.1")
        held = client.ask(w.Ask(JOB), w.Held)
        assert [(i.attempt, i.rank) for i in held.images] == [("0001-000001", 0)]
        assert held.manifests == (b"manifest 0001-000001",)
        assert image(client, lease) == before and before.startswith(DATA)
        report = client.ask(w.Status(), w.AgentReport)
        assert [j.steps for j in report.jobs] == [(7,)]


def test_what_it_holds_is_given_where_memory_is_full(tmp_path: Path) -> None:
    """Others may have filled /dev/shm when an agent that was killed is started again."""
    with mounted(tmp_path / "shm", "size=16m"), agent(tmp_path / "shm/node") as client:
        hello(client)
        lease = put(client, "0001-000001", DATA, step=7)
        kill(client.root)
        with (
            suppress(OSError),
            open(tmp_path / "shm/others", "wb", buffering=0) as file,
        ):
            while file.write(bytes(4096)):
                pass
        client.start("127.0.0.1")
        assert [i.attempt for i in client.ask(w.Ask(JOB), w.Held).images] == ["0001-000001"]
        assert image(client, lease).startswith(DATA)
        assert pid_of(client.root)


def test_the_newest_is_known_after_the_clock_was_set_back(root: Path) -> None:
    with agent(root) as client:
        hello(client)
        put(client, "0001-000001", DATA, step=7)
        (first,) = (root / "jobs" / JOB).glob("manifest-*")
        os.utime(first, (time.time() + 3600,) * 2)  # so it looks when the clock is set back an hour
        newest = put(client, "0001-000002", DATA, step=8)
        kill(root)
        client.start("127.0.0.1")
        hello(client)
        held = client.ask(w.Ask(JOB), w.Held)
        assert held.manifests == (b"manifest 0001-000001", b"manifest 0001-000002")
        take = w.Take(JOB, os.getpid(), "share", 0, "0001-000003", 9, len(DATA) + 200)
        assert client.ask(take, w.Lease).name != newest.name


def test_what_was_being_filled_is_not_there_after_it(root: Path) -> None:
    with agent(root) as client:
        hello(client)
        put(client, "0001-000001", DATA)
        lease = client.ask(
            w.Take(JOB, os.getpid(), "share", 0, "0001-000002", 2, 3_000_200), w.Lease
        )
        kill(root)
        client.start("127.0.0.1")
        held = client.ask(w.Ask(JOB), w.Held)
        assert [i.attempt for i in held.images] == ["0001-000001"]
        with pytest.raises(SegmentLost):
            client.ask(w.Ready(JOB, lease.name, "0001-000002", 3_000_000, 3_000_200))


def test_two_slots_are_enough(root: Path) -> None:
    """Snapshot after snapshot: no more than two files, and the newest is never given out."""
    with agent(root) as client:
        hello(client)
        names = [put(client, f"0001-{n:06d}", DATA, step=n).name for n in range(1, 8)]
        assert len(set(names)) == 2
        assert all(a != b for a, b in zip(names, names[1:]))


def test_an_older_snapshot_serves_until_it_is_overwritten(root: Path) -> None:
    with agent(root) as client:
        hello(client)
        put(client, "0001-000001", DATA, step=1)
        put(client, "0001-000002", DATA, step=2)
        held = client.ask(w.Ask(JOB), w.Held)
        assert {i.attempt for i in held.images} == {"0001-000001", "0001-000002"}
        client.ask(w.Take(JOB, os.getpid(), "share", 0, "0001-000003", 3, 3_000_100))
        held = client.ask(w.Ask(JOB), w.Held)
        assert {i.attempt for i in held.images} == {"0001-000002"}


def test_only_this_user_can_open_the_files(root: Path) -> None:
    with agent(root) as client:
        hello(client)
        put(client, "0001-000001", DATA)
        for path in (root, *root.rglob("*")):
            mode = stat.S_IMODE(path.lstat().st_mode)
            assert not mode & 0o077, (path, oct(mode))


@pytest.fixture
def open_root() -> Iterator[Path]:
    """As `root`, in a directory that other users may enter; pytest's own they may not."""
    with tempfile.TemporaryDirectory(prefix="holdfast-test-") as place:
        os.chmod(place, 0o711)
        yield Path(place) / "node"


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
def test_another_user_is_refused_on_the_socket(open_root: Path) -> None:
    """He cannot get at it; and if he could, the kernel says who he is."""
    with agent(open_root) as client:
        hello(client)
        assert asked_by(65534, open_root) == "PermissionError\n"
        os.chmod(open_root, 0o711)
        os.chmod(open_root / "agent.sock", 0o777)  # as if it were open to all
        try:
            assert asked_by(65534, open_root) == "401 0\n"
            assert asked_by(0, open_root).startswith("200 ")
        finally:
            os.chmod(open_root, 0o700)


def asked_by(uid: int, root: Path) -> str:
    """Status and length of the agent's answer to a process of that user, or the error that it got."""
    script = (
        "import os, http.client, socket\n"
        f"os.setuid({uid})\n"
        "line = http.client.HTTPConnection('localhost')\n"
        "line.sock = socket.socket(socket.AF_UNIX)\n"
        "try:\n"
        f"    line.sock.connect({str(root / 'agent.sock')!r})\n"
        "except OSError as error:\n"
        "    raise SystemExit(print(type(error).__name__))\n"
        f"line.request('POST', '/', {msgspec.msgpack.encode(w.Ask(JOB))!r})\n"
        "answer = line.getresponse()\n"
        "print(answer.status, len(answer.read()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert not done.stderr, done
    return done.stdout


def test_strangers_from_outside_learn_nothing(root: Path) -> None:
    """Whatever they ask for, with whatever token, the answer is the same: not even who answers."""
    with agent(root) as client:
        card = hello(client).card
        put(client, "0001-000001", DATA)
        answers = set()
        for method, path in (
            ("GET", f"/v1/{JOB}"), ("GET", f"/v1/{JOB}/0001-000001/share/0"),
            ("GET", f"/v1/{JOB}/0001-000001/share/0/check"), ("GET", "/v1/unknown"), ("GET", "/"),
            ("GET", "/v1"), ("GET", "/v2/x"), ("GET", f"/v1/{JOB}/"), ("GET", f"/v1/{JOB}/a/b"),
            ("POST", "/"), ("POST", f"/v1/{JOB}"), ("DELETE", f"/v1/{JOB}"), ("OPTIONS", "*"),
            ("GET", "/../etc/passwd"), ("GET", "/%00"), ("POST", f"/v1/{JOB}/finished/1"),
        ):  # fmt: skip
            for token in (None, "", "\xff", "Bearer", "Bearer " + "0" * 64, f"Basic {card.token}"):
                line = http.client.HTTPConnection(card.address, timeout=120)
                line.request(method, path, headers={"Authorization": token} if token else {})
                answer = line.getresponse()
                assert (answer.status, answer.read()) == (401, b""), (path, token)
                answers.add(tuple((k, v) for k, v in answer.getheaders() if k != "Date"))
                line.close()
        assert len(answers) == 1
        assert not any(word in str(answers).lower() for word in ("aiohttp", "python", "holdfast"))


@pytest.mark.parametrize(
    "said", [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"x" * 9000]
)
def test_what_is_no_http_learns_nothing(root: Path, said: bytes) -> None:
    with agent(root) as client:
        host, port = hello(client).card.address.split(":")
        with socket.create_connection((host, int(port)), timeout=120) as line:
            line.sendall(said + b"\r\n\r\n")
            heard = b""
            with suppress(ConnectionResetError):
                while more := line.recv(1 << 16):
                    heard += more
        assert heard.startswith(b"HTTP/1.0 400 ")
        assert not any(word in heard.lower() for word in (b"aiohttp", b"python", b"holdfast"))


def test_a_token_opens_one_job_alone(root: Path) -> None:
    with agent(root) as client:
        mine = hello(client).card
        put(client, "0001-000001", DATA)
        pid = os.getpid()
        theirs = client.ask(w.Hello("f" * 16, "file:///y", 1, 0, pid, str(start_time(pid))), w.Card)
        assert (theirs.agent, theirs.address) == (mine.agent, mine.address)
        with pytest.raises(AgentUnreachable, match=r"refused.*401"):
            Peer(theirs).get(f"/v1/{JOB}")
        with pytest.raises(AgentUnreachable, match=r"refused.*401"):
            Peer(theirs).tell(f"/v1/{JOB}/finished/1")
        assert Peer(mine).get(f"/v1/{JOB}")


def test_tls_is_pinned_to_the_agent(root: Path) -> None:
    with agent(root, tls=True) as client:
        card = hello(client).card
        put(client, "0001-000001", DATA)
        path = f"/v1/{JOB}/0001-000001/share/0"
        into = bytearray(len(DATA))
        Peer(card).read(path, 0, memoryview(into))
        assert into == DATA
        with pytest.raises(AgentUnreachable, match="its certificate is"):
            Peer(msgspec.structs.replace(card, fingerprint="0" * 64)).get(path)
        with pytest.raises(AgentUnreachable):
            Peer(msgspec.structs.replace(card, fingerprint="")).get(path)  # not in the clear
        assert not list(root.glob("tmp*"))  # the key is in its memory alone


def test_tls_that_is_asked_for_is_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(root))
    with agent(root), pytest.raises(UsageError, match="without TLS"):
        holdfast.Checkpointer(
            root / "run",
            {"x": {"n": 1}},
            every=holdfast.Every(memory=1),
            memory=holdfast.Memory("none", tls=True),
        )


def test_who_asks_says_nothing_to_another_than_he_means(root: Path) -> None:
    """What answers at the address has TLS, but another certificate: it never sees the token."""
    (root / "other").mkdir(parents=True)
    context, fingerprint = serving(root / "other")
    heard: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        line, _ = listener.accept()
        with suppress(OSError), context.wrap_socket(line, server_side=True) as safe:
            heard.append(safe.recv(1000))

    thread = threading.Thread(target=listen)
    thread.start()
    host, port = listener.getsockname()
    with pytest.raises(AgentUnreachable, match=fingerprint):
        Peer(w.Card("a", f"{host}:{port}", "secret", "1" * 64)).get("/v1/x")
    thread.join()
    listener.close()
    assert heard in ([], [b""])


def test_another_version_is_refused(root: Path) -> None:
    with agent(root) as client:
        hello(client)
        put(client, "0001-000001", DATA)
        pid = os.getpid()
        newer = w.Hello(JOB, "file:///x", 2, 0, pid, str(start_time(pid)), version=w.VERSION + 1)
        with pytest.raises(UsageError, match=f"version {w.VERSION}, this process version 2"):
            client.ask(newer)


def test_memory_of_a_newer_version_stays_as_it_is(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agent(root) as client:
        hello(client)
        lease = put(client, "0001-000001", DATA)
    note = root / "jobs" / JOB / "job.json"
    note.write_bytes(note.read_bytes().replace(b'"version":1', b'"version":2'))
    header = root / "jobs" / JOB / f"{lease.name}.json"
    header.write_text("of a newer kind")
    monkeypatch.setattr(c, "START_S", 300.0)
    began = time.monotonic()
    with pytest.raises(AgentUnreachable, match=r"newer holdfast \(version 2"):
        client.start("127.0.0.1")
    assert time.monotonic() - began < c.START_S / 2
    assert header.read_text() == "of a newer kind"
    assert image(client, lease)[: len(DATA)] == DATA


def test_ranges_for_other_nodes(root: Path) -> None:
    with agent(root) as client:
        card = hello(client).card
        put(client, "0001-000001", DATA)
        peer = Peer(card)
        path = f"/v1/{JOB}/0001-000001/share/0"
        for start, stop in ((0, 1), (0, len(DATA)), (12_345, 2_000_001)):
            into = bytearray(stop - start)
            peer.read(path, start, memoryview(into))
            assert into == DATA[start:stop]
        with pytest.raises(NotFound):
            peer.read(path, 1 << 30, memoryview(bytearray(5)))
        with pytest.raises(NotFound):
            peer.get(f"/v1/{JOB}/0001-000009/share/0")
        assert peer.get(path + "/check") == b"sound"
        assert msgspec.msgpack.decode(peer.get(f"/v1/{JOB}"), type=w.Held).card == card


def test_threads_that_read_in_turn_share_a_connection(root: Path) -> None:
    """A restart has new threads for each round of its reads."""
    with agent(root) as client:
        card = hello(client).card
        put(client, "0001-000001", DATA)
        peer, path = Peer(card), f"/v1/{JOB}/0001-000001/share/0"

        def read(start: int) -> None:
            into = bytearray(1000)
            peer.read(path, start, memoryview(into))
            assert into == DATA[start : start + 1000]

        in_threads(read, [0, 1000], 2)
        opened = len(os.listdir("/proc/self/fd"))
        for start in range(0, 100_000, 5000):
            in_threads(read, [start, start + 1000], 2)
        assert (
            len(os.listdir("/proc/self/fd")) <= opened + 1
        )  # if one thread had read both at first


def flip(path: Path, at: int) -> None:
    """One bit."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_is_found(root: Path) -> None:
    with agent(root) as client:
        card = hello(client).card
        lease = put(client, "0001-000001", DATA)
        flip(root / "jobs" / JOB / lease.name, 1_234_567)
        assert Peer(card).get(f"/v1/{JOB}/0001-000001/share/0/check") == b"damaged"


@pytest.mark.parametrize(
    ("at", "what"),
    [
        (0, "chunk 0"),
        (WRITE_BYTES + 1_234_567, "chunk 36"),
        (len(LARGE) - 1, "chunk 75"),
        (with_table(len(LARGE)) - 1, "table of digests"),
    ],
    ids=["first byte", "middle", "last byte", "table"],
)
def test_what_changed_in_memory_is_not_stored(
    root: Path, tmp_path: Path, at: int, what: str
) -> None:
    """A durable step is written from what was digested, or not at all."""
    store = tmp_path / "store"
    order = w.Persist(
        JOB, "0001-000001", 0, os.getpid(), f"file://{store}", "steps/1/0001-000001/r0", 60.0
    )
    with agent(root) as client:
        hello(client)
        lease = put(client, "0001-000001", LARGE)
        flip(root / "jobs" / JOB / lease.name, at)
        with pytest.raises(Corrupt, match=f"rank 0's image of step 1 changed in memory.*{what}"):
            client.ask(order)
        assert not [p for p in store.rglob("*") if p.is_file()]
        flip(root / "jobs" / JOB / lease.name, at)
        client.ask(order)
        assert (store / order.key).read_bytes().startswith(LARGE)


def test_what_is_in_storage_is_not_written_again(root: Path, tmp_path: Path) -> None:
    """As when all have died and the newest snapshot, which was saved durably, is flushed."""
    order = w.Persist(JOB, "0001-000001", 0, os.getpid(), f"file://{tmp_path}", "r0", 60.0)
    with agent(root) as client:
        hello(client)
        put(client, "0001-000001", DATA)
        client.ask(order)
        written = client._moved(order)
        client.ask(order)
        assert client._moved(order) == written == with_table(len(DATA))


def test_who_waits_for_storage_waits_as_long_as_the_agent_gets_on(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = w.Persist(JOB, "0001-000001", 0, os.getpid(), f"file://{tmp_path}", "r0", 60.0)
    with agent(root) as client:
        hello(client, bytes_per_s=1)  # its second piece is never written
        put(client, "0001-000001", LARGE)
        moved = client._moved
        seen = [1, 2, 3, WRITE_BYTES, WRITE_BYTES]
        monkeypatch.setattr(client, "_moved", lambda _: seen.pop(0))
        with pytest.raises(AgentUnreachable, match=r"got no further for 0\.2 s"):
            client.ask(order, timeout_s=0.2)
        assert not seen
        while moved(order) != WRITE_BYTES:
            time.sleep(0.02)
        other = msgspec.structs.replace(order, job="0" * 16)
        assert moved(other) == moved(w.Protect(JOB, "", "", 0, (), 1, 1, 1, 1)) == 0


def test_who_waits_when_his_process_ends_is_told_so(root: Path, tmp_path: Path) -> None:
    order = w.Persist(JOB, "0001-000001", 0, os.getpid(), f"file://{tmp_path}", "r0", 60.0)
    with agent(root) as client, ThreadPoolExecutor(1) as pool:
        hello(client, bytes_per_s=1)
        put(client, "0001-000001", LARGE)
        waiting = pool.submit(client.ask, order)
        while client._moved(order) == 0:
            time.sleep(0.02)
        client.abort_waits()
        with pytest.raises(AgentUnreachable, match=r"had not answered when .* came to its end"):
            waiting.result()


def test_the_budget_is_kept_with_the_numbers(root: Path) -> None:
    with agent(root, budget=8_000_000) as client:
        hello(client)
        put(client, "0001-000001", DATA)
        put(client, "0001-000002", DATA, step=2)
        with pytest.raises(OutOfSpace, match=r"5000000 bytes .* budget is 8000000 bytes.* 3000096"):
            client.ask(w.Take(JOB, os.getpid(), "share", 1, "0001-000003", 3, 5_000_000))


def test_memory_that_is_not_there_is_refused_and_nothing_stays(root: Path) -> None:
    """/dev/shm is smaller than the budget says: an error when memory is asked for, not a SIGBUS later."""
    free = os.statvfs("/dev/shm")
    if free.f_blocks * free.f_frsize > 1 << 40:
        pytest.skip("a file system too large to fill")
    shm = Path("/dev/shm") / f"holdfast-test-{os.getpid()}"
    try:
        with agent(shm, budget=1 << 50) as client:
            hello(client)
            with pytest.raises(OutOfSpace, match="shared memory"):
                client.ask(w.Take(JOB, os.getpid(), "share", 0, "0001-000001", 1, 1 << 45))
            assert client.ask(w.Status(), w.AgentReport).used == 0
            assert not list((shm / "jobs" / JOB).glob("share*"))
    finally:
        subprocess.run(["rm", "-rf", str(shm)], check=True)


def test_a_finished_run_frees_its_memory_and_a_crash_does_not(root: Path) -> None:
    with agent(root) as client:
        hello(client)
        put(client, "0001-000001", DATA)
        client.ask(w.Bye(JOB, os.getpid(), finished=False))
        assert client.ask(w.Status(), w.AgentReport).used > 0
        hello(client, run=2)
        client.ask(w.Bye(JOB, os.getpid(), finished=True))
        assert client.ask(w.Status(), w.AgentReport).used == 0
        assert not list((root / "jobs").iterdir())


def test_a_killed_process_is_noticed(root: Path) -> None:
    """What it was filling is free again; what it had committed stays, and may be cleaned by hand."""
    script = (
        "import os\nfrom pathlib import Path\nfrom tiers.memory.agents import hello, put, noise\n"
        "from holdfast.tiers.memory.node.client import Client\n"
        f"client = Client(Path({str(root)!r}))\n"
        "hello(client)\nput(client, '0001-000001', noise(3_000_000, 1))\n"
        "print('put', flush=True)\ninput()\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with (
        agent(root) as client,
        subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, env=env) as other,
    ):
        assert other.stdout is not None and other.stdout.readline() == b"put\n"
        with pytest.raises(UsageError, match="running"):
            client.ask(w.Clean(JOB))
        other.send_signal(signal.SIGKILL)
        other.wait()
        until = time.monotonic() + 120
        while client.ask(w.Status(), w.AgentReport).jobs[0].trainers:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert len(client.ask(w.Ask(JOB), w.Held).images) == 1
        assert client.ask(w.Clean(), list[str]) == [JOB]
        assert not list((root / "jobs").iterdir())


def test_the_living_are_known_after_the_agent_died(root: Path) -> None:
    """A new agent, even one that was started to clean up, spares what a running process needs."""
    with agent(root) as client:
        hello(client)
        put(client, "0001-000001", DATA)
        kill(root)
        client.start("127.0.0.1")
        assert client.ask(w.Clean(), list[str]) == []
        assert len(client.ask(w.Ask(JOB), w.Held).images) == 1


def test_a_directory_of_somebody_else_is_refused(root: Path) -> None:
    """Whoever comes first makes it in /dev/shm: it must be this user's, and nobody else's to write to."""
    root.mkdir()
    os.chmod(root, 0o777)
    for call in (lambda: Client(root).start(), lambda: Client(root).ask(w.Status())):
        with pytest.raises(UsageError, match="not a directory of this user alone"):
            call()
    os.rmdir(root)
    elsewhere = root.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    root.symlink_to(elsewhere)
    with pytest.raises(UsageError, match="not a directory"):
        Client(root).start()


def test_a_mute_peer_holds_up_nobody_else(root: Path) -> None:
    """Two guards wait for a peer that says nothing; another rank is given memory meanwhile."""
    with agent(root) as client, socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(64)
        mute.settimeout(120)
        hello(client)
        put(client, "0001-000001", DATA, commit=False)
        card = w.Card("other", f"127.0.0.1:{mute.getsockname()[1]}", "t")
        members = tuple(w.Member(r, 3_000_096, 3_000_000, "0" * 16, card) for r in (1, 2))
        for rank in (1, 2):
            take = w.Take(JOB, os.getpid(), "guard", rank, "0001-000001", 1, 4_000_000)
            lease = client.ask(take, w.Lease)
            order = w.Protect(
                JOB, lease.name, "0001-000001", rank, members, 1, 1, 3_000_128, 3_000_256
            )
            threading.Thread(target=_unheard, args=(client, order), daemon=True).start()
        reached = [mute.accept()[0] for _ in range(2)]
        take = w.Take(JOB, os.getpid(), "share", 7, "0001-000002", 2, 1_000_000)
        assert client.ask(take, w.Lease, timeout_s=20.0).capacity == 1_000_000
        for line in reached:
            line.close()


def _unheard(client: Client, order: w.Protect) -> None:
    with suppress(HoldfastError):
        client.ask(order, str)


def test_it_leaves_when_its_directory_is_deleted(root: Path) -> None:
    client = Client(root, deadline_s=120.0)
    client.start("127.0.0.1", stay=True)
    hello(client)
    put(client, "0001-000001", DATA)
    pid = pid_of(root)
    shutil.rmtree(root)
    await_gone(pid)


def test_a_relative_directory_is_one_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent works in another directory than the training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", "node")
    assert Client().root == tmp_path / "node"


def test_it_survives_its_starter(root: Path) -> None:
    """The process that started it is killed with its whole group."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom holdfast.tiers.memory.node.client import Client\n"
        f"Client(Path({str(root)!r})).start('127.0.0.1')\nprint('up', flush=True)\ninput()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", script], stdin=-1, stdout=-1, start_new_session=True
    )
    assert starter.stdout is not None and starter.stdout.readline() == b"up\n"
    os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
    assert Client(root).look() == "there" and not is_gone(pid_of(root))
    Client(root).ask(w.Stop(free=True))
    await_gone(pid_of(root))


# -- a guard that is given up ----------------------------------------------------------------------


def test_a_guard_that_is_given_up_waits_for_no_peer(root: Path) -> None:
    """The peer takes the connection and says nothing: as a node that vanished in mid-answer."""
    with agent(root) as client, socket.create_server(("127.0.0.1", 0)) as silent:
        hello(client)
        mine = put(client, "0001-000001", DATA, commit=False)
        size = guard_bytes(copy((mine.capacity,) * 2, 2))
        take = w.Take(JOB, os.getpid(), "guard", 0, "0001-000001", 1, size)
        lease = client.ask(take, w.Lease)
        card = client.ask(w.Ask(JOB), w.Held).card
        gone = w.Card("gone", f"127.0.0.1:{silent.getsockname()[1]}", "token")
        members = tuple(
            w.Member(r, mine.capacity, len(DATA), "x", c) for r, c in enumerate((card, gone))
        )
        order = w.Protect(JOB, lease.name, "0001-000001", 0, members, 1, 1, mine.capacity, size)
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.ask, order, str)
            silent.accept()
            client.ask(w.Drop(JOB, "0001-000001"))
            with pytest.raises(SegmentLost):
                asked.result(120)
        assert time.monotonic() - began < 120


def test_a_header_that_cannot_be_written_is_told(root: Path) -> None:
    """As where shared memory is full: the request is refused, and nobody waits until a deadline."""
    with agent(root) as client:
        hello(client)
        put(client, "0001-000001", DATA)
        (root / "jobs" / JOB / ".share-00000-1.json.new").mkdir()
        with pytest.raises(OutOfSpace):
            put(client, "0001-000002", DATA)
        (root / "jobs" / JOB / ".share-00000-1.json.new").rmdir()
        put(client, "0001-000003", DATA)


def test_a_hello_that_cannot_be_noted_is_answered(root: Path) -> None:
    """The note is for the next agent: it is written when there is room for it."""
    with agent(root) as client:
        blocked = root / "jobs" / JOB / ".job.json.new"
        blocked.mkdir(parents=True)
        hello(client)
        put(client, "0001-000001", DATA, step=1)
        noted = blocked.with_name("job.json")
        assert not noted.exists()
        blocked.rmdir()
        hello(client)
        assert noted.exists()


@pytest.mark.parametrize("again", [False, True])
def test_memory_that_waits_to_be_made_for_a_freed_job_is_not_made(root: Path, again: bool) -> None:
    """Also if the job has come back, whose memory has the same names."""
    asyncio.run(free_while_memory_is_made(root, again))


async def free_while_memory_is_made(root: Path, again: bool) -> None:
    one = Agent(Segments(root), "127.0.0.1", 1 << 30, stay=False)
    gate, make, making = threading.Event(), one.segments.make, threading.Semaphore(0)
    one.segments.make = lambda *args: (making.release(), gate.wait(), make(*args))  # type: ignore[assignment, func-returns-value]
    mine = w.Hello(JOB, "file:///x", 1, 0, os.getpid(), "1")

    def take(rank: int) -> asyncio.Future[bytes]:
        message = w.Take(JOB, os.getpid(), "share", rank, "0001-000001", 0, 1_000_000)
        return asyncio.ensure_future(one.ask(message))

    await one.ask(mine)
    asked = [take(rank) for rank in range(2 * THREADS["memory"])]
    for _ in range(
        THREADS["memory"]
    ):  # all threads wait; the other half of what is asked for has none
        assert await asyncio.to_thread(making.acquire, timeout=120)
    one.tell(w.Gone(JOB, (os.getpid(),)))
    await one.ask(w.Clean(JOB))
    if again:
        await one.ask(mine)
        asked.append(take(0))
    gate.set()
    if again:
        assert msgspec.msgpack.decode(await asked[-1])["ok"]["name"] == "share-00000-0"
    await asyncio.gather(*one._tasks)
    found = [p.name for p in root.glob("jobs/*/*") if not p.suffix]
    assert found == ["share-00000-0"] * again and one.state.used == 1_000_000 * again
    for each in asked:
        each.cancel()


def test_others_are_answered_while_memory_is_freed(root: Path) -> None:
    """What is made in its place waits for it."""
    asyncio.run(ask_while_memory_is_freed(root))


async def ask_while_memory_is_freed(root: Path) -> None:
    one = Agent(Segments(root), "127.0.0.1", 1 << 20, stay=False)
    gate, rmtree = threading.Event(), shutil.rmtree
    take = w.Take(JOB, os.getpid(), "share", 0, "0001-000001", 0, 1_000_000)
    mine = w.Hello(JOB, "file:///x", 1, 0, os.getpid(), "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *a, **k: (gate.wait(), rmtree(*a, **k)))
        await one.ask(mine)
        await one.ask(take)
        await one.ask(w.Bye(JOB, os.getpid(), True))
        assert not list(root.glob("jobs/*"))
        await one.ask(mine)
        again = asyncio.ensure_future(one.ask(take))
        for _ in range(20):
            await one.ask(w.Status())
        assert not again.done() and list(root.glob("gone/*/share-*-0"))
        gate.set()
        await again
    assert not list(root.glob("gone/*")) and list(root.glob("jobs/*/share-*-0"))


def test_a_clock_that_is_set_ahead_frees_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a dead run left is kept for a day, and not until the date of tomorrow."""
    asyncio.run(set_ahead(root, monkeypatch))


async def set_ahead(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Agent(Segments(root), "127.0.0.1", 1 << 30, stay=False)
    await one.ask(w.Hello(JOB, "file:///x", 1, 0, os.getpid(), "1"))
    await one.ask(w.Take(JOB, os.getpid(), "share", 0, "0001-000001", 0, 1_000))
    one.tell(w.Gone(JOB, (os.getpid(),)))
    before = time.time()
    monkeypatch.setattr(time, "time", lambda: before + 25 * 3600)
    one.tell(w.Tick())
    assert list(one.state.jobs) == [JOB]
    monkeypatch.undo()
    (job,) = one.report().jobs
    assert abs(job.since - before) < 3600


def fail_to_commit(root: Path, client: Client) -> None:
    """Attempt 0001-000002, of step 2: its manifest cannot be written."""
    blocked = root / "jobs" / JOB / ".manifest-0000000002-0001-000002.new"
    blocked.mkdir()
    with pytest.raises(OutOfSpace):
        put(client, "0001-000002", DATA, step=2)
    blocked.rmdir()


def test_a_commit_that_cannot_be_written_is_none(root: Path) -> None:
    """Shared memory is full at that moment: the snapshot before stays the newest, and is not given out."""
    with agent(root) as client:
        hello(client)
        put(client, "0001-000001", DATA)
        fail_to_commit(root, client)
        client.ask(w.Take(JOB, os.getpid(), "share", 0, "0001-000003", 3, with_table(len(DATA))))
        held = client.ask(w.Ask(JOB), w.Held)
        assert [i.attempt for i in held.images] == ["0001-000001"]
        assert held.manifests == (b"manifest 0001-000001",)


def test_a_commit_that_could_not_be_written_is_told_again(root: Path) -> None:
    with agent(root) as client:
        hello(client)
        put(client, "0001-000001", DATA)
        fail_to_commit(root, client)
        client.ask(w.Commit(JOB, "0001-000002", 2, b"manifest 0001-000002"))
        put(client, "0001-000003", DATA, commit=False)
        held = client.ask(w.Ask(JOB), w.Held)
        assert held.manifests[-1] == b"manifest 0001-000002"
        assert {i.attempt for i in held.images} == {"0001-000002", "0001-000003"}


# -- one that runs already -------------------------------------------------------------------------


def test_one_that_is_about_to_end_has_a_successor(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers nobody any more, and the first that is started finds it there, and ends."""
    monkeypatch.setattr(c, "START_S", 120.0)
    root.mkdir(mode=0o700)
    with (root / "agent.lock").open("w") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        client = Client(root, deadline_s=120.0)
        starting = pool.submit(client.start, "127.0.0.1")
        until = time.monotonic() + 120
        log = root / "agent.log"
        while not log.exists() or "another agent is here" not in log.read_text():
            assert time.monotonic() < until
            time.sleep(0.02)
        fcntl.flock(lock, fcntl.LOCK_UN)
        starting.result(120)
    assert client.ask(w.Status(), w.AgentReport).pid == pid_of(root)
    client.ask(w.Stop())
    await_gone(pid_of(root))


def test_one_that_ends_before_a_run_has_said_hello_has_a_successor(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(root))
    ask, killed = Client.ask, list[int]()

    def too_late(client: Client, message: w.Message, *args: Any, **more: Any) -> Any:
        if isinstance(message, w.Hello) and not killed:
            killed.append(pid_of(root))
            kill(root)
        return ask(client, message, *args, **more)

    monkeypatch.setattr(Client, "ask", too_late)
    memory = holdfast.Memory("none")
    with agent(root), holdfast.Checkpointer(root / "run", {"x": {"n": 1}}, memory=memory):
        assert [pid_of(root)] != killed


def test_each_run_says_under_which_address_others_reach_it(root: Path) -> None:
    """An agent that a crashed job on this node alone left behind knows none that is of use to others; what
    one job's ranks are told does not change within a run."""
    with agent(root) as client:
        assert hello(client).card.address.startswith("127.0.0.1:")
        card = hello(client, run=2, host="localhost").card
        assert card.address.startswith("localhost:")
        assert Peer(card).get(f"/v1/{JOB}")
        assert hello(client, run=2, rank=1, host="127.0.0.2").card == card
