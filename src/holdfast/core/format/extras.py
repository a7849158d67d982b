"""Extras: non-tensor state as JSON, without losing its types.

JSON has no tuples, bytes, arrays, integer keys, or NaN.  `encode` writes such a value as an object with
one key that begins with `$`, and `decode` restores it.  `on_other` encodes other values, such as
tensors.  A value that cannot be encoded is refused with its path.

    >>> decode(encode({"betas": (0.9, float("nan")), 3: b"x"}))
    {'betas': (0.9, nan), 3: b'x'}
"""

from __future__ import annotations

import base64
import io
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.base.errors import FormatError
from holdfast.core.format.unsaved import Unsaved, no_text

MAX_EXTRAS_DEPTH = 100
_LARGE = 1 << 63
"""Ints of at least this magnitude do not fit in 64 bits."""
FROZEN = "_frozen"
"""Last part of the name of the extra that lists a key's omitted parameters: `model._frozen`."""
ORDER = "_order"
"""Last part of the name of a data loader's second extra: its data and its samplers' seeds."""
DCP_NAMES = "dcp.names"
"""Name of the extra of a step from `dcp.save` that maps names to DCP's names."""
NUMBERS = "biufc"
"""Kinds of numpy dtypes whose arrays can be saved."""
_SCALARS = NUMBERS + "SUmM"
"""Kinds of numpy dtypes whose scalars can be saved: the dtype can be made from its name."""
MADE_OF = "._made_of"
"""End of the name of the extra that describes a tensor saved as several inner tensors."""
_MALFORMED = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, SyntaxError, RuntimeError,
)  # fmt: skip
"""Errors of Python, numpy and torch for a malformed body of a tag."""
_MAX_ALIKE = 1 << 8
"""Most keys of a dict, or members of a set, with one hash: they are compared pairwise."""
_EXACT = frozenset([str, int, float, complex, bool, bytes, type(None)])
"""Types of keys that decode to an equal key."""

_Json = Any
_OnTensor = Callable[[Any, str], _Json]


def _refuse(value: Any, path: str) -> _Json:
    raise Unsaved(
        path,
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be saved",
        "give it a state_dict()/load_state_dict(), or reduce it to numbers, strings, lists, "
        "dicts, arrays or tensors",
    )


def encode(
    value: Any,
    on_other: _OnTensor = _refuse,
    path: str = "",
    depth: int = 0,
    *,
    utf8: bool = False,
) -> _Json:
    """Return a JSON tree for `value`; `on_other(value, path)` encodes values of other types, or raises.

    `utf8`: refuse strings that UTF-8 cannot encode, as a manifest cannot hold them.
    """
    if depth > MAX_EXTRAS_DEPTH:
        raise Unsaved(f"{path[:80]}...", f"nested deeper than {MAX_EXTRAS_DEPTH}")
    if isinstance(value, str):
        return _text(value, path) if utf8 and not value.isascii() else str.__str__(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in _SCALARS and _is_numpys(value.dtype):
        data = bytes(value) if isinstance(value, np.bytes_) else value.tobytes()
        return {"$scalar": [str(value.dtype), _b64(data)]}
    if isinstance(value, int):
        return int(value) if abs(value) < _LARGE else {"$int": _digits(int(value), path)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, complex):
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": _b64(bytes(value))}
    if type(value) is io.BytesIO:
        return {"$bytesio": _content(value, path)}
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMBERS and _is_numpys(value.dtype):
        if not isinstance(value, np.ma.MaskedArray):  # its mask would be lost
            return {"$array": [str(value.dtype), list(value.shape), _b64(value.tobytes())]}
    return _encode_container(value, on_other, path, depth, utf8)


def _is_numpys(dtype: np.dtype[Any]) -> bool:
    """False for another package's dtype: numpy needs that package to make it from its name."""
    return dtype.isbuiltin != 2


def _content(file: io.BytesIO, path: str) -> _Json:
    """Encode a BytesIO: its bytes and position."""
    if file.closed:
        raise Unsaved(path, "a BytesIO that is closed cannot be saved")
    if vars(file):
        raise Unsaved(path, f"a BytesIO with attributes ({', '.join(vars(file))}) cannot be saved")
    return [_b64(file.getvalue()), file.tell()]


def _digits(value: int, path: str) -> str:
    try:
        return str(value)
    except ValueError as error:  # Python limits the digits of an int
        bits = value.bit_length()
        raise Unsaved(path, f"a number of {bits} bits cannot be saved: {error}") from None


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise no_text(error, path) from None
    return str.__str__(value)


def _are_small_ints(values: Any) -> bool:
    """True if all are plain ints of 64 bits, which encode to themselves."""
    return set(map(type, values)) == {int} and min(values) > -_LARGE and max(values) < _LARGE


def _encode_container(value: Any, on_other: _OnTensor, path: str, depth: int, utf8: bool) -> _Json:
    def items(values: Any, other: _OnTensor = on_other) -> list[_Json]:
        if depth < MAX_EXTRAS_DEPTH and _are_small_ints(values):  # the 625 of a generator
            return list(values)
        return [
            encode(v, other, f"{path}[{i}]", depth + 1, utf8=utf8) for i, v in enumerate(values)
        ]

    def member(other: Any, path: str) -> _Json:
        tree = on_other(other, path)
        if isinstance(tree, dict) and "$object" in tree:  # it decodes to an unhashable value
            why = f"a {type(other).__module__}.{type(other).__qualname__} in a set cannot be saved"
            raise Unsaved(path, why, "have it in a list or a dict")
        return tree

    def key(k: Any) -> _Json:
        return encode(k, _refuse, f"{path} key", depth + 1, utf8=utf8)

    if depth and callable(getattr(value, "load_state_dict", None)):
        return on_other(value, path)
    if isinstance(value, list):
        return items(value)
    if isinstance(value, tuple):
        return {"$tuple": items(value)}
    if isinstance(value, deque):
        return {"$deque": [value.maxlen, items(value)]}
    if isinstance(value, (set, frozenset, Mapping)) and io.BytesIO in map(type, value):
        why = "a BytesIO in a set or as a key cannot be saved: it equals itself alone"
        raise Unsaved(path, why, "save its getvalue(), which is bytes")
    if isinstance(value, (set, frozenset)):
        kind = "$frozenset" if isinstance(value, frozenset) else "$set"
        members = items(sorted(value, key=_order), member)
        _check_keys(value, members, path)
        return {kind: members}
    if isinstance(value, Mapping):
        kind = "$counter" if isinstance(value, Counter) else "$dict"
        kind = "$ordered" if type(value) is OrderedDict else kind
        plain = kind == "$dict" and all(type(k) is str and k[:1] != "$" for k in value)
        pairs = [
            (key(k), encode(v, on_other, f"{path}.{k}" if path else str(k), depth + 1, utf8=utf8))
            for k, v in value.items()
        ]
        if not plain:
            _check_keys(value, [k for k, _ in pairs], path)
        return dict(pairs) if plain else {kind: [list(pair) for pair in pairs]}
    return on_other(value, path)


def _check_keys(keys: Iterable[Any], trees: list[_Json], path: str) -> None:
    """Refuse keys, or members of a set, that would decode to equal or unhashable values, as those of a
    subclass with another `__eq__` or `__hash__` may."""
    if all(map(_is_exact, keys)):
        return
    try:
        back = {_hashable(decode(tree, lambda *_: object())) for tree in trees}
    except FormatError as error:
        raise Unsaved(f"{path} key", f"a key that could not be read: {error}") from None
    except TypeError as error:
        raise Unsaved(f"{path} key", f"a key that cannot be saved: {error}") from None
    if len(back) != len(trees):
        raise Unsaved(f"{path} key", "two keys that differ, and would be read as one")


def _is_exact(key: Any) -> bool:
    kind = type(key)
    return kind in _EXACT or (kind in (tuple, frozenset) and all(map(_is_exact, key)))


def _order(value: Any) -> str:
    """Sort key for members of a set: the same in every process."""
    if isinstance(value, frozenset):
        return repr(sorted(map(_order, value)))
    if isinstance(value, tuple):
        return f"({', '.join(map(_order, value))})"
    return repr(value)


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode(tree: _Json, on_other: Callable[[str, _Json], Any] | None = None, depth: int = 0) -> Any:
    """Undo `encode`; `on_other(tag, body)` decodes other tags.  FormatError."""
    if depth > MAX_EXTRAS_DEPTH * 3:
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


def _decode_tag(tag: str, body: _Json, on_other: Any, depth: int) -> Any:
    def items(values: Any) -> list[Any]:
        return [decode(v, on_other, depth) for v in values]

    def members(values: Iterable[Any]) -> list[Any]:
        found = [*map(_hashable, values)]
        if max(Counter(map(hash, found)).values(), default=0) > _MAX_ALIKE:
            raise FormatError(f"malformed extras: {tag}: numbers that were chosen to have one hash")
        return found

    def pairs() -> list[tuple[Any, Any]]:
        keys = members(decode(k, None, depth) for k, _ in body)
        return [(k, decode(v, on_other, depth)) for k, (_, v) in zip(keys, body)]

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
            case "$bytesio":
                return memory_file(base64.b64decode(body[0]), body[1])
            case "$scalar":
                return _scalar(np.dtype(body[0]), base64.b64decode(body[1]))
            case "$array":
                flat = np.frombuffer(base64.b64decode(body[2]), np.dtype(body[0]))
                return flat.reshape(body[1]).copy()
            case "$deque":
                return deque(items(body[1]), maxlen=body[0])
            case "$set":
                return set(members(items(body)))
            case "$frozenset":
                return frozenset(members(items(body)))
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


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    """A numpy scalar.  A bytes scalar may be empty or end with zeros, which `frombuffer` would drop."""
    if dtype.kind == "S":
        return np.bytes_(data[: dtype.itemsize])
    return np.frombuffer(data, dtype)[0]


def memory_file(data: bytes, position: int) -> io.BytesIO:
    """Return a BytesIO at a position, which may lie after its end."""
    file = io.BytesIO(data)
    file.seek(position)
    return file


def _hashable(value: Any) -> Any:
    """A key, or a member of a set, as hashable; earlier versions wrote a frozenset there as a set."""
    if isinstance(value, set):
        return frozenset(value)
    return tuple(map(_hashable, value)) if isinstance(value, tuple) else value


def inlined(dtype: str, shape: Sequence[int], data: bytes) -> dict[str, Any]:
    """Encode a small tensor into extras; `data`: its elements in row-major order."""
    return {"$tensor": [dtype, list(shape), base64.b64encode(data).decode()]}


def referred(tree: Any) -> Iterator[str]:
    """Names of tensors that encoded extras refer to."""
    if isinstance(tree, dict):
        if len(tree) == 1 and isinstance(tree.get("$at"), str):
            yield tree["$at"]
        for value in tree.values():
            yield from referred(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from referred(value)
