"""As much of Google Cloud Storage's XML API as obstore speaks, with generation conditions: in memory.

    with GoogleStub() as stub:
        holdfast.Checkpointer(stub.url("run"), ...)

An object has a *generation*, a number that each write makes anew.  A request may carry
`x-goog-if-generation-match`: 0 asks that there be no object, another number that it be the one that was
seen; else the reply is 412.  Objects are in one flat table, and a lock makes each request one step.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from ports import free_port

BUCKET = "hold"
CONDITION = "x-goog-if-generation-match"
XML = {"Content-Type": "application/xml"}


@dataclass(frozen=True, slots=True)
class Stored:
    """One version of an object."""

    data: bytes
    generation: int
    date: str

    @property
    def headers(self) -> dict[str, str]:
        return {
            "ETag": f'"{hashlib.md5(self.data).hexdigest()}"',
            "x-goog-generation": str(self.generation),
            "Last-Modified": self.date,
            "Accept-Ranges": "bytes",
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply, to be sent as it is."""

    status: int
    headers: dict[str, str]
    body: bytes = b""


@final
class GoogleStub:
    """The server, a thread of this process; other processes reach it as well."""

    def __init__(self) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._objects: dict[str, Stored] = {}
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    def url(self, prefix: str, endpoint: str | None = None) -> str:
        """The address of a store in its bucket."""
        return f"gs://{BUCKET}/{prefix}?endpoint={endpoint or self.endpoint}&anonymous=yes"

    @property
    def env(self) -> dict[str, str]:
        return {}

    @property
    def num_uploads(self) -> int:
        """Multipart uploads that were begun and neither completed nor aborted."""
        return len(self._uploads)

    def __enter__(self) -> GoogleStub:
        stub = self

        class Bound(_Handler):
            owner = stub

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Bound)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def answer(
        self, method: str, key: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> Reply:
        """Do one request."""
        with self._lock:
            if not key:
                return self._list(query) if method == "GET" else Reply(400, {})
            if "uploads" in query or "uploadId" in query:
                return self._upload(method, key, query, headers, body)
            if method == "PUT":
                return self._put(key, body, headers)
            if key not in self._objects:
                return Reply(404, XML, b"<Error><Code>NoSuchKey</Code></Error>")
            if method == "DELETE":
                del self._objects[key]
                return Reply(204, {})
            return self._get(self._objects[key], method, headers.get("range"))

    def _put(self, key: str, body: bytes, headers: dict[str, str]) -> Reply:
        if not self._holds(key, headers):
            return Reply(412, XML, b"<Error><Code>PreconditionFailed</Code></Error>")
        self._objects[key] = Stored(body, next(self._numbers), formatdate(usegmt=True))
        return Reply(200, self._objects[key].headers)

    def _holds(self, key: str, headers: dict[str, str]) -> bool:
        """Whether the condition of a request holds."""
        if CONDITION not in headers:
            return True
        there = self._objects.get(key)
        return int(headers[CONDITION]) == (there.generation if there else 0)

    @staticmethod
    def _get(stored: Stored, method: str, range_: str | None) -> Reply:
        data = stored.data
        if range_ is None or method == "HEAD":
            return Reply(200, stored.headers, data)
        first, _, last = range_.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last or len(data)) + 1, len(data))
        if start >= len(data):
            return Reply(416, XML, b"<Error><Code>InvalidRange</Code></Error>")
        span = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        return Reply(206, stored.headers | span, data[start:stop])

    def _upload(
        self, method: str, key: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> Reply:
        if "uploads" in query:
            name = str(next(self._numbers))
            self._uploads[name] = {}
            return _xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
        parts = self._uploads.get(query["uploadId"])
        if parts is None:
            return Reply(404, XML, b"<Error><Code>NoSuchUpload</Code></Error>")
        if method == "PUT":
            parts[int(query["partNumber"])] = body
            return Reply(200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        if method == "POST":
            reply = self._put(key, b"".join(parts[n] for n in sorted(parts)), headers)
            if reply.status != 200:
                return reply
            tag = _xml("CompleteMultipartUploadResult", f"<ETag>{reply.headers['ETag']}</ETag>")
            reply = Reply(200, reply.headers | tag.headers, tag.body)
        else:
            reply = Reply(204, {})
        del self._uploads[query["uploadId"]]
        return reply

    def _list(self, query: dict[str, str]) -> Reply:
        after = max(query.get("continuation-token", ""), query.get("start-after", ""))
        prefix, most = query.get("prefix", ""), int(query.get("max-keys", 1000))
        keys = sorted(k for k in self._objects if k.startswith(prefix) and k > after)
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<Size>{len(self._objects[key].data)}</Size>"
            f"<ETag>{escape(self._objects[key].headers['ETag'])}</ETag></Contents>"
            for key in keys[:most]
        )
        if len(keys) > most:
            found += f"<NextContinuationToken>{escape(keys[most - 1])}</NextContinuationToken>"
        more = f"<IsTruncated>{str(len(keys) > most).lower()}</IsTruncated>"
        return _xml("ListBucketResult", more + found)


def _xml(name: str, content: str) -> Reply:
    return Reply(200, XML, f'<?xml version="1.0"?><{name}>{content}</{name}>'.encode())


class _Handler(BaseHTTPRequestHandler):
    owner: GoogleStub
    protocol_version = "HTTP/1.1"
    timeout = 60
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _any(self) -> None:
        where = urlsplit(self.path)
        _, _, key = where.path.lstrip("/").partition("/")
        query = {k: v[-1] for k, v in parse_qs(where.query, keep_blank_values=True).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        reply = self.owner.answer(self.command, unquote(key), query, headers, body)
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)
        self.wfile.flush()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _any  # noqa: N815
