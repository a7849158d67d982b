"""Digests and sketches of values.

A digest (XXH3-64 of type, shape and bytes) tells whether two values are bit for bit the same.  A sketch
estimates how far two tensors are apart, without either: the sums of x * s for `WIDTH` patterns s of random
signs.  A pattern is a product of one pattern for each dimension, so the expectation of (sketch(a) -
sketch(b))**2 is |a - b|**2 (as for Alon, Matias and Szegedy's sketch, 1996), and sketches of the parts of a
tensor add up to that of the whole, however it is cut.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from holdfast.prove.messages import WIDTH, Batch, Item

_SLICE = 1 << 24
"""Elements that are brought from a device at once."""
_LONGEST = 1 << 22
"""The longest dimension that is sketched: a pattern has 32 bytes for each place."""
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def scalar(value: object) -> Item:
    """The item of a number, a text, or a short container of these."""
    text = repr(value)
    return Item(xxhash.xxh3_64_intdigest(text.encode()), text[:80])


def is_scalar(value: object) -> bool:
    """Tell whether a value is a number or None, or a short list or dict of numbers."""
    if isinstance(value, (list, tuple, deque)):
        return len(value) <= 16 and all(type(v) in (bool, int, float) for v in value)
    return type(value) in (bool, int, float)


def tensor(value: Tensor, sketched: bool = False) -> Item:
    """The item of a tensor: of the part that this rank has, for a DTensor.

    Raises TypeError for a subclass whose values are nowhere to be seen.
    """
    local, place = local_of(value)
    digest = xxhash.xxh3_64()
    head = f"{local.dtype}{tuple(value.shape)}"
    digest.update(head.encode())
    narrow = False
    for number, part in enumerate(_slices(local)):
        host = part.cpu()
        data = host.reshape(-1).view(torch.uint8).numpy()
        digest.update(data)
        if not number and host.dtype == torch.float32:
            bits = data.view(np.uint32)[:4096]
            narrow = bool(bits.any()) and not (bits & 0x1FFF).any()
    text = repr(local.item()) if local.numel() == 1 and value.numel() == 1 else ""
    sketch = _sketch(local, value.shape, place) if sketched and place is not None else None
    return Item(digest.intdigest(), text, sketch, hasattr(value, "placements"), narrow)


def local_of(value: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """The plain part that this rank has, and its first place in each dimension; None if that is unknown."""
    value = value.detach()
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(value, module.DTensor):
        return value.to_local(), _offsets(value, module)
    if type(value) not in (Tensor, torch.nn.Parameter):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            return value.as_subclass(Tensor), None
        inner = [getattr(value, name) for name in flatten()[0]]
        return torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in inner]), None
    if value.layout != torch.strided:
        return torch.cat([value.coalesce().values().reshape(-1)]), None
    return value.resolve_conj().resolve_neg(), (0,) * value.dim()


def _offsets(value: Any, module: Any) -> tuple[int, ...] | None:
    """Where this rank's part begins; None for a copy that another rank counts, or an unknown layout."""
    offsets, sizes = [0] * value.dim(), list(value.shape)
    for place, size, index in zip(
        value.placements,
        value.device_mesh.shape,
        value.device_mesh.get_coordinate() or (),
        strict=True,
    ):
        if type(place) is module.Shard:
            chunk = -(-sizes[place.dim] // size)
            begin = min(index * chunk, sizes[place.dim])
            offsets[place.dim] += begin
            sizes[place.dim] = min(chunk, sizes[place.dim] - begin)
        elif index or type(place) is not module.Replicate:
            return None
    return tuple(offsets)


def _slices(local: Tensor) -> Iterator[Tensor]:
    local = local.contiguous()
    if local.device.type == "cpu" or local.numel() <= _SLICE:
        yield local
        return
    yield from local.reshape(-1).split(_SLICE)


def _sketch(local: Tensor, shape: Sequence[int], begin: tuple[int, ...]) -> list[float] | None:
    if not local.is_floating_point() or local.element_size() < 2:
        return None
    if max(shape, default=0) > _LONGEST:
        return None
    wide = local.to(torch.float64 if local.dtype == torch.float64 else torch.float32)
    sums = wide.unsqueeze(-1)
    for dim in range(local.dim() - 1, -1, -1):
        signs = _signs(dim, begin[dim] + local.shape[dim])[begin[dim] :].to(wide)
        is_first = sums.shape[-1] == 1
        sums = sums.squeeze(-1) @ signs if is_first else (sums * signs).sum(-2)
    return (
        [float(s) for s in sums.expand(WIDTH).tolist()] if local.dim() else [float(local)] * WIDTH
    )


@lru_cache(maxsize=64)
def _signs(dim: int, length: int) -> Tensor:
    """A prefix of the signs of a dimension: the same for each length."""
    signs = np.random.Generator(np.random.PCG64(dim)).integers(0, 2, (length, WIDTH), np.int8)
    return torch.from_numpy(signs.astype(np.float32) * 2 - 1)


def batch(value: object, place: int) -> Batch:
    """The digest of a batch and of its samples: the rows of its tensors, where all have as many."""
    leaves = list(_leaves(value))
    arrays = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
    lengths = {len(leaf) if leaf.ndim else 0 for leaf in arrays}
    whole = xxhash.xxh3_64()
    for leaf in leaves:
        is_array = isinstance(leaf, np.ndarray)
        whole.update(np.ascontiguousarray(leaf).tobytes() if is_array else repr(leaf).encode())
    samples = []
    if len(lengths) == 1 and 0 not in lengths:
        for row in zip(*arrays, strict=True):
            one = xxhash.xxh3_64()
            for part in row:
                one.update(np.ascontiguousarray(part).tobytes())
            samples.append(one.intdigest())
    return Batch(place, whole.intdigest(), samples or [whole.intdigest()])


def _leaves(value: object) -> Iterator[Any]:
    if isinstance(value, Tensor):
        local = value.detach().contiguous().cpu()
        yield local.view(torch.uint8).numpy() if local.dtype == torch.bfloat16 else local.numpy()
    elif isinstance(value, np.ndarray):
        yield value if value.dtype != object else np.frombuffer(repr(value).encode(), np.uint8)
    elif isinstance(value, _SCALARS):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif hasattr(value, "__dict__"):
        yield from _leaves(vars(value))


def leaves_of(
    state: object, prefix: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, Item]]:
    """Tensors, arrays and numbers of a nested state, and of objects in it, by their path."""
    seen = set() if seen is None else seen
    if isinstance(state, Tensor):
        yield prefix, tensor(state)
    elif isinstance(state, (np.ndarray, np.generic)):
        yield prefix, _array(state)
    elif isinstance(state, _SCALARS) or is_scalar(state):
        yield prefix, scalar(state)
    elif id(state) not in seen:
        seen.add(id(state))
        inner: Iterable[tuple[object, object]] = ()
        if isinstance(state, Mapping):
            inner = state.items()
        elif isinstance(state, (list, tuple, deque)):
            inner = enumerate(state)
        elif type(state).__module__ != "builtins" and not isinstance(state, type):
            inner = getattr(state, "__dict__", {}).items()
        for number, (key, item) in enumerate(list(inner)):
            name = number if isinstance(key, Tensor) else key
            path = f"{prefix}.{name}" if prefix else str(name)
            yield from leaves_of(item, path, seen)


def _array(array: Any) -> Item:
    """The item of an array: that of the tensor with these values, where there is one."""
    if isinstance(array, np.generic):
        return scalar(array.item())
    try:
        return tensor(torch.from_numpy(array.copy()))
    except TypeError:
        return scalar(array.tobytes())
