"""Strangers at an agent's port: they are soon gone, keep nobody out and no file from its own node."""

from __future__ import annotations

import asyncio
import http.client
import os
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from holdfast.core.group import meet
from holdfast.errors import StoreError
from holdfast.store import LocalStore
from holdfast.tiers.memory.node import visitors as v
from holdfast.tiers.memory.node.client import Client
from holdfast.tiers.memory.node.fetch import Peer
from holdfast.tiers.memory.node.visitors import Visitors, most_strangers
from holdfast.tiers.memory.starting import JOB_KEY, job_of
from tiers.memory.agents import JOB, agent, hello, noise, put

MOST = 8
LONG_S = 120.0
WITH_TOKEN = b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: yes\r\n\r\n"


class Caller:
    """A connection to a server of this test."""

    def __init__(self, port: int, source: str) -> None:
        self.line = socket.create_connection(("127.0.0.1", port), LONG_S, (source, 0))
        self.line.setblocking(False)

    async def ask(self) -> bytes:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.line, WITH_TOKEN)
        return await asyncio.wait_for(loop.sock_recv(self.line, 1000), LONG_S)

    async def is_shut(self) -> bool:
        """Wait until the server closes it, without an answer."""
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(loop.sock_recv(self.line, 1000), LONG_S) == b""
        except ConnectionError:
            return True


def serving(
    work: Callable[[Callable[[str], Caller], Visitors], Awaitable[None]], most: int = MOST
) -> None:
    """Do `work` beside a server that knows every request as one with a token; it is given a function to
    call the server, from an address."""

    async def served() -> None:
        visitors = Visitors(most)

        async def answer(request: web.Request) -> web.Response:
            visitors.is_known(request.transport)
            return web.Response(body=b"served")

        app = web.Application()
        app.router.add_get("/", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        port = visitors.let_in(runner.server, None)
        callers: list[Caller] = []

        def call(source: str = "127.0.0.1") -> Caller:
            callers.append(Caller(port, source))
            return callers[-1]

        try:
            await work(call, visitors)
        finally:
            for one in callers:
                one.line.close()
            visitors.close()
            await runner.cleanup()

    asyncio.run(served())


def test_strangers_of_one_address_drive_out_their_own_alone() -> None:
    async def work(call: Callable[[str], Caller], visitors: Visitors) -> None:
        known, other = call("127.0.0.1"), call("127.0.0.2")
        assert b"served" in await known.ask()
        silent = [call("127.0.0.1") for _ in range(MOST)]
        for one in silent[: MOST // 2]:
            assert await one.is_shut()
        for one in (known, other, silent[-1], call("127.0.0.1"), call("127.0.0.3")):
            assert b"served" in await one.ask()

    serving(work)


def test_strangers_of_many_addresses_leave_room_for_the_next() -> None:
    async def work(call: Callable[[str], Caller], visitors: Visitors) -> None:
        known = call("127.0.0.1")
        assert b"served" in await known.ask()
        silent = [call(f"127.0.0.{2 + n}") for n in range(3 * MOST)]
        for one in silent[: 2 * MOST]:
            assert await one.is_shut()
        assert len(visitors._strangers) <= MOST
        for one in (known, call("127.0.0.1"), silent[-1]):
            assert b"served" in await one.ask()

    serving(work)


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\nX-A: "], ids=["nothing", "half a request"]
)
def test_who_does_not_ask_in_time_is_gone(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(call: Callable[[str], Caller], visitors: Visitors) -> None:
        known = call("127.0.0.1")
        assert b"served" in await known.ask()
        monkeypatch.setattr(v, "FIRST_S", 0.05)
        stranger = call("127.0.0.1")
        stranger.line.sendall(said)
        assert await stranger.is_shut()
        assert b"served" in await known.ask(), "one that has asked before may rest"
        while visitors._strangers:
            await asyncio.sleep(0)

    serving(work)


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Sets the soft limit of open files, of this process and those that it starts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_agent_opens_as_many_files_as_it_may(limit: Callable[[int], None]) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit(512)
    most = most_strangers()
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert soft == (v.MOST_FILES if hard < 0 else min(hard, v.MOST_FILES))
    assert most == min(v.MOST_STRANGERS, soft // 4)


@pytest.mark.slow
def test_an_agent_has_room_for_its_own_node_whatever_strangers_do(
    tmp_path: Path, limit: Callable[[int], None]
) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < 4096:
        pytest.skip("this user may not open so many files")
    limit(1024)
    with agent(tmp_path / "node") as client:
        card = hello(client).card
        limit(4096)
        host, port = card.address.split(":")
        silent = [socket.create_connection((host, int(port)), LONG_S) for _ in range(1100)]
        try:
            near = Client(client.root, deadline_s=LONG_S)
            assert near.look() == "there"
            put(near, "0001-000001", noise(1 << 16, 1))
            assert Peer(card).get(f"/v1/{JOB}")
            held = os.listdir(f"/proc/{client.pid}/fd")
            assert len(held) < v.MOST_STRANGERS
        finally:
            for one in silent:
                one.close()


@pytest.mark.slow
def test_a_connection_without_the_token_is_closed_with_its_answer(tmp_path: Path) -> None:
    with agent(tmp_path / "node") as client:
        line = http.client.HTTPConnection(hello(client).card.address, timeout=LONG_S)
        line.request("GET", f"/v1/{JOB}", headers={"Authorization": "Bearer no"})
        answer = line.getresponse()
        assert answer.status == 401 and answer.getheader("Connection") == "close"


# -- the name of the job ------------------------------------------------------------------------------


def test_no_other_user_reads_the_name_of_a_job(tmp_path: Path) -> None:
    store, path = LocalStore(tmp_path), tmp_path / JOB_KEY
    job = job_of(store, meet())
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)  # as before
    assert job_of(store, meet()) == job
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_job_of_another_user_is_none_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = LocalStore(tmp_path), LocalStore.get_small
    before = job_of(store, meet())
    theirs = (tmp_path / JOB_KEY).read_bytes()

    def get(self: Any, key: str) -> bytes:
        if (tmp_path / JOB_KEY).read_bytes() == theirs:
            raise StoreError("cannot get it", key=key) from PermissionError(13, "no")
        return read(self, key)

    monkeypatch.setattr(LocalStore, "get_small", get)
    assert job_of(store, meet()) != before
