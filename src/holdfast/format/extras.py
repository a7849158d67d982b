"""Extras: non-tensor state as JSON, without losing its types.

JSON has no tuples, bytes, arrays, integer keys, or NaN.  `encode` writes such a value as an object with
one key that begins with `$`, and `decode` gives back what was put in.  A tensor inside is given to
`on_tensor`, which says how it is written.  What cannot be written so is refused with its path.

    >>> decode(encode({"betas": (0.9, float("nan")), 3: b"x"}))
    {'betas': (0.9, nan), 3: b'x'}
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from holdfast.errors import FormatError, UsageError

MAX_DEPTH = 100
_MALFORMED = (TypeError, ValueError, LookupError, AttributeError, OverflowError, SyntaxError)
"""What Python and numpy say of a tag's body that is not what `encode` writes."""

Json = Any
OnTensor = Callable[[Any, str], Json]
OnArray = Callable[[np.ndarray[Any, Any]], Any]


def _refuse(value: Any, path: str) -> Json:
    raise UsageError(
        f"{path or 'value'}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved",
        hint="give it a state_dict()/load_state_dict(), or reduce it to numbers, strings, lists, "
        "dicts, arrays or tensors",
    )


def encode(value: Any, on_other: OnTensor = _refuse, path: str = "", depth: int = 0) -> Json:
    """A JSON tree for `value`; `on_other(value, path)` is asked for what is none of the known types."""
    if depth > MAX_DEPTH:
        raise UsageError(f"{path[:80]}...: nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, (bool, str)):
        return value if type(value) in (bool, str, type(None)) else _plain(value)
    if isinstance(value, np.generic):
        return {"$scalar": [str(value.dtype), _b64(value.tobytes())]}
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 63 else {"$int": str(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, complex):
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": _b64(bytes(value))}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {"$array": [str(value.dtype), list(value.shape), _b64(value.tobytes())]}
    return _encode_container(value, on_other, path, depth)


def _plain(value: Any) -> Json:
    return str.__str__(value) if isinstance(value, str) else bool(value)


def _encode_container(value: Any, on_other: OnTensor, path: str, depth: int) -> Json:
    def items(values: Any) -> list[Json]:
        return [encode(v, on_other, f"{path}[{i}]", depth + 1) for i, v in enumerate(values)]

    if isinstance(value, list):
        return items(value)
    if isinstance(value, tuple):
        return {"$tuple": items(value)}
    if isinstance(value, deque):
        return {"$deque": [value.maxlen, items(value)]}
    if isinstance(value, (set, frozenset)):
        return {"$set": items(sorted(value, key=repr))}
    if isinstance(value, Mapping):
        kind = "$counter" if isinstance(value, Counter) else "$dict"
        kind = "$ordered" if type(value) is OrderedDict else kind
        plain = kind == "$dict" and all(type(k) is str and k[:1] != "$" for k in value)
        pairs = [
            (k, encode(v, on_other, f"{path}.{k}" if path else str(k), depth + 1))
            for k, v in value.items()
        ]
        if plain:
            return dict(pairs)
        return {kind: [[encode(k, _refuse, f"{path} key", depth + 1), v] for k, v in pairs]}
    return on_other(value, path)


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode(tree: Json, on_other: Callable[[str, Json], Any] | None = None, depth: int = 0) -> Any:
    """What `encode` was given; `on_other(tag, body)` is asked for tags that are not its own."""
    if depth > MAX_DEPTH * 3:
        raise FormatError("extras are nested too deep")
    if isinstance(tree, list):
        return [decode(v, on_other, depth + 1) for v in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((tag, body),) = tree.items()
        if tag[:1] == "$":
            return _decode_tag(tag, body, on_other, depth + 1)
    return {k: decode(v, on_other, depth + 1) for k, v in tree.items()}


def _decode_tag(tag: str, body: Json, on_other: Any, depth: int) -> Any:
    def items(values: Any) -> list[Any]:
        return [decode(v, on_other, depth) for v in values]

    def pairs() -> list[tuple[Any, Any]]:
        return [(decode(k, None, depth), decode(v, on_other, depth)) for k, v in body]

    try:
        match tag:
            case "$tuple":
                return tuple(items(body))
            case "$int":
                return int(body)
            case "$float":
                return float(body)
            case "$complex":
                return complex(float(body[0]), float(body[1]))
            case "$bytes":
                return base64.b64decode(body)
            case "$scalar":
                return np.frombuffer(base64.b64decode(body[1]), np.dtype(body[0]))[0]
            case "$array":
                flat = np.frombuffer(base64.b64decode(body[2]), np.dtype(body[0]))
                return flat.reshape(body[1]).copy()
            case "$deque":
                return deque(items(body[1]), maxlen=body[0])
            case "$set":
                return set(items(body))
            case "$dict":
                return dict(pairs())
            case "$ordered":
                return OrderedDict(pairs())
            case "$counter":
                return Counter(dict(pairs()))
        if on_other is not None:
            return on_other(tag, body)
    except _MALFORMED as error:
        raise FormatError(f"malformed extras: {tag}: {error}") from None
    raise FormatError(f"malformed extras: unknown tag {tag!r}")
