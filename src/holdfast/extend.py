"""The door for what extends holdfast: trainers, frameworks, stores and formats of your own.

It is all that such code needs beside the names that users have (`holdfast.Checkpointer`, `holdfast.errors`,
`holdfast.store`, `holdfast.sources`, ...); `holdfast.integrations` uses nothing else.  What is behind the
door may change with every release, and the door does not: a name that goes, or means another thing, is a
change that the CHANGELOG tells.

    a trainer       is a loop of somebody else's, which says when to save, and under which name
                    of a run        notes_of  notices_of  stop_if_told  go_on_from  gradients_text
                    of its weights  unwrap  writes_to  wait_for_copies
                    of its data     data_of  tell_other_data  order_of  put_order  samplers_of
                    of a root       check_root  saved_in  run_at_work  newest_where  labels_of  pin  unpin
                                    check_metrics  read_files  TOP_NAMES
                    of an engine    check_engine  engine_counters  put_engine_counters
                    of arguments    path_of  step_of  unfit
    a framework     keeps values elsewhere than in the parameters: `holdfast.sources`
    a store         keeps bytes by key: `holdfast.store`, and `holdfast.testing.StoreTests`
    a format        is read, or saved by a plan of its own
                    of steps        PlannedSaves  Part  PreparedPart  read_into  values_in  StateDictNames
                    of plain values encode  decode  inline_tensor  decode_torch  referred  torch_dtype
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from holdfast.base.arguments import path_of, step_of, unfit
from holdfast.base.errors import Corrupt, FormatError, warn_user
from holdfast.base.notices import Notices
from holdfast.base.patience import bounded
from holdfast.core.checkpoint.claiming import newest_claim
from holdfast.core.checkpoint.consolidating import keep_extras
from holdfast.core.checkpoint.names import TOP_NAMES, Saved, committed, manifest_key, read_head
from holdfast.core.checkpoint.notes import pin as pin_in
from holdfast.core.checkpoint.notes import read_notes, values_of
from holdfast.core.checkpoint.notes import unpin as unpin_in
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.reading import read_alone
from holdfast.core.checkpoint.rows import Want
from holdfast.core.checkpoint.unproved import tell_passed_over
from holdfast.core.format.extras import decode, encode, referred
from holdfast.core.layout import Box
from holdfast.core.store import open_store, split_prefix
from holdfast.formats.looking import open as open_step
from holdfast.formats.read.dcpnames import StateDictNames
from holdfast.live.roots import require_native_root
from holdfast.live.saving.attaching import FileSource, attached
from holdfast.live.state.encoding import inline_tensor, outline_tensor
from holdfast.live.state.gradients import gradients_text
from holdfast.live.state.modules import named_buffers, named_parameters, unwrap
from holdfast.live.state.orders import data_of, order_of, put_order, samplers_of, tell_other_data
from holdfast.live.state.placed import torch_dtype
from holdfast.live.state.window import wait_for_copies
from holdfast.live.state.writes import count_and_address
from holdfast.session.checkpointer import Checkpointer
from holdfast.session.planned import Part, PlannedSaves, PreparedPart

if TYPE_CHECKING:
    from holdfast.live.saving.noting import Noting

__all__ = [
    "Part",
    "PlannedSaves",
    "PreparedPart",
    "StateDictNames",
    "TOP_NAMES",
    "check_engine",
    "check_metrics",
    "check_root",
    "data_of",
    "decode",
    "decode_torch",
    "encode",
    "engine_counters",
    "go_on_from",
    "gradients_text",
    "inline_tensor",
    "labels_of",
    "newest_where",
    "notes_of",
    "notices_of",
    "order_of",
    "path_of",
    "pin",
    "put_engine_counters",
    "put_order",
    "read_files",
    "read_into",
    "referred",
    "run_at_work",
    "samplers_of",
    "saved_in",
    "step_of",
    "stop_if_told",
    "tell_other_data",
    "torch_dtype",
    "unfit",
    "unpin",
    "unwrap",
    "values_in",
    "wait_for_copies",
    "writes_to",
]


# -- trainers: a run --------------------------------------------------------------------------------


def notes_of(checkpointer: Checkpointer) -> Noting:
    """What `pin`, `unpin` and `metrics` of a Checkpointer do, but failures are raised, and not reported:
    `pin(step, label)`, `unpin(label)`, `measure(step, values)`.  Each is collective."""
    return checkpointer._noting()


def notices_of(checkpointer: Checkpointer) -> Notices:
    """What a Checkpointer tells its user at the end of a call: `once(notice, text)` adds a notice, unless
    it was told, and `was_given(notice)` notes that the trainer has told it."""
    return checkpointer._notices


def stop_if_told(checkpointer: Checkpointer, step: int) -> None:
    """Save `step` and raise SystemExit(143) on all ranks if SIGTERM has come to any, with `sigterm_s`.  For
    trainers that do not call `Checkpointer.step` at each step.  Collective."""
    stop = checkpointer._stop
    if stop is not None and stop.was_told():
        checkpointer._save_and_stop(step, stop)


def go_on_from(checkpointer: Checkpointer, step: int) -> None:
    """Say that training goes on from a step that something else than `Checkpointer.restore` has loaded:
    what is saved from here on is newer than all that is there.  Collective; blocks."""
    checkpointer._restart("load").leave_behind(step)


# -- trainers: weights ------------------------------------------------------------------------------


def writes_to(module: nn.Module) -> list[tuple[int, int]]:
    """A value that is equal to what it was only while nobody has written to a module's weights."""
    found = [*named_parameters(module), *named_buffers(module)]
    return [count_and_address(tensor) for _, tensor in found]


# -- trainers: what lies in a root ------------------------------------------------------------------


def check_root(root: str, *, foreign: bool = False) -> None:
    """UsageError for an address that cannot be opened, or one of a checkpoint of others (`dcp:PATH`) unless
    that will do.  Touches nothing."""
    if not foreign:
        require_native_root(root)
    elif split_prefix(root) is None:
        open_store(root)


def saved_in(root: str, step: int) -> Saved | None:
    """The run that has saved a step of a root (`run`), and whether that is known (`is_proved`); None if
    there is no such step.  HoldfastError where nothing can be told now."""
    return read_head(open_store(root), step, manifest_key(step))


def run_at_work(root: str) -> int | None:
    """The number of the newest run that has taken a root; None if none has."""
    claim = newest_claim(open_store(root))
    return None if claim is None else claim.run


def newest_where(
    root: str, fits: Callable[[int, int, dict[str, Any]], bool]
) -> tuple[int, dict[str, Any]] | None:
    """The newest durable step of a root of which `fits(run, step, plain values)` is true, and its plain
    values; None if there is none.  What cannot be read is passed over, and told; if nothing else fits, it
    is raised."""
    saved = bounded(lambda: committed(open_store(root)), "look at", root)
    fault = None
    for one in reversed(saved):
        try:
            extras = open_step(root, step=one.step).extras
        except (Corrupt, FormatError) as error:
            fault = error
            warn_user(f"{root}: step {one.step} is passed over: {error.message}")
            continue
        if fits(one.run, one.step, extras):
            tell_passed_over(root, saved, one.step)
            return one.step, extras
    if fault is not None:
        raise fault
    return None


def labels_of(root: str) -> dict[str, int]:
    """The labels that keep steps of a root, and the steps."""
    return read_notes(open_store(root)).live_labels


def pin(root: str, step: int, label: str) -> None:
    """Let a label name a committed step of a root.  NotFound if there is none."""
    pin_in(open_store(root), step, label)


def unpin(root: str, label: str) -> None:
    """Take a label away from a root that no Checkpointer of this process holds.  On one rank."""
    unpin_in(open_store(root), label)


def check_metrics(metrics: Mapping[str, float], call: str) -> None:
    """UsageError for metrics that a step cannot have."""
    values_of(metrics, call)


def read_files(
    files: Mapping[str, FileSource], call: str, complain: Callable[[BaseException], object]
) -> dict[str, bytes]:
    """The contents of files as `Checkpointer(files=)` takes them.  `complain` is called with the error of
    each that cannot be read, and is left out.  On the first rank."""
    found = attached(files, None, None, call, complain, reads=True)
    return {} if found is None else found.contents


# -- trainers: engines ------------------------------------------------------------------------------


def check_engine(engine: Any, call: str) -> None:
    """UsageError for what is no engine of DeepSpeed's, or one of which not everything can be saved."""
    from holdfast.live.state.deepspeed import is_engine, zero_of

    if not is_engine(engine):
        raise unfit(call, "engine", engine, "an engine of deepspeed.initialize()")
    zero_of(engine)


def engine_counters(engine: Any) -> dict[str, int]:
    """The counters of an engine of DeepSpeed's: of steps, samples, batches."""
    from holdfast.live.state.deepspeed import COUNTERS

    return {name: getattr(engine, name) for name in COUNTERS}


def put_engine_counters(engine: Any, saved: Mapping[str, int]) -> None:
    """Put such counters back, those that were saved, at the beginning of a batch."""
    from holdfast.live.state.deepspeed import put_counters

    put_counters(engine, saved)


# -- formats ----------------------------------------------------------------------------------------


def read_into(saved: Checkpoint, parts: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
    """Read boxes of a step's tensors into tensors of their shapes, of any dtype and device.  Verified;
    blocks."""
    from holdfast.live.restore.targets import target_of

    wants = []
    for name, box, tensor in parts:
        if box.size:
            number = saved.index(name)
            dtype = saved.manifest.tensors[number].dtype
            wants.append(Want(number, box, target_of(tensor.detach(), dtype, name)))
    read_alone(saved.images, wants)


def values_in(saved: Checkpoint) -> dict[str, Any]:
    """The JSON trees of a step's values that are no tensors, by key; those of single ranks are left out."""
    trees, _ = keep_extras(saved)
    return trees


def decode_torch(tag: str, body: Any, on_other: Callable[[str, Any], Any]) -> Any:
    """Undo what steps hold of torch's own values: small tensors, dtypes, quantised tensors, objects.  For
    the `on_other` of `decode`, which is asked for what is inside.  FormatError for any other tag."""
    match tag:
        case "$tensor":
            return outline_tensor(body)
        case "$dtype":
            return torch_dtype(body)
        case "$object":
            return decode(body, on_other)
        case "$quantized":
            from holdfast.live.state.quantised import quantised

            return quantised(decode(body, on_other))
    raise FormatError(f"malformed extras: unknown tag {tag!r}")
