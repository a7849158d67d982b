"""The messages about uploads to the user.

All ranks learn the outcome of each round, so rank 0 tells the user for all.  An outage has two
messages, however many rounds fail, whatever their steps:

    round      uploaded   again                      again   again   uploaded
    message               step 20 was not uploaded                   uploads go on, after 35 s

One more message tells of the first step that is left out, and one at the end of the run of what is
not behind the root.
"""

from __future__ import annotations

import time

from holdfast.base.wire import WireError
from holdfast.core.store import Store


class UploadNews:
    """Collects the messages for the user, and knows whether there is an outage."""

    def __init__(self, root: Store, store: Store, rank: int) -> None:
        """`store`: the home behind the root.  `rank`: this process's rank."""
        self.messages: list[str] = []
        """Messages for the user."""
        self.failure: WireError | None = None
        """The last failure; None again when an outage has ended."""
        self._root = root
        self._store = store
        self._rank = rank
        self._failed_since: float | None = None
        """Time of the first failure of an outage."""
        self._num_left_out = 0

    @property
    def is_outage(self) -> bool:
        """True from the first failure of an outage to its end."""
        return self._failed_since is not None

    def failed(self, step: int, verdict: str, error: WireError) -> str | None:
        """Note that a round has failed.  Returns the message for the user, on rank 0; in an outage
        only the first time."""
        self.failure = error
        is_known = self._failed_since is not None and verdict == "again"
        if verdict == "again":
            self._failed_since = self._failed_since or time.monotonic()
        return self._trouble(step, verdict, error) if self._rank == 0 and not is_known else None

    def _trouble(self, step: int, verdict: str, error: WireError) -> str:
        what = f"step {step} was not uploaded to {self._store.url}"
        then = {
            "again": "it is tried again, or a newer one",
            "given up": "newer steps will be",
            "ended": "this run uploads no more",
        }[verdict]
        return f"{what}; training and saves go on, and {then}: {error.text}"

    def recovered(self, step: int | None) -> None:
        """Note that the store has answered, so an outage is over.  `step`: the step that was
        uploaded; None if there was none."""
        if self._failed_since is not None:
            away_s = time.monotonic() - self._failed_since
            self._failed_since = self.failure = None
            if self._rank == 0:
                what = "" if step is None else f": step {step} lies there"
                self.messages.append(
                    f"uploads to {self._store.url} go on, after {away_s:.0f} s{what}"
                )

    def left_out(self, step: int) -> None:
        """Note that a step is not uploaded because a newer one has come.  One message for all."""
        self._num_left_out += 1
        if self._num_left_out == 1 and self._rank == 0:
            self.messages.append(
                f"step {step} was not uploaded to {self._store.url}, and lies in the root alone: the "
                "step before was still on its way when a newer one came (this is told once)"
            )

    def left(self, step: int | None, lost: str, *, notes_lag: bool) -> list[str]:
        """Say what is not uploaded, on rank 0: the newest step that waits, or else labels and metrics.
        `lost`: why ranks can agree on nothing any more."""
        if self._rank != 0:
            return []
        if step is not None:
            return [self._not_uploaded(step, lost)]
        return [self._lagging()] if notes_lag else []

    def _not_uploaded(self, step: int, lost: str) -> str:
        why = lost or ("" if self.failure is None else self.failure.text)
        why = f": {why}" if why else ", which took too long"
        return (
            f"step {step} is not uploaded to {self._store.url}{why}; it lies in {self._root.url}, "
            "and the next run with this upload= begins with it"
        )

    def _lagging(self) -> str:
        return (
            f"labels and metrics that changed last are not in {self._store.url}; they are in "
            f"{self._root.url}, and the next upload brings them"
        )
