"""moto's server on a port of this host: moto_server.py PORT.

S3 compares and writes in one step.  moto does so in two, in a thread for each request, so that two writers
may both find their condition met: here, requests with a condition are served one after the other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")

moto = DomainDispatcherApplication(create_backend_app)
one_at_a_time = threading.Lock()


def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    conditional = any(name in environ for name in CONDITIONS)
    with one_at_a_time if conditional else nullcontext():
        return moto(environ, start_response)


run_simple("127.0.0.1", int(sys.argv[1]), serve, threaded=True, request_handler=MotoRequestHandler)
