"""Trees of values that ranks have saved each for itself, as one tree.

    {"w": <rows 0:2>, "epoch": 3}, {"w": <rows 2:4>, "epoch": 3}   ->   {"w": Tensor of 4 rows, "epoch": 3}

Parts of a tensor become one `Tensor`.  A tensor that each rank holds whole has the ranks' as copies.  What
else differs between ranks is `ByRank`.  Whoever asked decides what may differ; `of_all` says that nothing
may: ranks then hold parts of one state, and not each its own, or states of several saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from holdfast.errors import FormatError
from holdfast.format import extras
from holdfast.format.dtypes import DTYPES, numpy_dtype
from holdfast.interop.foreign import StoredPart
from holdfast.interop.plaindata import plain
from holdfast.interop.torchdist import Shards
from holdfast.interop.torchfile import TensorRef
from holdfast.interop.unpickle import UnknownInstance
from holdfast.layout import Box, whole
from holdfast.store import Store


@dataclass(frozen=True)
class Tensor:
    """A whole tensor.  `sets`: the parts that make it up, and further sets of replicas.

    `whole`: the whole ones that ranks have saved.  `same` tells which tensors lie in the same place.
    """

    dtype: str
    shape: tuple[int, ...]
    sets: tuple[tuple[StoredPart, ...], ...]
    whole: tuple[TensorRef, ...] = ()
    same: Any = None

    @property
    def of_each(self) -> bool:
        """True if each rank saved a whole tensor, and nothing says that they are replicas."""
        return len(self.whole) > 1


@dataclass(frozen=True)
class ByRank:
    """A value of which every rank has another, and the ranks' files."""

    values: tuple[Any, ...]
    files: tuple[str, ...]


def merged(trees: Sequence[Any], files: Sequence[str], path: str = "") -> Any:
    """One tree of the trees of ranks 0, 1, ...  FormatError where parts do not belong together."""
    first = trees[0]
    if all(isinstance(t, (TensorRef, Shards)) for t in trees):
        return _tensor(trees, files, path)
    if all(isinstance(t, dict) for t in trees) and all(t.keys() == first.keys() for t in trees):
        return {
            k: merged([t[k] for t in trees], files, f"{path}.{k}" if path else str(k))
            for k in first
        }
    alike = all(type(t) is type(first) for t in trees)
    if isinstance(first, (list, tuple)) and alike and len({len(t) for t in trees}) == 1:
        items = [merged([t[i] for t in trees], files, f"{path}[{i}]") for i in range(len(first))]
        return items if isinstance(first, list) else tuple(items)
    if len(trees) == 1:
        return merged([plain(first)], files, path) if isinstance(first, UnknownInstance) else first
    if alike and not isinstance(first, (dict, list, tuple, TensorRef, Shards)):
        if all(_json(t) == _json(first) for t in trees):
            return merged([first], files, path)
    return ByRank(tuple(merged([t], files, path) for t in trees), tuple(files))


def _json(value: Any) -> Any:
    """Return a plain value encoded so that equal ones compare equal, also NaN and arrays."""
    return extras.encode(value, lambda other, where: _json(plain(other)))


def _tensor(leaves: Sequence[TensorRef | Shards], files: Sequence[str], path: str) -> Any:
    plain_ones = [t for t in leaves if isinstance(t, TensorRef)]
    shards = [t for t in leaves if isinstance(t, Shards)]
    if plain_ones and shards:
        raise FormatError(f"{path!r} is sharded on some ranks and not on others")
    if len({(t.dtype, t.shape) for t in leaves}) != 1:
        if shards:
            kinds = ", ".join(dict.fromkeys(f"{t.dtype} {t.shape}" for t in leaves))
            raise FormatError(f"{path!r} is of another kind on each rank: {kinds}")
        return ByRank(tuple(_tensor([t], files, path) for t in leaves), tuple(files))
    first = leaves[0]
    if shards:
        return Tensor(first.dtype, first.shape, _sets(shards, path))
    sets = tuple(_parts(t, None, path) for t in plain_ones)
    same = (plain_ones[0].path, plain_ones[0].offset, first.shape, plain_ones[0].strides)
    return Tensor(first.dtype, first.shape, sets, tuple(plain_ones), same)


def _parts(tensor: TensorRef, box: Box | None, path: str) -> tuple[StoredPart, ...]:
    try:
        return tensor.parts(box)
    except FormatError as error:
        raise FormatError(f"{path!r}: {error.message}", key=error.key, hint=error.hint) from None


def _sets(leaves: Sequence[Shards], path: str) -> tuple[tuple[StoredPart, ...], ...]:
    """Return sets of parts that each make up the tensor: as many as every box has holders."""
    _check_ranks(leaves, path)
    holders: dict[Box, list[tuple[StoredPart, ...]]] = {}
    for leaf in leaves:
        for box, tensor in leaf.held:
            holders.setdefault(box, []).append(_parts(tensor, box, path))
    count = min((len(h) for h in holders.values()), default=1)
    return tuple(tuple(p for h in holders.values() for p in h[i]) for i in range(count))


def _check_ranks(leaves: Sequence[Shards], path: str) -> None:
    """Check that the files are those of ranks 0, 1, ..., and of all of them."""
    hint = "open the folder that holds the file of every rank, and no other files"
    if len(leaves) == 1 and any(box != whole(leaves[0].shape) for box, _ in leaves[0].held):
        raise FormatError(f"{path!r}: this file holds one rank's part of it", hint=hint)
    for number, leaf in enumerate(leaves):
        if leaf.world not in (None, len(leaves)):
            raise FormatError(
                f"{path!r} was saved by {leaf.world} ranks, but there are {len(leaves)} files",
                hint=hint,
            )
        if leaf.rank not in (None, number) and len(leaves) > 1:
            raise FormatError(
                f"{path!r}: the file of rank {number} was saved by rank {leaf.rank}", hint=hint
            )


# -- what may not differ --------------------------------------------------------------------------


def of_all(store: Store, value: Any, path: str) -> Any:
    """A value of which ranks hold replicas.  FormatError if they differ, as far as can be told unread.

    Tensors are compared by the checksums of their storages where files have them, single numbers always.
    """
    if isinstance(value, ByRank):
        shown = [_shown(v) for v in value.values]
        rank = next((r for r, one in enumerate(shown) if one != shown[0]), 1)
        raise _differ(path, (value.files[0], shown[0]), (value.files[rank], shown[rank]))
    if isinstance(value, Tensor):
        for other in value.whole[1:]:
            _check_replica(store, value.whole[0], other, path)
        return replace(value, whole=value.whole[:1])
    if isinstance(value, dict):
        return {k: of_all(store, v, f"{path}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [of_all(store, v, f"{path}.{i}") for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _check_replica(store: Store, first: TensorRef, other: TensorRef, path: str) -> None:
    told = first.content is not None and other.content is not None
    if told and (first.content, first.strides) == (other.content, other.strides):
        return
    if not first.shape:
        a, b = scalar(store, first), scalar(store, other)
        if repr(a) != repr(b):
            raise _differ(path, (first.path, a), (other.path, b))
    elif told:
        raise _differ(path, (first.path, "one tensor"), (other.path, "another"))


def scalar(store: Store, tensor: TensorRef) -> Any:
    """The element of a tensor without dims."""
    raw = bytearray(DTYPES[tensor.dtype].bytes)
    store.read(tensor.path, tensor.offset, memoryview(raw))
    return np.frombuffer(raw, numpy_dtype(tensor.dtype))[0].item()


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {value.shape}"
    plain_value = value is None or isinstance(value, (bool, int, float, str))
    return repr(value)[:60] if plain_value else f"another {type(value).__name__}"


def _differ(path: str, first: tuple[str, Any], other: tuple[str, Any]) -> FormatError:
    return FormatError(
        f"{path!r} is {first[1]} in {first[0]} and {other[1]} in {other[0]}",
        key=other[0],
        hint="files of two saves do not belong together; tensors that are cut have to say how: save "
        "DTensors, FSDP1's SHARDED_STATE_DICT or FULL_STATE_DICT, or by torch.distributed.checkpoint; "
        "of ranks that are replicas open one file",
    )
