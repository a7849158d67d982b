"""Plain data of pickles: checks of it, and data types beyond Python's built-in ones.

`PLAIN_GLOBALS` lists these types: numpy's arrays and scalars, files in memory, namespaces, paths, versions.
`plain_value` converts the pickle interpreter's form of such an object into values that extras can hold.
Classes of users are not data and are refused by name.  `text` and `ints` check a value before it is hashed,
compared or shown: all three take exponential time for tuples of shared tuples, which a few bytes can make.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from holdfast.base.errors import FormatError
from holdfast.core.format.extras import NUMBERS, memory_file
from holdfast.formats.read.unpickle import MALFORMED, UnknownInstance, new_dict, new_set, record


def text(value: Any) -> str:
    """Return `value` if it is text, as names are.  FormatError for anything else."""
    if not isinstance(value, str):
        raise FormatError(f"malformed pickle: a {type(value).__name__} where a name should be")
    return value


def ints(values: Any) -> tuple[int, ...]:
    """Return a shape or index as a tuple.  FormatError for anything but integers."""
    found = tuple(values)
    if not all(isinstance(n, int) for n in found):
        raise FormatError("malformed pickle: a shape or a place of something else than numbers")
    return found


def _encode(text: Any, how: Any) -> bytes:
    if not isinstance(text, str) or how not in ("latin1", "latin-1"):
        raise FormatError(f"bytes in the encoding {how!r}")
    return text.encode("latin1")


def _bytes(value: Any = b"", how: Any = "latin1") -> bytes:
    """Return the bytes of a bytearray: given as bytes, or as text in an encoding."""
    return bytes(value) if isinstance(value, (bytes, bytearray)) else _encode(value, how)


def _both(name: str, value: Any) -> dict[tuple[str, str], Any]:
    """A built-in under its names in Python 2 (torch.save writes protocol 2) and 3."""
    return {("builtins", name): value, ("__builtin__", name): value}


def _path(*parts: Any) -> str:
    return "/".join(map(str, parts)).replace("//", "/")


_TEXTS = "SU"
"""Kinds of numpy's text dtypes."""
_OF_NUMPY = ("scalar", "ndarray", "frombuffer", "dtype")
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_ATTRIBUTE_DICTS = (
    "lightning.fabric.utilities.data",
    "lightning_fabric.utilities.data",
    "lightning.pytorch.utilities.parsing",
    "pytorch_lightning.utilities.parsing",
)
PLAIN_GLOBALS: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encode,
    ("argparse", "Namespace"): record("Namespace"),
    ("types", "SimpleNamespace"): record("Namespace"),
    ("collections", "defaultdict"): lambda *_: {},
    ("collections", "deque"): lambda *_: [],
    ("collections", "Counter"): new_dict,
    ("_io", "BytesIO"): record("BytesIO"),
    ("io", "BytesIO"): record("BytesIO"),
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): record("dtype"),
    ("torch.torch_version", "TorchVersion"): lambda text="": text,
    **_both("set", new_set),
    **_both("frozenset", lambda items=(): frozenset(new_set(items))),
    **_both("complex", lambda *parts: complex(*parts)),
    **_both("bytearray", _bytes),
    **_both("bytes", lambda: b""),
    **{
        (b, t): {"long": "int", "unicode": "str"}.get(t, t)  # as pickles of Python 2 name them
        for b in ("builtins", "__builtin__")
        for t in ("bool", "int", "long", "float", "str", "unicode", "list", "tuple", "dict")
    },
    **{(m, "scalar"): record("scalar") for m in _NUMPY},
    **{(m, "_reconstruct"): record("ndarray") for m in _NUMPY},
    **{
        (m, "_frombuffer"): record("frombuffer")
        for m in ("numpy.core.numeric", "numpy._core.numeric")
    },
    **{(m, "AttributeDict"): lambda *_: {} for m in _ATTRIBUTE_DICTS},
    **{
        (module, kind): _path
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


def plain_value(value: Any) -> Any:
    """Return the value of an `UnknownInstance` of `PLAIN_GLOBALS`.  FormatError for any other."""
    if isinstance(value, UnknownInstance) and value.name == "Namespace":
        return dict(value.fields)
    if isinstance(value, UnknownInstance) and value.name == "BytesIO":
        return _file(value)
    if isinstance(value, UnknownInstance) and value.name in _OF_NUMPY:
        try:
            return _numpy(value)
        except MALFORMED as error:
            raise FormatError(f"malformed {value.name} of numpy: {error}") from None
    kind = value.name if isinstance(value, UnknownInstance) else type(value).__name__
    raise FormatError(f"a {kind}, which is not known to be data")


def _file(value: UnknownInstance) -> io.BytesIO:
    match value.get("state"):
        case [bytes(data), int(position), attributes] if not attributes and 0 <= position < 1 << 63:
            return memory_file(data, position)
    raise FormatError("a BytesIO that is malformed, or has attributes")


def _numpy(value: UnknownInstance) -> Any:
    if value.name == "dtype":
        return str(_dtype(value))
    if value.name == "scalar":
        dtype, data = value.args
        return np.frombuffer(data, _dtype(dtype, NUMBERS + _TEXTS), 1)[0]
    if value.name == "frombuffer":
        data, dtype, shape, order, *axes = value.args  # as numpy's own `_frombuffer` takes them
        if not isinstance(data, (bytes, bytearray)):
            raise FormatError(f"an array of a {type(data).__name__}")
        flat = np.frombuffer(data, _dtype(dtype))
        if order == "K" and axes and axes[0] is not None:
            return flat.reshape(tuple(shape)).transpose(axes[0]).copy()
        return flat.reshape(tuple(shape), order="F" if order == "F" else "C").copy()
    _, shape, dtype, in_columns, data = value["state"]
    array = np.frombuffer(data, _dtype(dtype))
    return array.reshape(tuple(shape), order="F" if in_columns else "C").copy()


def _dtype(value: Any, kinds: str = NUMBERS) -> np.dtype[Any]:
    """Return a dtype of one of `kinds`.  FormatError for any other dtype."""
    order = value["state"][1]
    found = np.dtype(text(value.args[0]))
    if found.kind not in kinds or order not in "<>|=":
        raise FormatError(f"an array of numpy's type {value.args[0]!r}")
    return found.newbyteorder(order) if order in "<>" else found
