"""Reads what is no weight: `common.pt`, objects that ranks keep, and makes their values extras.

Values come from pickles that name Megatron's own classes (enums in the arguments, mostly).  They are
kept as text: nothing of Megatron is imported or called.
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import Corrupt, FormatError
from holdfast.format import extras
from holdfast.format.dtypes import DTYPES
from holdfast.interop.dcp import section_range, section_tree
from holdfast.interop.foreign import Foreign, StoredPart
from holdfast.interop.plaindata import TABLE, plain
from holdfast.interop.torchfile import TensorRef, read_file
from holdfast.interop.unpickle import UnknownInstance, record
from holdfast.layout import Box, whole
from holdfast.store import Store

COMMON = "common.pt"
INLINE_BYTES = 64 << 10


class _Known(dict[tuple[str, str], Any]):
    """Plain data, and Megatron's classes as Records."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, tuple) and _is_megatron(key[0]))

    def __missing__(self, key: tuple[str, str]) -> Any:
        if not _is_megatron(key[0]):
            raise KeyError(key)
        return record(f"{key[0]}.{key[1]}")


def _is_megatron(module: str) -> bool:
    return module.split(".", 1)[0] == "megatron"


def _member(owner: Any, name: Any) -> UnknownInstance:
    """Stand-in for `getattr`, as which Python 3.11 pickles enums: for Megatron's classes alone."""
    if not (
        isinstance(owner, UnknownInstance) and _is_megatron(owner.name) and isinstance(name, str)
    ):
        raise FormatError("a pickle that takes an attribute of something")
    return UnknownInstance(f"{owner.name}.{name}")


def known() -> dict[tuple[str, str], Any]:
    """Return the globals that Megatron's pickles may name."""
    return _Known(
        TABLE
        | {
            ("_io", "BytesIO"): record("BytesIO"),
            ("io", "BytesIO"): record("BytesIO"),
            ("signal", "Signals"): lambda number: number,
            ("builtins", "getattr"): _member,
            ("__builtin__", "getattr"): _member,
        }
    )


def read_common(store: Store, folder: str) -> dict[str, Any]:
    """`common.pt`, tensors as `TensorRef`s."""
    key = folder + COMMON
    found = read_file(store, key, known())
    if not isinstance(found, dict):
        raise FormatError("not the common state of Megatron-Core", key=key)
    return {str(k): v for k, v in found.items()}


def extra_state(store: Store, info: UnknownInstance) -> Any:
    """Return what a module keeps beside its weights: Transformer Engine's own bytes or tensor, as they are.

    An archive that names classes that are not known is kept as it is: `{"archive": bytes}`.
    """
    try:
        return section_tree(store, info, known())
    except Corrupt:
        raise
    except FormatError:
        path, start, stop = section_range(info)
        data = bytearray(stop - start)
        store.read(path, start, memoryview(data))
        return {"archive": bytes(data)}


class ExtrasValues:
    """Values on their way into extras; tensors in them are read if they are small."""

    def __init__(self, store: Store) -> None:
        self.tensors: list[Foreign] = []
        """Tensors that are too large to be read."""
        self._store = store

    def encode(self, key: str, value: Any) -> Any:
        """`value` as the extra `key`."""
        return extras.encode(value, lambda leaf, path: self._leaf(leaf, f"{key}.{path}"))

    def _leaf(self, leaf: Any, name: str) -> Any:
        if isinstance(leaf, TensorRef):
            return self._tensor(leaf, name)
        if isinstance(leaf, UnknownInstance) and leaf.name == "BytesIO":
            state = leaf.get("state")
            return extras.encode(bytes(state[0]) if state else b"")
        if isinstance(leaf, UnknownInstance) and _is_megatron(leaf.name):
            return leaf.name + (f"({', '.join(map(repr, leaf.args))})" if leaf.args else "")
        return self.encode(name, plain(leaf))

    def _tensor(self, t: TensorRef, name: str) -> Any:
        box, size = whole(t.shape), whole(t.shape).size * DTYPES[t.dtype].bytes
        if not t.contiguous:
            raise FormatError(f"{name!r}: strides {t.strides}", key=t.path)
        if size > INLINE_BYTES:
            self.tensors.append(of_ref(name, t, "tensor", box))
            return {"$at": name}
        data = bytearray(size)
        if size:
            self._store.read(t.path, t.offset, memoryview(data))
        return extras.inlined(t.dtype, t.shape, bytes(data))


def of_ref(name: str, t: TensorRef, state: str, box: Box) -> Foreign:
    """Return a tensor of a torch.save file; `box` is the whole of it."""
    parts = (StoredPart.of(box, t.path, t.source),) if box.size else ()
    return Foreign(name, t.dtype, t.shape, state, parts)
