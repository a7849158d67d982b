"""Whether torch's store can serve at a socket that listens already, which may be at loopback alone."""

from __future__ import annotations

from torch.distributed import TCPStore

TAKES_LISTENER = hasattr(TCPStore, "clone")
"""False for servers of torch before 2.8: with libuv they refuse a socket, and without it a stranger who
sends half a message blocks them.  They listen at all addresses.  The refusal would be printed, too, so
it is not tried: `TCPStore.clone` came with the same version."""
