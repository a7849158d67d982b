"""The recorded steps, from the keys of files of records; reads no file.

log/0000000007/0000001001-0000001010/r00003.log      rank 3's records of steps 1001 to 1010, by run 7
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from holdfast.core.checkpoint.names import STEP
from holdfast.core.store import Store

_SEGMENT = re.compile(rf"log/(\d{{10}})/{STEP}-{STEP}/r(\d{{5,}})\.log")


def parse_segment(key: str) -> tuple[int, int, int, int] | None:
    """Return run, first step, last step and rank of a segment's key; None for another key."""
    match = _SEGMENT.fullmatch(key)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]), int(match[4]))


def segments(store: Store, since: int = 0) -> list[str]:
    """List the keys of all segments with records after step `since`."""
    return segments_in(store.list("log/"), since)


def segments_in(keys: Iterable[str], since: int = 0, run: int | None = None) -> list[str]:
    """Filter keys for segments with records after step `since`; with a `run`, also all segments of later
    runs, which may have gone back."""
    parsed = ((key, parse_segment(key)) for key in keys)
    return [
        key
        for key, one in parsed
        if one is not None and (one[2] > since or (run is not None and one[0] > run))
    ]


def last_recorded(keys: Iterable[str], run: int, step: int) -> int:
    """The last step recorded after `step` of `run`, from keys of segments; 0 if there is none.  A later run
    that went back counts, although its steps are lower."""
    found = filter(None, map(parse_segment, keys))
    states = ((of_run, last) for of_run, _, last, _ in found)
    return max((state for state in states if state > (run, step)), default=(0, 0))[1]


def is_recorded(store: Store, step: int) -> bool:
    """True if any run has recorded the step."""
    found = filter(None, map(parse_segment, segments(store, step - 1)))
    return any(first <= step for _, first, _, _ in found)
