"""The connection of a process of the training to `holdfast prove`."""

from __future__ import annotations

import os
import signal
import socket
import threading

from holdfast.prove.messages import ADDRESS, Message, Trouble, send


class Channel:
    """A connection of each process, made when there is something to tell; safe to use from any thread."""

    def __init__(self) -> None:
        self._address = os.environ[ADDRESS]
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def tell(self, message: Message) -> None:
        """Send a message; nobody waits for it, and where nobody listens any more it is dropped."""
        with self._lock:
            try:
                send(self._connected(), message)
            except OSError:
                self._socket = None

    def ask(self, message: Message) -> bytes:
        """Send a message, and block until there is an answer: for ever, where the run is to end here."""
        self.tell(message)
        answer = self._socket.recv(1) if self._socket is not None else b""
        if not answer:  # whoever ran it has gone: so does the training
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    def end_for(self, kind: str, about: str) -> None:
        """Tell that the run cannot go on."""
        self.tell(Trouble(kind, about))

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(self._address)
        return self._socket
