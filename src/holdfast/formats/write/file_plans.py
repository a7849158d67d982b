"""Plans of writers: files of tensors, and the small files that complete a checkpoint.

A writer plans the names and places of all tensors before any is read.  Then `holdfast.formats.converting`
writes the files in any order, and the small files last, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod

from holdfast.base.arguments import shown
from holdfast.base.errors import UsageError
from holdfast.base.suggest import did_you_mean
from holdfast.core.checkpoint.consolidating import WEIGHT_KINDS
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.outfiles import Outfile
from holdfast.core.format.dtypes import DTYPES, numpy_dtype
from holdfast.core.format.manifest import TensorEntry

Renaming = Callable[[str], str]

ONE_FILE = {"safetensors": (".safetensors",), "torch": (".pt", ".pth", ".bin", ".ckpt")}
"""Formats whose target is a file, by the usual endings of its name; the others write a folder."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """`dtype` and `rename`: for the weights, in formats that hold only weights."""

    max_file_bytes: int = 5_000_000_000
    dtype: str | None = None
    rename: Renaming | None = None
    key: str = "model"
    """Key of the source's state whose weights to write."""


@dataclass(frozen=True)
class Planned:
    """Files of tensors; small files, written last and in order; what the format cannot hold."""

    files: tuple[Outfile, ...]
    last: tuple[tuple[str, bytes], ...] = ()
    left_out: tuple[str, ...] = ()


def with_attached(plan: Planned, source: Checkpoint, to: str) -> Planned:
    """Add the step's attached files to a plan.  They are left out if the target is a single file, or if the
    format itself uses the name."""
    taken = {f.path for f in plan.files} | {path for path, _ in plan.last}
    left_out = tuple(n for n in source.files if to in ONE_FILE or n in taken)
    along = tuple((n, source.files[n]) for n in source.files if n not in left_out)
    return replace(plan, last=(*along, *plan.last), left_out=(*plan.left_out, *left_out))


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor to write to a file of weights, with its new name."""

    name: str
    number: int
    shape: tuple[int, ...]
    dtype: str
    also: tuple[str, ...] = field(default=())
    """Further names of a tied tensor."""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].bytes


def weights(source: Checkpoint, options: WriteOptions) -> list[Weight]:
    """The model's parameters and buffers, without their key, renamed, with their new dtype.  UsageError."""
    found = _of_key(source, options.key)
    new = {name: _renamed(name, options) for name, _, _ in found}
    _check_names(new)
    also: dict[str, list[str]] = {}
    prefix = _prefix(source, options.key)
    for alias, name in source.manifest.aliases.items():
        if alias.startswith(prefix) and name.startswith(prefix):
            shown = alias.removeprefix(prefix)
            also.setdefault(name.removeprefix(prefix), []).append(_renamed(shown, options))
    return [
        Weight(new[name], number, t.shape, _cast(t, options.dtype), tuple(also.get(name, ())))
        for name, number, t in found
    ]


def _renamed(name: str, options: WriteOptions) -> str:
    try:
        new = name if options.rename is None else options.rename(name)
    except Exception as error:
        raise UsageError(f"rename({name!r}) raised {type(error).__name__}: {error}") from error
    if not isinstance(new, str) or not new:
        raise UsageError(f"rename({name!r}) returned {shown(new)}: must be a name")
    return new


def _prefix(source: Checkpoint, key: str) -> str:
    names = source.manifest.tensors
    return f"{key}." if any(t.name.startswith(f"{key}.") for t in names) else ""


def _of_key(source: Checkpoint, key: str) -> list[tuple[str, int, TensorEntry]]:
    """(name without the key, number, entry) of a key's weights; of all weights if names have no keys."""
    tensors = list(enumerate(source.manifest.tensors))
    prefix = _prefix(source, key)
    keys = sorted({t.name.split(".", 1)[0] for _, t in tensors if t.state in WEIGHT_KINDS})
    if not prefix and keys:
        raise UsageError(
            f"no weights under {key!r}; there are some under {', '.join(keys)}",
            hint=did_you_mean(key, keys) or "say which with --key",
        )
    chosen = [(i, t) for i, t in tensors if t.name.startswith(prefix)]
    typed = [(i, t) for i, t in chosen if t.state in WEIGHT_KINDS]
    found = typed or [(i, t) for i, t in chosen if t.state == "tensor"]
    if not found:
        raise UsageError(f"{source.store.url} holds no weights")
    return [(t.name.removeprefix(prefix), i, t) for i, t in found]


def _check_names(new: dict[str, str]) -> None:
    taken: dict[str, str] = {}
    for old, name in new.items():
        if name in taken:
            raise UsageError(f"{taken[name]!r} and {old!r} would both be named {name!r}")
        taken[name] = old


def is_float(dtype: str) -> bool:
    """True if a dtype is a real floating one."""
    return dtype.startswith(("float", "bfloat"))


def _cast(t: TensorEntry, dtype: str | None) -> str:
    if dtype is None or not is_float(t.dtype):
        return t.dtype
    if not is_float(dtype):
        raise UsageError(f"dtype {dtype}: weights are cast among floating types only")
    numpy_dtype(dtype)
    return dtype
