"""Finding the format of a checkpoint, by a prefix (`dcp:PATH`) or by its files."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.base.errors import FormatError, NotFound, UsageError
from holdfast.base.suggest import did_you_mean
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.lone import LoneStep, root_at
from holdfast.core.checkpoint.names import STEP, step_numbers
from holdfast.core.store import SCHEMES, LocalStore, Store, read_range, split_prefix
from holdfast.core.store.oserrors import obstacle
from holdfast.formats.read.folder import MARK, ListedFolder, OneFile, open_place, top
from holdfast.formats.read.unpickle import understood

if TYPE_CHECKING:
    from holdfast.core.checkpoint.opened import Checkpoint


@dataclass(frozen=True, slots=True)
class Format:
    """A foreign format: how it is recognised, opened, and its steps listed."""

    is_there: Callable[[Store], bool]
    """True if a folder is certainly of this format; for paths without a prefix."""
    open: Callable[[Store, int | None], Checkpoint]
    """Open a step; None for the newest.  NotFound if there is no such step."""
    steps: Callable[[Store], list[int]] | None = None
    """Return the steps, ascending.  None: there is one, which `open` gives."""
    if_named: Callable[[Store], bool] | None = None
    """True if a folder may be of this format; for paths with the prefix.  None: use `is_there`."""
    of_files: bool = False
    """True if a single file can be a checkpoint of this format."""


def _of(module: str, function: str) -> Callable[..., Any]:
    """A function of a reader, which is imported when the function is called."""

    def call(*args: Any) -> Any:
        found = importlib.import_module(f"holdfast.formats.read.{module}")
        return getattr(found, function)(*args)

    return call


_NAMES_A_STEP = b'{"holdfast":'
"""The beginning of a file that the integration of Lightning writes at a path (`lightning_pointers`)."""
_MOST_NAME_BYTES = 1 << 20

SOURCE_FORMATS = {
    "megatron": Format(
        _of("megatron.opening", "is_megatron"),
        _of("megatron.opening", "open_megatron"),
        _of("megatron.opening", "steps_of_megatron"),
    ),
    "dcp": Format(_of("dcp", "is_dcp"), _of("dcp", "open_dcp")),
    "deepspeed": Format(
        _of("deepspeed.tags", "is_deepspeed"),
        _of("deepspeed.opening", "open_deepspeed"),
        _of("deepspeed.opening", "steps_deepspeed"),
        _of("deepspeed.tags", "may_be_deepspeed"),
    ),
    "huggingface": Format(
        _of("huggingface", "is_huggingface"),
        _of("huggingface", "open_huggingface"),
        lambda _: [0],
        _of("huggingface", "holds_safetensors"),
        of_files=True,
    ),
    "torch_checkpointing": Format(
        # import the reader only if its marker file exists
        lambda store: (
            "metadata.pkl" in top(store)
            and _of("torch_checkpointing", "is_torch_checkpointing")(store)
        ),
        _of("torch_checkpointing", "open_torch_checkpointing"),
        if_named=_of("torch_checkpointing", "may_be_torch_checkpointing"),
    ),
    "torch": Format(
        _of("torchfiles", "is_torch"),
        _of("torchsave", "open_torch"),
        if_named=_of("torchfiles", "holds_torch"),
        of_files=True,
    ),
}
"""Foreign formats by prefix, in the order of detection."""


def detect(url: str | os.PathLike[str]) -> str | None:
    """The foreign format by the prefix or the files of a path; None for holdfast's own, or if there is
    none.

    A root with holdfast's steps is holdfast's, whatever other files it has, and so is a step's folder.
    """
    prefix, path = split_format(os.fspath(url))
    if not prefix and _has_own_steps(path):
        return None
    store = open_place(path)
    if isinstance(store, ListedFolder) and MARK in store.sizes():
        raise FormatError(
            f"{store.url} holds a conversion that is not complete",
            key=MARK,
            hint="convert again with the same arguments: it goes on",
        )
    if isinstance(store, OneFile) and isinstance(store.inner, LocalStore):
        _refuse_name_of_step(store, store.inner.root)
    if prefix:
        if not _may_be(prefix, store):
            raise NotFound(f"no {prefix} checkpoint in {store.url}", hint=_instead(path, store))
        return prefix
    found = next((name for name in SOURCE_FORMATS if _is(name, store)), None)
    if isinstance(store, OneFile):
        if found is None:
            what = f"{store.url} is a file of no format that holdfast knows"
            raise NotFound(what, hint=near_path(path))
        return found
    return None if found is None or step_numbers(store) else found


def _refuse_name_of_step(store: OneFile, folder: str) -> None:
    """UsageError for the small file that stands at a path of Lightning's and names a step of a root."""
    key, num_bytes = store.name, len(_NAMES_A_STEP)
    if not 0 < store.size(key) - num_bytes < _MOST_NAME_BYTES:
        return
    if read_range(store, key, 0, num_bytes) != _NAMES_A_STEP:
        return
    try:
        said = decode_json(store.get(key), dict[str, Any])
    except msgspec.DecodeError as error:
        what = (
            f"{store.url} begins like a path of Lightning's or a manifest, and is damaged: {error}"
        )
        raise FormatError(what, key=key) from None
    root, step = said.get("root"), said.get("step")
    if not isinstance(root, str):
        return  # the manifest of a step, which begins alike
    if "://" not in root:
        root = os.path.normpath(os.path.join(folder, root))
    raise UsageError(
        f"{store.url} has no tensors: it is a path of Lightning's, and names step {step} of {root}",
        hint=f"give {root}@{step}, here and to every command",
    )


def _has_own_steps(path: str) -> bool:
    """True for the folder of a step by itself, and for a root with steps; of a root, which may be large,
    only `steps/` is listed, and of a local one no further than to its first step."""
    store = root_at(path)
    if isinstance(store, LoneStep):
        return True
    if not isinstance(store, LocalStore):
        return bool(step_numbers(store))
    steps = os.path.join(store.root, "steps")
    with suppress(OSError), os.scandir(steps) as found:
        return any(
            re.fullmatch(STEP, one.name) and os.path.isfile(f"{one.path}/manifest.json")
            for one in found
        )
    return False


def _is(name: str, store: Store) -> bool:
    format = SOURCE_FORMATS[name]
    return (format.of_files or not isinstance(store, OneFile)) and format.is_there(store)


def _may_be(name: str, store: Store) -> bool:
    loose = SOURCE_FORMATS[name].if_named
    return _is(name, store) or (loose is not None and loose(store))


def _instead(path: str, store: Store) -> str | None:
    """A hint in words: another format, or another path."""
    found = [name for name in SOURCE_FORMATS if _may_be(name, store)]
    if found:
        return f"what is there looks like {' or '.join(found)}"
    if not isinstance(store, OneFile) and step_numbers(store):
        return "there are steps of holdfast: leave the prefix out"
    return near_path(path) or (None if top(store) else "there are no files")


def near_path(path: str) -> str | None:
    """A hint for a path without a checkpoint: a near miss, the root that the path leads into, or what lies
    below it."""
    store = open_place(path)
    folder = store.inner if isinstance(store, OneFile) else store
    if not isinstance(folder, LocalStore):
        return None if store.list() else "there are no files"
    place = os.path.join(folder.root, store.name) if isinstance(store, OneFile) else folder.root
    if os.path.exists(place):
        from holdfast.formats.read.below import below_hint

        return _root_above(place) or below_hint(path)
    in_the_way = obstacle(place, folder=True)
    if in_the_way is not None:
        return in_the_way[0]
    above, name = os.path.split(place)
    try:
        beside = os.listdir(above)
    except OSError:
        return f"there is no {above}"
    root, at, step = name.rpartition("@")
    if at and step.isdecimal() and root in beside:
        return f"there is no {place}; for step {step} of {root!r} give the step by itself"
    hint = did_you_mean(name, [n for n in beside if not n.startswith(".")])
    return f"there is no {place}" + (f"; {hint}" if hint else "")


def _root_above(place: str) -> str | None:
    """A hint with the root, and the step, that a path leads into; None if there is none."""
    found = re.fullmatch(rf"(.+)/steps(?:/{STEP}(?:/.*)?)?", place)
    if found is None or not step_numbers(LocalStore(found[1])):
        return None
    of_step = f", and step {int(found[2])} by itself" if found[2] else ""
    return f"it lies in a root: give {found[1]}{of_step}"


def open_as(name: str, url: str | os.PathLike[str], step: int | None = None) -> Checkpoint:
    """Open a checkpoint of the format `name`.  NotFound if there is no step `step`."""
    store = open_place(split_format(os.fspath(url))[1])
    with understood(name, store.url):
        found = SOURCE_FORMATS[name].open(store, step)
    found.format = name
    return found


def steps_as(name: str, url: str | os.PathLike[str]) -> list[int]:
    """The steps of a checkpoint of the format `name`, ascending."""
    store, format = open_place(split_format(os.fspath(url))[1]), SOURCE_FORMATS[name]
    with understood(name, store.url):
        return format.steps(store) if format.steps else [format.open(store, None).step]


def split_format(text: str) -> tuple[str, str]:
    """Split into (prefix, or "" for a path or URL; path).  UsageError for an unknown format, or one without
    a path."""
    parts = split_prefix(text)
    if parts is None:
        return "", text
    prefix, rest = parts
    if prefix not in SOURCE_FORMATS:
        raise UsageError(f"unknown format {prefix!r} in {text!r}", hint=_colon(prefix, rest, text))
    if not rest:
        raise UsageError(f"{text!r} names a format and no path", hint=f"{prefix}:PATH")
    return prefix, rest


def _colon(prefix: str, rest: str, text: str) -> str:
    """A hint for a text before a colon that is no format."""
    found = [f"for a path, write {os.path.join('.', text)!r}"]
    if prefix in SCHEMES and rest.startswith("/"):
        found = [f"for a URL, write '{prefix}://{rest.lstrip('/')}'", *found]
    known = did_you_mean(prefix, SOURCE_FORMATS)
    return "; ".join([known, *found] if known else found)
