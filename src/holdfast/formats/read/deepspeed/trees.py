"""DeepSpeed's pickles as data: trees with typed access, and encoding of their values as extras.

Most of what is pickled is plain.  Objects of DeepSpeed's and Megatron's own classes (loss scalers, stages,
enumerations, arguments) become `UnknownInstance`s, which only hold fields; any other class is refused.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np

from holdfast.base.errors import Corrupt, FormatError
from holdfast.core.format import extras
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.store import Store, read_range
from holdfast.formats.read import plaindata
from holdfast.formats.read.torchfile import TensorRef, enumerated, read_file, torch_globals
from holdfast.formats.read.unknown import known_parts
from holdfast.formats.read.unpickle import MALFORMED, UnknownInstance, record

_T = TypeVar("_T")
_OnTensor = Callable[[TensorRef, str], Any]

_OURS = ("deepspeed.", "megatron.")
"""Packages whose classes all become `UnknownInstance`s."""
_MAX_INLINE_BYTES = 1 << 20


class _Packages(dict[tuple[str, str], Any]):
    """A table in which every class of the packages `_OURS` is an `UnknownInstance`."""

    def __contains__(self, key: object) -> bool:
        return isinstance(key, tuple) and key[0].startswith(_OURS)

    def __missing__(self, key: tuple[str, str]) -> Any:
        if key not in self:
            raise KeyError(key)
        return record(key[1])


def _rebuild_as_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Rebuild a tensor with attributes, which are dropped."""
    if not isinstance(function, UnknownInstance) or not isinstance(args, tuple):
        raise FormatError("a tensor made by no function")
    module, _, name = function.name.rpartition(".")
    make = torch_globals().get((module, name))
    if not callable(make) or not name.startswith("_rebuild"):
        raise FormatError(f"a tensor made by {function.name}")
    return make(*args)


_STAGES = ("disabled", "optimizer_states", "gradients", "weights")


def _member(owner: Any, name: Any) -> UnknownInstance:
    """A member of an enumeration, as Python 3.11.0 to 3.11.3 pickle it; of stages by its number."""
    found = enumerated(owner, name)
    is_stage = owner.name.endswith("ZeroStageEnum") and name in _STAGES
    return UnknownInstance(owner.name, (_STAGES.index(name),)) if is_stage else found


_KNOWN: ChainMap[tuple[str, str], Any] = ChainMap(
    {
        ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_as_type,
        ("builtins", "getattr"): _member,
        ("__builtin__", "getattr"): _member,
        ("torch", "Tensor"): record("Tensor"),
        ("torch.nn.parameter", "Parameter"): record("Parameter"),
    },
    plaindata.PLAIN_GLOBALS,
    _Packages(),
)


MODEL_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler",
}  # fmt: skip
"""Keys of a model file that other modules read."""
ENGINE = {
    "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "dp_world_size",
    "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts",
    "ds_autoep_layers", "universal_checkpoint_info", "sparse_tensor_module_names",
    "csr_tensor_module_names",
}  # fmt: skip
"""Keys that DeepSpeed writes; all others are client state."""
_OWN = (
    MODEL_KEYS | ENGINE | {"optimizer_state_dict", "base_optimizer_state", "param_groups", "state"}
)


@dataclass(frozen=True)
class Tree:
    """A file's pickle: a dict with typed access to its values."""

    store: Store
    path: str
    root: dict[Any, Any]

    def get(self, key: str, kind: type[_T]) -> _T:
        """The value of a key.  FormatError if it is missing or of another type."""
        found = self.maybe(key, kind)
        if found is None:
            raise FormatError(f"{key!r} is missing", key=self.path)
        return found

    def maybe(self, key: str, kind: type[_T]) -> _T | None:
        """`get`, but None if the value is missing or None."""
        found = self.root.get(key)
        if found is None or isinstance(found, kind):
            return found
        raise FormatError(
            f"{key!r} is a {type(found).__name__}, not a {kind.__name__}", key=self.path
        )

    def below(self, key: str) -> Tree:
        """The dict under a key."""
        return Tree(self.store, self.path, self.get(key, dict))

    def values(self, ref: TensorRef) -> bytes:
        """A tensor's elements, row-major; for small ones."""
        width = DTYPES[ref.dtype].bytes
        size = prod(ref.shape) * width
        span = sum((n - 1) * s for n, s in zip(ref.shape, ref.strides)) * width + width
        if not size:
            return b""
        if max(size, span) > _MAX_INLINE_BYTES:
            raise FormatError(f"a tensor of {size} bytes where a value should be", key=self.path)
        data = read_range(self.store, ref.path, ref.offset, span)
        strides = tuple(s * width for s in ref.strides)
        raw: np.ndarray[Any, Any] = np.ndarray(ref.shape, f"V{width}", data, 0, strides)
        return raw.tobytes()

    def encode(self, value: Any, on_tensor: _OnTensor | None = None, path: str = "") -> Any:
        """Encode a value for extras.  `on_tensor` encodes tensors; without it they are inlined."""

        def other(leaf: Any, where: str) -> Any:
            if isinstance(leaf, TensorRef):
                if on_tensor:
                    return on_tensor(leaf, where)
                return extras.inlined(leaf.dtype, leaf.shape, self.values(leaf))
            if isinstance(leaf, UnknownInstance):
                return extras.encode(_plain(leaf), other, where, where.count(".") + 1)
            raise FormatError(f"{where}: a {type(leaf).__name__}", key=self.path)

        return extras.encode(value, other, path)


def read_tree(store: Store, path: str, bare: str | None = None) -> Tree:
    """The tree of a file, tensors as references.  FormatError or Corrupt, naming the file.

    A bare value is read as a dict with the value under the key `bare`.
    """
    try:
        (root,) = known_parts([read_file(store, path, _KNOWN, lenient=True)], [path], _OWN)
    except MALFORMED as error:
        raise Corrupt(f"malformed: {type(error).__name__}: {error}", key=path) from None
    if bare is not None and not isinstance(root, dict):
        root = {bare: root}
    if not isinstance(root, dict):
        raise FormatError(f"a {type(root).__name__} where a dict should be", key=path)
    return Tree(store, path, root)


def _plain(value: UnknownInstance) -> Any:
    """Return the plain value of an `UnknownInstance`, without its class."""
    if value.name in ("scalar", "ndarray", "frombuffer", "dtype", "Namespace", "BytesIO"):
        return plaindata.plain_value(value)
    if value.fields:
        return value.fields
    return value.args[0] if len(value.args) == 1 else list(value.args) or value.name
