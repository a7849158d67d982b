"""Answers of other nodes' agents that are not whole, and nodes that fall silent."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast.errors import AgentUnreachable, Corrupt
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.fetch import Peer


def answered(announced: int, sent: bytes, asked: int) -> None:
    """Ask for some bytes; the answer announces others, sends those and closes the connection."""

    def answer() -> None:
        line, _ = listener.accept()
        with line:
            line.recv(1 << 16)
            head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {announced}\r\n\r\n"
            line.sendall(head.encode() + sent)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        host, port = listener.getsockname()
        try:
            Peer(w.Card("a", f"{host}:{port}", "t")).read("/v1/x", 0, memoryview(bytearray(asked)))
        finally:
            thread.join()


def test_an_answer_that_breaks_off_is_no_damage() -> None:
    """The agent died in mid-answer: its successor, which is asked for then, may have all of it."""
    with pytest.raises(AgentUnreachable, match="IncompleteRead"):
        answered(announced=100, sent=b"x" * 60, asked=100)


def test_an_image_that_is_too_short_is_damaged() -> None:
    with pytest.raises(Corrupt, match="ends early"):
        answered(announced=60, sent=b"x" * 60, asked=100)


IMPATIENT = """
import asyncio, sys
from pathlib import Path
from holdfast.tiers.memory.node import agent
agent.IDLE_S = 0.3
asyncio.run(agent.serve(Path(sys.argv[1]), "127.0.0.1", 1 << 20, stay=True, tls=False))
"""


def test_connections_of_a_node_that_vanished_are_closed(tmp_path: Path) -> None:
    """It says no goodbye, so they look like those of a node that has nothing to ask; one for each of its
    processes would stay open otherwise, at each loss."""
    with subprocess.Popen([sys.executable, "-c", IMPATIENT, tmp_path / "node"]) as process:
        try:
            card, until = tmp_path / "node" / "agent.json", time.monotonic() + 120
            while not card.exists():
                assert time.monotonic() < until
                time.sleep(0.02)
            host, port = json.loads(card.read_bytes())["address"].split(":")
            before = len(os.listdir(f"/proc/{process.pid}/fd"))
            lines = [socket.create_connection((host, int(port)), timeout=120) for _ in range(5)]
            for line in lines:
                line.sendall(b"GET /v1/x HTTP/1.1\r\nHost: x\r\n\r\n")
                assert line.recv(1 << 16).startswith(b"HTTP/1.1 401")
            for line in lines:
                while line.recv(1 << 16):
                    pass
            assert len(os.listdir(f"/proc/{process.pid}/fd")) <= before
            for line in lines:
                line.close()
        finally:
            process.terminate()
