"""Starts a script on one rank or more, each forked from a process that has imported torch (`forked.py`).

    python -I -S launcher.py SOCKET RANKS SCRIPT ...

As under torchrun, its exit status is that of the ranks, and where one fails the others are killed.
"""

import json
import os
import socket
import sys

if __name__ == "__main__":
    address, ranks, *words = sys.argv[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect(address)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
        request = {"ranks": int(ranks), "words": words, "env": dict(os.environ), "cwd": os.getcwd()}
        socket.send_fds(channel, [json.dumps(request).encode()], [1])
        code = json.loads(channel.recv(1 << 10))
    sys.exit(code if code >= 0 else 128 - code)
