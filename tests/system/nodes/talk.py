"""Programs that talk over TCP: `serve PORT`, `ask HOST PORT` and `send HOST PORT NUM_BYTES`.

`serve` answers whatever comes with one byte.  `ask` sends a byte ten times a second over one connection,
and prints `answer`, `silence` or `closed` each time.  `send` prints how many seconds its bytes took.
"""

import socket
import sys
import time


def serve(port: str) -> None:
    with socket.create_server(("", int(port))) as server:
        print("ready", flush=True)
        while True:
            client, _ = server.accept()
            while client.recv(1 << 16):
                client.sendall(b".")
            client.close()


def ask(host: str, port: str) -> None:
    connection = socket.create_connection((host, int(port)), timeout=120)
    connection.settimeout(0.2)
    while True:
        print(heard(connection), flush=True)
        time.sleep(0.1)


def heard(connection: socket.socket) -> str:
    try:
        connection.sendall(b"x")
        return "answer" if connection.recv(100) else "closed"
    except TimeoutError:
        return "silence"
    except OSError:
        return "closed"


def send(host: str, port: str, num_bytes: str) -> None:
    connection = socket.create_connection((host, int(port)), timeout=120)
    started = time.monotonic()
    connection.sendall(bytes(int(num_bytes)))
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(100):
        pass
    print(time.monotonic() - started)


if __name__ == "__main__":
    {"serve": serve, "ask": ask, "send": send}[sys.argv[1]](*sys.argv[2:])
