"""The paths that Lightning knows: small files, each of which names a step.

    top/epoch=1.ckpt     {"holdfast": 1, "root": "../gpt", "step": 200, "run": 1}

Each path pins its step, in the root, by a label made from the path, so the step stays as long as the path.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import xxhash
from lightning.fabric.utilities.cloud_io import get_filesystem

from holdfast import errors, store
from holdfast.extend import give_label, labels_of, run_at_work, saved_in
from holdfast.integrations.native import run_of

GONE_BACK = "training went back to an earlier step, so what the path named is gone: remove the path"
_MAGIC = b'{"holdfast":'

Pointer: TypeAlias = dict[str, Any]
"""The content of such a file.  `run`: the step's run, because another run may save the step again;
`is_coming`: the step was not committed yet; `callbacks`: callbacks' states, if the path is newer than the
step."""


def write_pointer(path: str, pointer: Pointer) -> None:
    files, root = get_filesystem(path), pointer["root"]
    if "://" in path:
        files.pipe_file(path, json.dumps({"holdfast": 1, **pointer}).encode())
        return
    folder = os.path.realpath(os.path.dirname(path))
    if "://" not in root:
        root = os.path.relpath(root, folder)  # folders may move together
    text = json.dumps({"holdfast": 1, **pointer, "root": root})
    store.LocalStore(folder).put(os.path.basename(path), text.encode())


def newest_native(folders: Iterable[Any]) -> tuple[str, int]:
    """Return the path of Lightning's own checkpoint with the highest `step=` in its name in these folders,
    and that step; ("", -1) if there is none, or if a folder cannot be read.  Called on one rank."""
    found = [("", -1)]
    for folder in folders:
        with suppress(OSError, ValueError):
            files = get_filesystem(folder)
            for path in files.ls(folder, detail=False) if files.isdir(folder) else ():
                at = re.search(r"step=(\d+)", os.path.basename(path))
                if at and str(path).endswith(".ckpt") and _is_native(path):
                    found.append((str(path), int(at[1])))
    return max(found, key=lambda one: one[1])


def _is_native(path: Any) -> bool:
    with suppress(errors.FormatError):  # a damaged pointer
        return read_pointer(path) is None
    return False


def read_pointer(path: Any) -> Pointer | None:
    """Return the pointer in a file; None if there is no file, or it is no pointer.  FormatError."""
    files = get_filesystem(path)
    if not files.isfile(path):
        return None
    with files.open(path, "rb") as file:
        begin = file.read(len(_MAGIC))
        if begin != _MAGIC:
            return None
        text = begin + file.read(1 << 20)
    try:
        pointer: Pointer = json.loads(text)
        pointer |= {"root": str(pointer["root"]), "step": int(pointer["step"])}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"'{path}' should name a step and does not: {type(error).__name__}: {error}"
        raise errors.FormatError(what[:500], hint="remove it, or put it back from a copy") from None
    if "://" not in pointer["root"]:
        folder = os.path.dirname(os.path.realpath(path))
        pointer["root"] = os.path.realpath(os.path.join(folder, pointer["root"]))
    return pointer


def settle_left(folder: Any) -> None:
    """Complete the pointers in a folder that a killed run wrote before their steps were committed.  If the
    step does not exist, the pointer is removed; if that is unknown, it stays."""
    files = get_filesystem(folder or "")
    for found in files.ls(folder, detail=False) if folder and files.isdir(folder) else ():
        path = f"{folder}/{os.path.basename(found)}"
        if os.path.islink(path):
            continue
        try:
            pointer = read_pointer(path)
            if pointer is not None and pointer.pop("is_coming", False):
                _settle(path, pointer)
        except (errors.HoldfastError, OSError) as error:
            errors.warn_user(f"{path}: the step that it names cannot be looked up now: {error}")


def _settle(path: str, pointer: Pointer) -> None:
    step = pointer["step"]
    saved = saved_in(pointer["root"], step)
    if saved is None or (saved.is_proved and saved.run != pointer.get("run", saved.run)):
        unpin_path(pointer["root"], path)
        remove_pointer(path)
    elif saved.is_proved:
        label = f"{label_start(path)}{step}"
        give_label(pointer["root"], label, step)  # the run may have been killed before
        write_pointer(path, {**pointer, "run": saved.run})


def is_last(path: str) -> bool:
    """True if a path stands for the end of a run: if its step is missing, the newest step is taken."""
    return Path(path).stem.startswith("last") or is_of_requeue(path)


def is_of_requeue(path: str) -> bool:
    """True for the path that Lightning saves right before it requeues the job under Slurm."""
    return Path(path).stem.startswith("hpc_ckpt")


def replaced_by(pointer: Pointer | None) -> str:
    """Return a text that says so if another run than the pointer's saved the step in the root; else ""."""
    if pointer is None or "run" not in pointer:
        return ""
    step, run = pointer["step"], run_of(pointer["root"], pointer["step"])
    if run in (None, pointer["run"]):
        return ""
    what = (
        "whose save was not finished; the root has that step of"
        if "is_coming" in pointer
        else "which was saved anew by"
    )
    return f"names step {step} of run {pointer['run']}, {what} run {run}"


def claimed_by(root: str) -> Pointer:
    """Return the `run` entry of a pointer: the run at work in a root; empty if that is unknown."""
    with suppress(errors.HoldfastError):
        run = run_at_work(root)
        return {} if run is None else {"run": run}
    return {}


def remove_pointer(path: str) -> Pointer | None:
    """Remove a pointer file; return its content."""
    pointer, files = read_pointer(path), get_filesystem(path)
    if pointer is not None or os.path.islink(path):
        files.rm_file(path)
    return pointer


def beside(root: str, name: str) -> str:
    """Return a root beside another one; in a bucket that is a root as a whole, the key `name`."""
    path, mark, options = root.partition("?")
    path = path.rstrip("/")
    is_bucket = "://" in path and "/" not in path.partition("://")[2]
    return f"{path}{'/' if is_bucket else '-'}{name}{mark}{options}"


def digest_of(path: str) -> str:
    return xxhash.xxh3_64_hexdigest(path.encode())[:8]


def label_start(path: str) -> str:
    """Return the beginning of the labels of a path's steps; the rest of a label is the step."""
    return f"{ascii(Path(path).stem)[1:-1][-50:]} {digest_of(path)} "


def unpin_path(root: str, path: str, but: Collection[int | None] = ()) -> None:
    """Unpin the steps that a path named, except those in `but`."""
    try:
        for label, step in labels_of(root).items():
            if label.startswith(label_start(path)) and step not in but:
                give_label(root, label, None)
    except errors.HoldfastError as error:
        errors.warn_user(
            f"{path}: the step that it named before stays pinned, so it is not deleted: {error}"
        )
