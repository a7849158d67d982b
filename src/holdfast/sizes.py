"""Sizes as people write them."""

from __future__ import annotations

import re

from holdfast.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}  # fmt: skip


def parse_size(option: str, text: str) -> int:
    """`2GiB`, `500 MB`, `1000000` in bytes; UsageError that names the option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"{option} {text!r}: not a size", hint="such as 2GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])


def size_text(num_bytes: float) -> str:
    """`1.49 GB`: decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5 or unit == "TB":
            break
        num_bytes /= 1000
    if unit == "B":
        return f"{num_bytes:.0f} B"
    return f"{num_bytes:.{2 if num_bytes < 9.995 else 1 if num_bytes < 99.95 else 0}f} {unit}"
