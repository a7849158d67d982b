"""Directories of torch.distributed.checkpoint, for `dcp.load` and systems built on it.

Names are those of a dict of `get_model_state_dict` and `get_optimizer_state_dict`: `model.<name>`,
`optim.state.<name>.<state>`, `optim.param_groups.<i>.<hyper-parameter>`; other extras are flattened as DCP
flattens nested dicts.  Large tensors are stored in chunks of rows, so that ranks read what they need.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from holdfast.base.errors import UsageError
from holdfast.core.checkpoint.consolidating import keep_extras
from holdfast.core.checkpoint.opened import Checkpoint, plain_tensor
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.format.extras import decode
from holdfast.core.format.manifest import TensorEntry, owner_of
from holdfast.formats.write.archive import ArchivedTensor, ArchivePlan, add_archive, for_torch
from holdfast.formats.write.file_plans import Planned, WriteOptions
from holdfast.formats.write.pickling import (
    Instance,
    PickledCall,
    PickledGlobal,
    dumps,
    pickled_call,
)

_METADATA = ".metadata"
_CHUNK_BYTES = 128 << 20
_META = "torch.distributed.checkpoint.metadata"

_Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of a tensor, as one archive of a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class _Files:
    """Archives back to back, in files of at most `max_file_bytes`."""

    def __init__(self, max_file_bytes: int) -> None:
        self._max = max_file_bytes
        self.plans: list[ArchivePlan] = [ArchivePlan()]

    def add(self, tree: Any, size: int = 0) -> tuple[str, int, int]:
        """Append an archive: (file, start, length)."""
        if self.plans[-1].at and self.plans[-1].at + size > self._max:
            self.plans.append(ArchivePlan())
        plan = self.plans[-1]
        plan.align()
        start = plan.at
        add_archive(plan, tree)
        return self.name(len(self.plans) - 1), start, plan.at - start

    @staticmethod
    def name(number: int) -> str:
        return f"__{number}_0.distcp"


def plan_dcp(source: Checkpoint, options: WriteOptions) -> Planned:
    """Plan all tensors, and all extras except per-rank ones."""
    extras, left_out = keep_extras(source)
    files, entries = _Files(options.max_file_bytes), _Entries()
    paths = _paths(source, extras)
    by_name: dict[str, list[_Chunk]] = {}
    for number, t in enumerate(source.manifest.tensors):
        by_name[t.name] = list(_chunks(files, number, t))
        entries.tensor(paths[t.name], t.dtype, t.shape, by_name[t.name])
    for alias, name in source.manifest.aliases.items():
        t = source.manifest.tensors[source.index(name)]
        if len(paths[alias]) == 2:  # weights under each name, optimizer states only under the first
            entries.tensor(paths[alias], t.dtype, t.shape, by_name[name])
    for path, value in _values(extras, paths, source.manifest.aliases):
        if isinstance(value, np.ndarray):
            tensor = for_torch(value)
            chunk = _Chunk((0,) * value.ndim, value.shape, *files.add(tensor))
            entries.tensor(path, tensor.dtype, value.shape, [chunk])
        else:
            entries.value(path, files.add(for_torch(value)))
    outfiles = tuple(plan.outfile(files.name(i)) for i, plan in enumerate(files.plans))
    return Planned(outfiles, ((_METADATA, entries.metadata()),), left_out)


def _chunks(files: _Files, number: int, t: TensorEntry) -> Iterator[_Chunk]:
    rows = t.shape[0] if t.shape else 1
    row = prod(t.shape[1:])
    step = max(1, _CHUNK_BYTES // max(row * DTYPES[t.dtype].bytes, 1))
    for first in range(0, rows, step) if prod(t.shape) else ():
        count = min(step, rows - first)
        sizes = (count, *t.shape[1:]) if t.shape else ()
        part = ArchivedTensor(t.dtype, sizes, number, first * row)
        offsets = (first, *(0 for _ in t.shape[1:])) if t.shape else ()
        yield _Chunk(offsets, sizes, *files.add(part, part.bytes))


# -- names ----------------------------------------------------------------------------------------


def _paths(source: Checkpoint, extras: dict[str, Any]) -> dict[str, _Path]:
    """Return the path of each tensor or alias, by name, in the dict of dicts that DCP flattens."""
    optimizers = {k for k, v in extras.items() if isinstance(v, dict) and "$optimizer" in v}
    inside = {
        str(name): path
        for key, tree in extras.items()
        if key not in optimizers
        for path, name in _flat((key,), decode(tree, _with_names))
        if isinstance(name, _TensorName)
    }
    states = {t.name: t.state for t in source.manifest.tensors}
    found: dict[str, _Path] = {}
    for name in source.names():
        key, _, rest = name.partition(".")
        state = states[source.manifest.aliases.get(name, name)]
        if name in inside:
            found[name] = inside[name]
        elif key in optimizers and (param := owner_of(rest, state)) != rest:
            found[name] = (key, "state", param, state)
        else:
            found[name] = (key, rest) if rest else (key,)
    return found


def _tied(paths: dict[str, _Path], aliases: Collection[str], key: str, body: Any) -> set[str]:
    """Return the further names of tied parameters in an optimizer, which torch's optimizers do not list.

    Their states are those under the first name; of one without states, every module tells that has it.
    """
    states: dict[Any, list[str]] = {}
    weights: dict[Any, list[str]] = {}
    for name, path in paths.items():
        if path[:2] == (key, "state"):
            states.setdefault(path[2], []).append(name)
        elif len(path) == 2:
            weights.setdefault(path[1], []).append(name)
            weights[name] = [name]  # as modules are told apart that share a name
    params = {param for group in body["groups"] for param in group["params"]}
    names = {param: states.get(param) or weights.get(param) for param in params}
    return {p for p, given in names.items() if given and all(n in aliases for n in given)}


def _values(
    extras: dict[str, Any], paths: dict[str, _Path], aliases: Collection[str]
) -> Iterator[tuple[_Path, Any]]:
    """Flatten extras as DCP does: nested dicts, and lists of dicts, are split; other values stay whole."""
    for key, tree in extras.items():
        if isinstance(tree, dict) and "$optimizer" in tree:
            body = tree["$optimizer"]
            yield from _optimizer(key, body, _tied(paths, aliases, key, body))
        else:
            for path, value in _flat((key,), decode(tree, _with_names)):
                if not isinstance(value, _TensorName):  # that is written as a tensor
                    yield path, _proper(path, value)


def _optimizer(key: str, body: Any, tied: set[str]) -> Iterator[tuple[_Path, Any]]:
    for i, group in enumerate(body["groups"]):
        for name, value in decode(group["hyper"], _with_names).items():
            path = (key, "param_groups", i, name)
            yield path, _proper(path, value)
        yield (key, "param_groups", i, "params"), [p for p in group["params"] if p not in tied]
    for param, states in body["state"].items():
        for name, value in decode(states, _with_names).items() if param not in tied else ():
            path = (key, "state", param, name)
            yield path, _proper(path, value)


class _TensorName(str):
    """The name of a tensor that a value refers to."""


def _with_names(tag: str, body: Any) -> Any:
    """`plain_tensor`, but with names of tensors as `_TensorName`s."""
    if tag == "$at":
        return _TensorName(body)
    if tag in ("$object", "$quantized"):
        return decode(body, _with_names)
    return plain_tensor(tag, body)


def _proper(path: _Path, value: Any) -> Any:
    """Return the value.  UsageError if it holds a tensor, which would be written as its name."""
    if isinstance(value, _TensorName):
        raise UsageError(
            f"{'.'.join(map(str, path))}: a tensor at a place where DCP is not given one",
            hint="--to universal keeps it",
        )
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        for inner in value.values() if isinstance(value, dict) else value:
            _proper(path, inner)
    return value


def _flat(path: _Path, value: Any) -> Iterator[tuple[_Path, Any]]:
    if isinstance(value, dict) and value and all(isinstance(k, (str, int)) for k in value):
        for k, v in value.items():
            yield from _flat((*path, str(k)), v)  # as in torch: ints in a path are list indices
    elif isinstance(value, list) and _leads_on(value):
        for i, v in enumerate(value):
            yield from _flat((*path, i), v)
    else:
        yield path, value


def _leads_on(value: Any) -> bool:
    """True if DCP splits a value: a dict, or a list that holds one."""
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_leads_on, value)))


# -- metadata -------------------------------------------------------------------------------------


class _Entries:
    """The entries that `.metadata` lists."""

    def __init__(self) -> None:
        self._tensors: dict[str, Any] = {}
        self._paths: dict[str, _Path] = {}
        self._places: dict[Any, Any] = {}

    def tensor(self, path: _Path, dtype: str, shape: tuple[int, ...], chunks: list[_Chunk]) -> None:
        name = self._name(path)
        state = (
            PickledGlobal("torch", dtype),
            pickled_call("torch.serialization", "_get_layout", "torch.strided"),
            False,
            pickled_call(_META, "_MEM_FORMAT_ENCODING", 0),
            False,
        )
        sizes = [{"offsets": _size(c.offsets), "sizes": _size(c.sizes)} for c in chunks]
        fields = {
            "properties": _meta("TensorProperties", state),
            "size": _size(shape),
            "chunks": [_meta("ChunkStorageMetadata", s) for s in sizes],
        }
        self._tensors[name] = _meta("TensorStorageMetadata", fields)
        for i, c in enumerate(chunks):
            self._place(name, _size(c.offsets), i, (c.file, c.start, c.length))

    def value(self, path: _Path, place: tuple[str, int, int]) -> None:
        name = self._name(path)
        self._tensors[name] = _meta("BytesStorageMetadata", {})
        self._place(name, None, None, place)

    def _name(self, path: _Path) -> str:
        name = ".".join(map(str, path))
        if name in self._tensors:
            raise UsageError(f"DCP would name two things {name!r}")
        self._paths[name] = path
        return name

    def _place(self, name: str, offset: Any, index: Any, place: tuple[str, int, int]) -> None:
        key = _meta("MetadataIndex", {"fqn": name, "offset": offset, "index": index})
        path, start, length = place
        fields = {
            "relative_path": path, "offset": start, "length": length, "transform_descriptors": None,
        }  # fmt: skip
        info = PickledGlobal("torch.distributed.checkpoint.filesystem", "_StorageInfo")
        self._places[key] = Instance(info, fields)

    def metadata(self) -> bytes:
        """The pickle that DCP reads first."""
        fields = {
            "state_dict_metadata": self._tensors,
            "planner_data": self._paths,
            "storage_data": self._places,
            "storage_meta": None,
            "version": "1.0.0",
        }
        return dumps(_meta("Metadata", fields))


def _meta(name: str, state: Any) -> Instance:
    """An instance of a class of DCP's metadata."""
    return Instance(PickledGlobal(_META, name), state)


def _size(shape: tuple[int, ...]) -> PickledCall:
    return pickled_call("torch", "Size", tuple(shape))
