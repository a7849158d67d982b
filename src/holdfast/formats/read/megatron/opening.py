"""Finding and opening Megatron-Core's checkpoints: a root with a marker, or the folder of an iteration."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from holdfast.base.errors import FormatError, NotFound, StoreError
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.names import steps_text
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.store import Store
from holdfast.formats.read.dcp import Contents, read_contents, section_tree
from holdfast.formats.read.folder import last_name
from holdfast.formats.read.foreign import Foreign, foreign
from holdfast.formats.read.megatron.buckets import BY_BUCKET, MEGATRON_MASTER, stored
from holdfast.formats.read.megatron.matching import SAVE_BY_PARAMETER, NotProved, optimizer_tensors
from holdfast.formats.read.megatron.other_state import (
    COMMON,
    ExtrasValues,
    extra_of,
    extra_state,
    grouped,
    groups_of,
    known,
    read_common,
    scaler_of,
    step_tensors,
    steps_of,
)
from holdfast.formats.read.megatron.tensors import (
    MASTERS,
    by_name,
    split_state,
    template,
    unflattened,
    unfused,
)
from holdfast.formats.read.unpickle import UnknownInstance

_MARKER = "latest_checkpointed_iteration.txt"
_KIND = "metadata.json"
_FOLDER = re.compile(r"iter_(\d{7,})")
_SHARD = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
_EXTRA_STATE = "._extra_state"

_Tensors = dict[str, Foreign]


# -- finding --------------------------------------------------------------------------------------


def is_megatron(store: Store) -> bool:
    """True if a directory is a root of Megatron's checkpoints, or the folder of one iteration."""
    return _kind(store, "") is not None or _marked(store) is not None


def _kind(store: Store, folder: str) -> str | None:
    """Return the format of stored tensors from `metadata.json`; None if it states none."""
    try:
        if not 0 < store.size(folder + _KIND) < 1 << 16:
            return None
        found = decode_json(store.get(folder + _KIND), dict[str, Any])
        return str(found["sharded_backend"])
    except (StoreError, ValueError, KeyError, TypeError):
        return None


def _marked(store: Store) -> str | None:
    """The folder that the marker names."""
    try:
        if not 0 < store.size(_MARKER) < 64:
            return None
        text = store.get(_MARKER).decode().strip()
    except (StoreError, UnicodeDecodeError):
        return None
    if text == "release":
        return "release/"
    return f"iter_{int(text):07d}/" if text.isdigit() and text.isascii() else None


def steps_of_megatron(store: Store) -> list[int]:
    """The iterations in a root, ascending."""
    if _kind(store, "") is not None:
        return [open_megatron(store).step]
    keys = (key.split("/") for key in store.list("iter_"))
    found = (_FOLDER.fullmatch(k[0]) for k in keys if len(k) == 2 and k[1] == _KIND)
    return sorted(int(match[1]) for match in found if match)


def open_megatron(store: Store, step: int | None = None) -> Checkpoint:
    """The iteration `step`, or the one that the marker names."""
    if _kind(store, "") is not None:
        opened = _open(store, "", _iteration(last_name(store.url)))
        if step not in (None, opened.step):
            raise NotFound(f"{store.url} holds iteration {opened.step}; it has no step {step}")
        return opened
    folder = _marked(store) if step is None else f"iter_{step:07d}/"
    if folder is None:
        raise NotFound(
            f"{_MARKER} of {store.url} names no iteration",
            hint=f"iterations there: {steps_text(steps_of_megatron(store))}; name one",
        )
    if _kind(store, folder) is None:
        raise NotFound(
            f"no Megatron-Core checkpoint in {store.url}/{folder}; iterations there: "
            f"{steps_text(steps_of_megatron(store))}",
            hint="it needs metadata.json, which is written last; older formats of Megatron-LM "
            "(mp_rank_*) are not read: let Megatron-LM convert them (--ckpt-convert-format torch_dist)",
        )
    return _open(store, folder, _iteration(folder.rstrip("/")))


def _iteration(folder: str) -> int | None:
    match = _FOLDER.fullmatch(folder)
    return int(match[1]) if match else None


# -- opening --------------------------------------------------------------------------------------


def _open(store: Store, folder: str, named: int | None) -> Checkpoint:
    kind = _kind(store, folder)
    if kind != "torch_dist":
        raise FormatError(
            f"its tensors are stored as {kind!r}, not as 'torch_dist'",
            key=folder + _KIND,
            hint="save with --ckpt-format torch_dist",
        )
    common = read_common(store, folder)
    step = _step(common, named, folder)
    contents = read_contents(store, folder, known())
    values = ExtrasValues(store)
    weights, states, saved, refused = _state(store, contents, common)
    tensors, rest = _optimizer(common, saved, weights, None if refused else states, values)
    rest |= _objects(store, contents, values)
    rest |= {
        f"common_{k}" if k in ("model", "optim") else k: values.encode(k, v)
        for k, v in common.items()
        if k != "optimizer"
    }
    rest |= {"optimizer_refused": refused} if refused else {}
    names = {t.name: None for t in tensors}
    opened = foreign(
        store,
        [*tensors, *values.tensors],
        step=step,
        software={"megatron-core": kind},
        extras=rest,
        archives=[*contents.archives, (folder + COMMON, 0, store.size(folder + COMMON))],
        aliases={a: n for a, n in unfused(names).items() if a not in names},
    )
    opened.refused = {"optim": f"{refused}: {SAVE_BY_PARAMETER}"} if refused else {}
    return opened


def _state(
    store: Store, contents: Contents, common: dict[str, Any]
) -> tuple[_Tensors, dict[str, _Tensors], Any, str | None]:
    """Weights, optimizer states, the optimizer's hyper-parameters, and why there are no states."""
    weights, states = _tensors(contents)
    by_bucket = stored(store, contents)
    if by_bucket is None:
        return weights, states, common.get("optimizer"), None
    try:
        found = optimizer_tensors(store, by_bucket.buckets, weights)
    except NotProved as why:
        refused = f"its optimizer is stored in buckets that name no parameters, and {why}"
        return weights, states, by_bucket.saved, refused
    masters = found.pop(MEGATRON_MASTER)
    weights |= {n: t for n, t in masters.items() if t.dtype != weights[n].dtype}
    return weights, found, by_bucket.saved, None


def _step(common: dict[str, Any], named: int | None, folder: str) -> int:
    found = common.get("iteration")
    if isinstance(found, int) and named is not None and found != named:
        raise FormatError(
            f"the folder is named for iteration {named}, but {COMMON} is of iteration {found}",
            key=folder + COMMON,
            hint="files of two checkpoints are mixed",
        )
    return found if isinstance(found, int) else named or 0


def _tensors(contents: Contents) -> tuple[_Tensors, dict[str, _Tensors]]:
    """Weights, and optimizer states by the state's name.  An fp32 master is the weight."""
    found: dict[str | None, list[Foreign]] = {}
    shapes = {t.name: t.shape for t in contents.tensors}
    for t in contents.tensors:
        state, key = split_state(t.name)
        if not BY_BUCKET.match(key):
            one = unflattened(t, shapes.get(key, t.shape))
            found.setdefault(state, []).append(replace(one, name=key, state=state or "param"))
    states = {state: by_name(tensors) for state, tensors in found.items()}
    weights = states.pop(None, {})
    for name in MASTERS:
        weights |= states.pop(name, {})
    return weights, {str(k): v for k, v in states.items()}


def _optimizer(
    common: dict[str, Any],
    saved: Any,
    weights: _Tensors,
    states: dict[str, _Tensors] | None,
    values: ExtrasValues,
) -> tuple[list[Foreign], dict[str, Any]]:
    """All tensors under their names in a checkpoint, and the extras of the optimizer.

    `states`: None if they are not known, so that the optimizer cannot be restored.
    """
    tensors = [replace(t, name=f"model.{n}", state="param") for n, t in weights.items()]
    for state, found in (states or {}).items():
        tensors += [replace(t, name=f"optim.{n}.{state}") for n, t in found.items()]
    rest: dict[str, Any] = {}
    scaler = scaler_of(saved)
    if scaler is not None:
        rest["scaler"] = values.encode("scaler", scaler)
        rest["optim.engine"] = {"grad_scaler": rest["scaler"]}  # where a live optimizer looks
    groups = groups_of(saved)
    if not groups:
        return tensors, rest
    served = {n for found in (states or {}).values() for n in found} or weights.keys()
    shapes = {n: t.shape for n, t in weights.items() if n in served}
    args = common.get("args")
    members = grouped(groups, shapes, args.fields if isinstance(args, UnknownInstance) else {})
    if members is None or states is None:
        rest["optimizer_groups"] = values.encode("optimizer_groups", groups)
        return tensors, rest
    steps = steps_of(saved, groups)
    tensors += step_tensors(steps, list(shapes))
    members = [[*names, *unfused(names)] for names in members]
    return tensors, rest | {"optim": extra_of(values, groups, members, steps)}


def _objects(store: Store, contents: Contents, values: ExtrasValues) -> dict[str, Any]:
    """Return per-rank objects, by shard, and modules' extra states, by name."""
    found: dict[str, Any] = {}
    for name, info in contents.objects.items():
        if BY_BUCKET.match(name):
            continue
        match = _SHARD.fullmatch(name)
        opaque = match is not None and match[1].endswith(_EXTRA_STATE)
        value = extra_state(store, info) if opaque else section_tree(store, info, known())
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if match is None:
            found[name] = values.encode(name, value)
        elif not opaque:
            one = found.setdefault(match[1], {"shape": match[3], "shards": {}})
            one["shards"][match[2]] = values.encode(name, value)
        elif value is not None:
            module, axes = template(match[1])
            at = match[2].split(".")[:axes]
            found.setdefault("extra_states", {})[module.format(*at)] = values.encode(name, value)
    return found
