"""Element types: their names, and how each is stored.

Names are torch's without the `torch.` prefix.  A safetensors header knows fewer types than torch:
the others are stored as a type that it knows (`stored`, with `extra` trailing elements per element),
so that any safetensors reader opens any data file.  The manifest holds the true name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from holdfast.base.errors import UsageError


@dataclass(frozen=True, slots=True)
class DType:
    """`bytes`: of an element; `stored`: name in safetensors; `numpy`: name for `numpy_dtype`."""

    name: str
    bytes: int
    stored: str
    extra: int = 1
    numpy: str | None = None


_ALL = (
    DType("bool", 1, "BOOL", numpy="bool"),
    DType("uint8", 1, "U8"),
    DType("int8", 1, "I8"),
    DType("uint16", 2, "U16"),
    DType("int16", 2, "I16"),
    DType("uint32", 4, "U32"),
    DType("int32", 4, "I32"),
    DType("uint64", 8, "U64"),
    DType("int64", 8, "I64"),
    DType("float16", 2, "F16"),
    DType("bfloat16", 2, "BF16"),
    DType("float32", 4, "F32"),
    DType("float64", 8, "F64"),
    DType("complex32", 4, "F16", extra=2, numpy="V4"),
    DType("complex64", 8, "F32", extra=2),
    DType("complex128", 16, "F64", extra=2),
    DType("float8_e4m3fn", 1, "F8_E4M3"),
    DType("float8_e5m2", 1, "F8_E5M2"),
    DType("float8_e4m3fnuz", 1, "U8"),
    DType("float8_e5m2fnuz", 1, "U8"),
    DType("float8_e8m0fnu", 1, "U8"),
    DType("float4_e2m1fn_x2", 1, "U8", numpy="u1"),
)
DTYPES = {d.name: d for d in _ALL}
_ML = ("bfloat16", "float8")


def dtype_of(name: str) -> DType:
    """Return a type by its name.  UsageError for a type that cannot be stored."""
    found = DTYPES.get(name)
    if found is None:
        raise UsageError(
            f"dtype {name} cannot be stored", hint=f"storable: {', '.join(sorted(DTYPES))}"
        )
    return found


@cache
def numpy_dtype(name: str) -> Any:
    """The numpy dtype of elements in memory; from ml_dtypes for bfloat16 and float8."""
    import numpy as np

    known = dtype_of(name)
    if name.startswith(_ML):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(known.numpy or name)
