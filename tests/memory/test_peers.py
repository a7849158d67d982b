"""Answers of other nodes' agents that are not whole."""

import socket
import threading

import pytest

from holdfast.errors import AgentUnreachable, Corrupt
from holdfast.memory.node import words as w
from holdfast.memory.node.fetch import Peer


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
