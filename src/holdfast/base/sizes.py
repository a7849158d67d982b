"""Sizes as people write them."""

from __future__ import annotations

import re
from typing import Any

from holdfast.base.arguments import number_of
from holdfast.base.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}  # fmt: skip
MAX_SIZE_BYTES = 1 << 60
"""Largest size that users may give: an exbibyte."""


def parse_size(option: str, text: str) -> int:
    """Parse `2GiB`, `500 MB` or `1000000`; return bytes.  UsageError that names the option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"{option} {text!r}: not a size", hint="write a size as 2GiB or 500MB")
    size = float(match[1]) * _UNITS[match[2]]
    if size > MAX_SIZE_BYTES:
        raise UsageError(f"{option} {text[:40]!r}: larger than any memory or storage")
    return int(size)


def size_of(value: Any, call: str, name: str, *, or_zero: bool = False) -> int:
    """Check a size, given as a number of any library or as a text such as `"64GiB"`; return bytes."""
    if isinstance(value, str):
        size = parse_size(f"{call}({name}=...)", value)
    else:
        expected = 'a number of bytes, or a text such as "64GiB"'
        size = int(number_of(value, call, name, expected, lambda n: 0 <= n <= MAX_SIZE_BYTES))
    if not size and not or_zero:
        raise UsageError(f"{call}({name}={value!r}): must be more than nothing, or None")
    return size


def size_text(num_bytes: float) -> str:
    """Format a size as `1.49 GB`: decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5 or unit == "TB":
            break
        num_bytes /= 1000
    if unit == "B":
        return f"{num_bytes:.0f} B"
    return f"{num_bytes:.{2 if num_bytes < 9.995 else 1 if num_bytes < 99.95 else 0}f} {unit}"
