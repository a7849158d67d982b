"""Requests to an agent that wait for their answers.

A request is answered at once, or when a thread is done with the work.  Until then slots and effects
name it by its number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from holdfast.tiers.memory.node import messages as w


class Requests:
    """The requests that wait, by number.  To be used on the event loop only."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0
        """Number of the newest request; 0 is the number of what nobody waits for."""

    async def answered(self, begin: Callable[[int], None]) -> bytes:
        """Begin a request, by its new number; return the answer, encoded."""
        self._number += 1
        number = self._number
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            begin(number)
            return await answer
        finally:
            self._waiting.pop(number, None)

    def reply(self, number: int, value: Any) -> None:
        """Answer a request, if somebody still waits for it."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(w.encode(value))
