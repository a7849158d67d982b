"""Trees of values that ranks have saved each for itself, as one tree.

    {"w": <rows 0:2>, "epoch": 3}, {"w": <rows 2:4>, "epoch": 3}   ->   {"w": Tensor of 4 rows, "epoch": 3}

Parts of a tensor become one `Tensor`.  A tensor that each rank holds whole has the ranks' as copies.  What
else differs between ranks is `ByRank`, and whoever asked decides whether it may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import FormatError
from holdfast.format import extras
from holdfast.interop.foreign import Part
from holdfast.interop.plaindata import plain
from holdfast.interop.torchdist import Shards
from holdfast.interop.torchfile import TensorRef
from holdfast.interop.unpickle import Record
from holdfast.layout import Box, whole


@dataclass(frozen=True)
class Tensor:
    """A whole tensor.  `sets`: the parts that make it up, and further sets of replicas.

    `of_each`: each rank saved a whole one, and nothing says that they are replicas.  `same` tells which
    tensors lie in the same place.
    """

    dtype: str
    shape: tuple[int, ...]
    sets: tuple[tuple[Part, ...], ...]
    of_each: bool = False
    same: Any = None


@dataclass(frozen=True)
class ByRank:
    """A value of which every rank has another."""

    values: tuple[Any, ...]


def merged(trees: Sequence[Any], path: str = "") -> Any:
    """One tree of the trees of ranks 0, 1, ...  FormatError where parts do not belong together."""
    first = trees[0]
    if all(isinstance(t, (TensorRef, Shards)) for t in trees):
        return _tensor(trees, path)
    if all(isinstance(t, dict) for t in trees) and all(t.keys() == first.keys() for t in trees):
        return {k: merged([t[k] for t in trees], f"{path}.{k}" if path else str(k)) for k in first}
    alike = all(type(t) is type(first) for t in trees)
    if isinstance(first, (list, tuple)) and alike and len({len(t) for t in trees}) == 1:
        items = [merged([t[i] for t in trees], f"{path}[{i}]") for i in range(len(first))]
        return items if isinstance(first, list) else tuple(items)
    if len(trees) == 1:
        return merged([plain(first)], path) if isinstance(first, Record) else first
    if alike and not isinstance(first, (dict, list, tuple, TensorRef, Shards)):
        if all(_json(t) == _json(first) for t in trees):
            return merged([first], path)
    return ByRank(tuple(merged([t], path) for t in trees))


def _json(value: Any) -> Any:
    """A plain value so that equal ones compare equal: NaN, arrays."""
    return extras.encode(value, lambda other, where: _json(plain(other)))


def _tensor(leaves: Sequence[TensorRef | Shards], path: str) -> Any:
    plain_ones = [t for t in leaves if isinstance(t, TensorRef)]
    shards = [t for t in leaves if isinstance(t, Shards)]
    if plain_ones and shards:
        raise FormatError(f"{path!r} is sharded on some ranks and not on others")
    if len({(t.dtype, t.shape) for t in leaves}) != 1:
        if shards:
            kinds = ", ".join(dict.fromkeys(f"{t.dtype} {t.shape}" for t in leaves))
            raise FormatError(f"{path!r} is of another kind on each rank: {kinds}")
        return ByRank(tuple(_tensor([t], path) for t in leaves))
    first = leaves[0]
    if shards:
        return Tensor(first.dtype, first.shape, _sets(shards, path))
    sets = tuple(_parts(t, None, path) for t in plain_ones)
    same = (plain_ones[0].path, plain_ones[0].offset, first.shape, plain_ones[0].strides)
    return Tensor(first.dtype, first.shape, sets, len(sets) > 1, same)


def _parts(tensor: TensorRef, box: Box | None, path: str) -> tuple[Part, ...]:
    try:
        return tensor.parts(box)
    except FormatError as error:
        raise FormatError(f"{path!r}: {error.message}", key=error.key, hint=error.hint) from None


def _sets(leaves: Sequence[Shards], path: str) -> tuple[tuple[Part, ...], ...]:
    """The parts of all ranks; as many further sets as every box has holders."""
    _check_ranks(leaves, path)
    holders: dict[Box, list[tuple[Part, ...]]] = {}
    for leaf in leaves:
        for box, tensor in leaf.held:
            holders.setdefault(box, []).append(_parts(tensor, box, path))
    count = min((len(h) for h in holders.values()), default=1)
    return tuple(tuple(p for h in holders.values() for p in h[i]) for i in range(count))


def _check_ranks(leaves: Sequence[Shards], path: str) -> None:
    """The files are those of ranks 0, 1, ..., and of all of them."""
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
