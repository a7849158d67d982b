"""Finding the files of a DeepSpeed checkpoint by their names.

`save_checkpoint(DIR)` makes `DIR/<tag>/` and names the newest tag in `DIR/latest`:

    latest                                              global_step10
    global_step10/mp_rank_00_model_states.pt            weights, buffers, counters, what the user added
    global_step10/zero_pp_rank_1_mp_rank_00_optim_states.pt     rank 1's part of the optimizer
    global_step10_universal/zero/<parameter>/fp32.pt    what ds_to_universal makes of them

`pp_rank` there is the rank in the data-parallel group, `mp_rank` that of the model-parallel one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from holdfast.base.errors import FormatError, NotFound, StoreError
from holdfast.base.text import listed
from holdfast.core.store import Store
from holdfast.formats.read.folder import last_name

_LATEST = ("latest", "latest_universal")
_MAX_TAG_BYTES = 4096

_NUMBERED = {
    "model": re.compile(r"()mp_rank_(\d+)_model_states\.pt"),
    "stage_3": re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt"),
    "optim": re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"),
    "layers": re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt"),
    "experts": re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt"),
    "expert_optim": re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"),
}
"""Patterns of file names by content; groups are the numbers of a part, 0 if not stated."""
_STATE = re.compile(r"zero/(.+)/([^/]+)\.pt")
_STEP = re.compile(r"global_step(\d+)(?:_universal)?")
_FIRST = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")

_At = tuple[int, int]
"""(rank in the data-parallel group, rank in the model-parallel group)"""


@dataclass
class TagFiles:
    """The keys of one tag's files, by content."""

    model: dict[_At, str] = field(default_factory=dict)
    optim: dict[_At, str] = field(default_factory=dict)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    """Files of pipeline layers, by (layer, tensor-parallel rank)."""
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    """Files of experts, by (MoE layer, expert, model-parallel rank)."""
    expert_optim: dict[_At, str] = field(default_factory=dict)
    """Files of experts' optimizers, by (expert-parallel rank, model-parallel rank)."""
    universal: dict[str, dict[str, str]] = field(default_factory=dict)
    """Files of the universal format, by parameter, then state."""


def tag_files(store: Store, folder: str) -> TagFiles:
    """The files of a tag.  FormatError if two claim the same part."""
    found: dict[str, dict[tuple[int, ...], str]] = {kind: {} for kind in _NUMBERED}
    universal: dict[str, dict[str, str]] = {}
    for key in store.list(folder):
        name = key[len(folder) :]
        if match := _STATE.fullmatch(name):
            universal.setdefault(match[1], {})[match[2]] = key
        for kind, pattern in _NUMBERED.items():
            if match := pattern.fullmatch(name):
                part = tuple(int(number or 0) for number in match.groups())
                if found[kind].setdefault(part, key) != key:
                    raise _twice(found[kind][part], key)
    stage_3, model = found.pop("stage_3"), found["model"]
    if model and stage_3 and not universal:  # each stage reads its own
        raise _twice(model[min(model)], stage_3[min(stage_3)])
    found["model"] = model or stage_3
    return TagFiles(**found, universal=universal)  # type: ignore[arg-type]


def _twice(one: str, other: str) -> FormatError:
    return FormatError(
        f"{one} and {other} are the same part of the checkpoint twice",
        hint="one is of an older save into the same folder: move it away",
    )


def is_deepspeed(store: Store) -> bool:
    """True if a directory is a DeepSpeed checkpoint, or the folder of one of its tags."""
    return _is_tag(store, "") or any(
        tag is not None and (_is_tag(store, f"{tag}/") or _STEP.fullmatch(tag))
        for tag in (_named(store, marker) for marker in _LATEST)
    )


def may_be_deepspeed(store: Store) -> bool:
    """True if `is_deepspeed`, or if there are tags without a marker; for a path with the prefix."""
    return is_deepspeed(store) or bool(folders(store))


def _is_tag(store: Store, folder: str) -> bool:
    return any(_size(store, folder + name) for name in _FIRST)


def _size(store: Store, key: str) -> int:
    try:
        return store.size(key)
    except StoreError:
        return 0


def _named(store: Store, marker: str) -> str | None:
    """The tag in a marker file; None if it is no marker."""
    try:
        if not 0 < _size(store, marker) <= _MAX_TAG_BYTES:
            return None
        tag = store.get(marker).decode().strip()
    except (StoreError, UnicodeDecodeError):
        return None
    return tag if tag and "/" not in tag and tag not in (".", "..") and tag.isprintable() else None


def marked_folder(store: Store) -> str | None:
    """The folder of the tag that the marker names, `""` for a tag's own folder; None if there is none."""
    if _is_tag(store, ""):
        return ""
    tag = next((t for marker in _LATEST if (t := _named(store, marker)) is not None), None)
    return f"{tag}/" if tag is not None and _is_tag(store, f"{tag}/") else None


def latest(store: Store) -> str:
    """The folder of the newest tag.  NotFound without a marker, or if the folder is missing."""
    found = marked_folder(store)
    if found is None:
        tags = [t for marker in _LATEST if (t := _named(store, marker)) is not None]
        what = f"{tags[0]!r}, which its marker names" if tags else "that a file 'latest' would name"
        there = listed((f.rstrip("/") for f in folders(store)), 8)
        raise NotFound(
            f"{store.url} has no checkpoint {what}",
            hint=f"give the folder as the path: {there}" if there else "was it copied whole?",
        )
    return found


def folders(store: Store) -> list[str]:
    """The folders of all tags."""
    if _is_tag(store, ""):
        return [""]
    tops = {key.partition("/")[0] for key in store.list() if "/" in key}
    return [f"{top}/" for top in sorted(tops) if _is_tag(store, f"{top}/")]


def step_of_tag(store: Store, folder: str) -> int | None:
    """The step that a tag's name tells."""
    name = folder.rstrip("/") or last_name(store.url)
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None
