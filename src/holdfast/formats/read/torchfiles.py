"""Finding the torch.save files of a checkpoint, and reading their trees.

One file (`model.pt`); shards of Hugging Face with their index (`pytorch_model.bin.index.json`); or one file
of each rank (`rank0.pt`, `rank1.pt`, ...; `model_world_size_2_rank_0.pt`), perhaps several such sets.
"""

from __future__ import annotations

import re
from typing import Any

from holdfast.base.errors import FormatError, NotFound, UsageError
from holdfast.base.text import listed
from holdfast.core.store import Store
from holdfast.formats.read import plaindata
from holdfast.formats.read.folder import OneFile, joined, top
from holdfast.formats.read.huggingface import Index, missing_files, read_index
from holdfast.formats.read.merged_ranks import DISTRIBUTED, merged
from holdfast.formats.read.torchfile import RESAVE, read_file
from holdfast.formats.read.unknown import known_parts

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_INDEX = ".bin.index.json"
_RANK = re.compile(
    r"(?P<before>.*?)(?<![mp]p_)(?<![a-z])rank[-_]?(?P<rank>\d+)(?P<after>.*)\.(pt|pth|bin|ckpt)"
)
_KNOWN = plaindata.PLAIN_GLOBALS | DISTRIBUTED


def is_torch(store: Store) -> bool:
    """True if a folder has torch.save files under known names, or is such a file."""
    if isinstance(store, OneFile):
        return store.name.endswith((*_SUFFIXES, _INDEX))
    names = top(store)
    told = any(n == "pytorch_model.bin" or n.endswith(_INDEX) for n in names)
    return told or any(0 in ranks for ranks in _rank_files(names).values())


def holds_torch(store: Store) -> bool:
    """True if a folder has any file that torch.save may have written, or is one file."""
    return any(n.endswith((*_SUFFIXES, _INDEX)) for n in top(store)) or isinstance(store, OneFile)


def trees_of(store: Store) -> list[Any]:
    """Return the trees of a checkpoint's files, with those of a set of ranks merged; several if the model
    and the optimizer are in different sets."""
    names = top(store)
    if isinstance(store, OneFile):
        name = store.name
        return [_indexed(store, name) if name.endswith(_INDEX) else _of_one(store, name)]
    indexes = [n for n in names if n.endswith(_INDEX)]
    ranks = _rank_files(names)
    shards = {f for i in indexes for f in read_index(store, i, _SUFFIXES).files.values()}
    ranked = {name for found in ranks.values() for name in found.values()}
    singles = [n for n in names if n.endswith(_SUFFIXES) and n not in shards | ranked]
    if "pytorch_model.bin" in singles:
        singles = ["pytorch_model.bin"]  # beside it lie training_args.bin, optimizer.pt, ...
    kinds = [*indexes, *([next(iter(ranked))] if ranks else []), *singles]
    if not kinds:
        raise NotFound(f"no file of torch.save in {store.url}")
    if len(kinds) > 1:
        raise UsageError(
            f"several checkpoints in {store.url}: {listed(kinds, 5)}",
            hint=f"name one: torch:{joined(store.url, kinds[0]).removeprefix('file://')}",
        )
    if ranks:
        return [_of_ranks(store, found) for _, found in sorted(ranks.items())]
    return [_indexed(store, indexes[0]) if indexes else _of_one(store, singles[0])]


def files_trees(store: Store, files: list[str]) -> list[Any]:
    """The trees of the files of one checkpoint; values with unknown objects are left out with a warning."""
    try:
        trees = [read_file(store, file, _KNOWN, lenient=True) for file in files]
        return known_parts(trees, files)
    except FormatError as error:
        if "not known to be data" in error.message and error.hint is None:
            error.hint = f"it holds more than tensors and plain values; {_RESAVE_PLAIN}"
        raise


def _of_one(store: Store, file: str) -> Any:
    return merged(files_trees(store, [file]), [file])


_RESAVE_PLAIN = "save state_dict()s, not objects; or " + RESAVE


# -- ranks ----------------------------------------------------------------------------------------


def _rank_files(names: list[str]) -> dict[tuple[str, str], dict[int, str]]:
    """Files by rank number, in sets that have the same text before and after the number."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        match = _RANK.fullmatch(name)
        if match:
            found.setdefault((match["before"], match["after"]), {})[int(match["rank"])] = name
    return found


def _of_ranks(store: Store, files: dict[int, str]) -> Any:
    missing = next((rank for rank in range(len(files)) if rank not in files), None)
    if missing is not None:
        raise NotFound(
            f"no file of rank {missing} beside {files[max(files)]}",
            key=files[max(files)],
            hint="open the folder that holds the file of every rank",
        )
    names = [files[rank] for rank in sorted(files)]
    return merged(files_trees(store, names), names)


# -- shards of Hugging Face -----------------------------------------------------------------------


def _indexed(store: Store, key: str) -> dict[str, Any]:
    """The tensors of all shards, each in the file that the index names."""
    index = read_index(store, key, _SUFFIXES)
    files = sorted(set(index.files.values()))
    missing_files(store, files, key)
    out: dict[str, Any] = {}
    for file in files:
        tree = _of_one(store, file)
        if not isinstance(tree, dict):
            raise FormatError("not a dict of tensors", key=file)
        _check_shard(index, file, tree)
        out |= tree
    lost = [n for n in index.files if n not in out]
    if lost:
        raise FormatError(f"{lost[0]!r} is not in {index.files[lost[0]]}, as {key} says", key=key)
    return out


def _check_shard(index: Index, file: str, tree: dict[str, Any]) -> None:
    for name in tree:
        if index.files.get(name) != file:
            at = f"in {index.files[name]}" if name in index.files else "nowhere"
            raise FormatError(f"{name!r} is in {file}; {index.key} says {at}", key=file)
