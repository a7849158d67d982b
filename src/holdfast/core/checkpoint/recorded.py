"""Which steps are recorded, by the names of the files of records alone; no file is read.

log/0000000007/0000001001-0000001010/r00003.log      rank 3's records of steps 1001 to 1010, by run 7
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from holdfast.core.checkpoint.names import STEP
from holdfast.core.store import Store

_SEGMENT = re.compile(rf"log/(\d{{10}})/{STEP}-{STEP}/r(\d{{5,}})\.log")


def parse_segment(key: str) -> tuple[int, int, int, int] | None:
    """Return run, first step, last step and rank of a file of records; None if a key is of none."""
    match = _SEGMENT.fullmatch(key)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]), int(match[4]))


def segments(store: Store, since: int = 0) -> list[str]:
    """Keys of all segments that have records after step `since`."""
    return segments_in(store.list("log/"), since)


def segments_in(keys: Iterable[str], since: int = 0, run: int | None = None) -> list[str]:
    """Return those of some keys that are of segments with records after step `since`; and, with a `run`,
    all of later runs, which may have gone back."""
    parsed = ((key, parse_segment(key)) for key in keys)
    return [
        key
        for key, one in parsed
        if one is not None and (one[2] > since or (run is not None and one[0] > run))
    ]


def last_recorded(keys: Iterable[str], run: int, step: int) -> int:
    """The last step that is recorded after `step` of `run`, by the names of segments among some keys; 0 if
    there is none.  A later run that went back has lower numbers, and counts."""
    found = filter(None, map(parse_segment, keys))
    states = ((of_run, last) for of_run, _, last, _ in found)
    return max((state for state in states if state > (run, step)), default=(0, 0))[1]


def is_recorded(store: Store, step: int) -> bool:
    """True if some run has recorded the step, by the names of segments."""
    found = filter(None, map(parse_segment, segments(store, step - 1)))
    return any(first <= step for _, first, _, _ in found)
