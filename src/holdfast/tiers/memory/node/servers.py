"""The servers of an agent: they let in processes of this node by their user, other nodes by a job's
token.

All other requests get the same answer, whatever their path: 401, from which nothing can be learned.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web, web_response

from holdfast.base.errors import UsageError
from holdfast.base.wire import decode_msgpack, encode_error
from holdfast.tiers.memory.node import messages as w

if TYPE_CHECKING:
    from holdfast.tiers.memory.node.agent import Agent

MAX_MESSAGE_BYTES = 1 << 30
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# aiohttp names its version and Python's in every answer, and answers what is no HTTP before any hook
setattr(web_response, "SERVER_SOFTWARE", "")  # noqa: B010


def local_app(agent: Agent) -> web.Application:
    """The server for processes of this node: it takes messages."""

    @web.middleware
    async def of_this_user(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _peer(request)[1] != os.getuid():
            return web.Response(status=401)
        return await handler(request)

    async def message(request: web.Request) -> web.Response:
        try:
            said = decode_msgpack(await request.read(), w.MESSAGES)
        except msgspec.DecodeError as error:
            return web.Response(body=encode_error(UsageError(f"not a message: {error}")))
        if isinstance(said, w.Hello) and _peer(request)[0] != said.pid:
            # a process of another pid namespace: its pid here is unknown
            said = msgspec.structs.replace(said, started="?")
        return web.Response(body=await agent.ask(said))

    app = web.Application(client_max_size=MAX_MESSAGE_BYTES, middlewares=[of_this_user])
    app.router.add_post("/", message)
    return app


def peer_app(agent: Agent, is_known: Callable[[Any], None]) -> web.Application:
    """The server for other nodes: it tells what a job has, gives ranges of images, checks if an image is
    sound, and hears that rank 0 has left.  `is_known` is given the transport of a request with a token."""

    @web.middleware
    async def with_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not _knows(agent, request):
            refused = web.Response(status=401)
            refused.force_close()
            return refused
        is_known(request.transport)
        return await handler(request)

    async def about(request: web.Request) -> web.Response:
        return web.Response(body=w.encode(agent.held(request.match_info["job"])))

    async def finished(request: web.Request) -> web.Response:
        asked = request.match_info
        agent.tell(w.Finished(asked["job"], int(asked["run"])))
        return web.Response()

    async def image(request: web.Request) -> web.StreamResponse:
        found = _asked(agent, request)
        if found is None:
            return web.Response(status=404)
        return web.FileResponse(agent.segments.path(*found))

    async def check(request: web.Request) -> web.Response:
        found = _asked(agent, request)
        if found is None:
            return web.Response(status=404)
        sound = await agent.is_sound(*found)
        return web.Response(body=b"sound" if sound else b"damaged")

    app = web.Application(middlewares=[with_token])
    app.router.add_get("/v1/{job}", about)
    app.router.add_post(r"/v1/{job}/finished/{run:\d{1,18}}", finished)
    app.router.add_get("/v1/{job}/{attempt}/{kind}/{rank}", image)
    app.router.add_get("/v1/{job}/{attempt}/{kind}/{rank}/check", check)
    return app


def _knows(agent: Agent, request: web.Request) -> bool:
    """True if a request has the token of the job that it asks about; False if it asks about
    none."""
    job = request.match_info.get("job")
    if job is None:
        return False
    given = request.headers.get("Authorization", "")
    token = agent.card_of(job).token
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {token}".encode())


def _asked(agent: Agent, request: web.Request) -> tuple[str, str] | None:
    """Return the job and slot name of the image that a request asks for; None if it is not here."""
    asked = request.match_info
    wanted = (asked["kind"], asked["attempt"], asked["rank"], "ready")
    job = agent.state.jobs.get(asked["job"])
    for slot in job.slots.values() if job is not None else ():
        if (slot.kind, slot.attempt, str(slot.rank), slot.phase) == wanted:
            return asked["job"], slot.name
    return None


def _peer(request: web.Request) -> tuple[int, int]:
    """Return (process, user) at the other end of a Unix socket, by this node's numbers; -1 if unknown."""
    transport = request.transport
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.family != socket.AF_UNIX:
        return -1, -1
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid), int(uid)
