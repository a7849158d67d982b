"""The door for what extends holdfast: trainers, frameworks, stores and formats of your own.

Such code needs this module and the names that users have (`holdfast.Checkpointer`, `holdfast.errors`,
`holdfast.store`, `holdfast.sources`, ...); `holdfast.integrations` uses nothing else.  Everything else may
change with every release.  If a name here goes or changes its meaning, the CHANGELOG says so.

    a trainer       is another library's training loop, which decides when to save, and under which name
                    of a run        notes_of  notices_of  stop_if_told  go_on_from  gradients_text
                    of its weights  unwrap  writes_to  wait_for_copies
                    of its data     data_of  tell_other_data  order_of  put_order  samplers_of
                    of a root       check_root  saved_in  run_at_work  newest_where  labels_of  give_label
                                    check_metrics  read_files  TOP_NAMES
                    of an engine    check_engine  engine_counters  put_engine_counters
                    of arguments    path_of  step_of  unfit
    a framework     keeps values outside of the parameters: `holdfast.sources`
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

from holdfast.base.arguments import function_of, path_of, step_of, unfit
from holdfast.base.errors import Corrupt, FormatError, warn_user
from holdfast.base.notices import Notices
from holdfast.base.storage_deadlines import bounded
from holdfast.core.checkpoint.claiming import newest_claim
from holdfast.core.checkpoint.consolidating import keep_extras
from holdfast.core.checkpoint.names import TOP_NAMES, Saved, committed, manifest_key, read_head
from holdfast.core.checkpoint.notes import label_of, metrics_of, pin, read_notes, unpin
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.reading import read_alone
from holdfast.core.checkpoint.rows import Want
from holdfast.core.checkpoint.unproved import tell_passed_over
from holdfast.core.format.extras import decode, encode, referred
from holdfast.core.layout import Box
from holdfast.core.store import Store, open_store, split_prefix
from holdfast.formats.looking import open as open_step
from holdfast.formats.read.dcpnames import StateDictNames
from holdfast.live.restore.targets import target_of
from holdfast.live.roots import require_native_root
from holdfast.live.saving.attaching import FileSource, attached
from holdfast.live.state.data_order import (
    data_of,
    order_of,
    put_order,
    samplers_of,
    tell_other_data,
)
from holdfast.live.state.deepspeed import COUNTERS, is_engine, put_counters, zero_of
from holdfast.live.state.encoding import inline_tensor, outline_tensor
from holdfast.live.state.gradients import gradients_text
from holdfast.live.state.modules import named_buffers, named_parameters, unwrap
from holdfast.live.state.placed import torch_dtype
from holdfast.live.state.quantised import quantised
from holdfast.live.state.window import wait_for_copies
from holdfast.live.state.writes import count_and_address
from holdfast.session.checkpointer import Checkpointer
from holdfast.session.planned_saves import Part, PlannedSaves, PreparedPart

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
    "give_label",
    "go_on_from",
    "gradients_text",
    "inline_tensor",
    "labels_of",
    "newest_where",
    "notes_of",
    "notices_of",
    "order_of",
    "path_of",
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
    "unwrap",
    "values_in",
    "wait_for_copies",
    "writes_to",
]


# -- trainers: a run --------------------------------------------------------------------------------


def notes_of(checkpointer: Checkpointer) -> Noting:
    """Return the notes of a Checkpointer: `pin(step, label)`, `unpin(label)`, `measure(step, values)`.
    Unlike the Checkpointer's own methods, they raise failures instead of reporting them.  Each is
    collective."""
    return checkpointer._noting()


def notices_of(checkpointer: Checkpointer) -> Notices:
    """Return the notices that a Checkpointer prints at the end of a call: `once(notice, text)` adds a
    notice unless it was printed before; `was_given(notice)` notes that the trainer has printed it."""
    return checkpointer._notices


def stop_if_told(checkpointer: Checkpointer, step: int) -> None:
    """If any rank got SIGTERM, save `step` and raise SystemExit(143) on all ranks; nothing without
    `sigterm_s`.  For trainers that do not call `Checkpointer.step` at each step.  Collective; blocks."""
    step, stop = step_of(step, "stop_if_told"), checkpointer._stop
    if stop is not None and stop.was_told():
        checkpointer._save_and_stop(step, stop)


def go_on_from(checkpointer: Checkpointer, step: int) -> None:
    """Say that training goes on from a step that was not loaded by `Checkpointer.restore`: all later saves
    are newer than every step in the root.  Collective; blocks."""
    checkpointer._restart("load").leave_behind(step_of(step, "go_on_from"))


# -- trainers: weights ------------------------------------------------------------------------------


def writes_to(module: nn.Module) -> list[tuple[int, int]]:
    """Return the version counter and the address of each parameter and buffer of a module: the list
    changes with every write to one, except through `.data` or numpy."""
    tensors = [*named_parameters(module), *named_buffers(module)]
    return [count_and_address(tensor) for _, tensor in tensors]


# -- trainers: what lies in a root ------------------------------------------------------------------


def check_root(root: str, *, foreign: bool = False) -> None:
    """UsageError for an address that cannot be opened, and unless `foreign`, for one of a foreign
    checkpoint (`dcp:PATH`).  Changes nothing."""
    root = path_of(root, "check_root", "root")
    if not foreign:
        require_native_root(root)
    elif split_prefix(root) is None:
        open_store(root)


def saved_in(root: str, step: int) -> Saved | None:
    """Return the run that saved a step (`run`), and whether that is known (`is_proved`); None if there is
    no such step.  HoldfastError if the root cannot be read now."""
    step = step_of(step, "saved_in")
    return read_head(_store_of(root, "saved_in"), step, manifest_key(step))


def run_at_work(root: str) -> int | None:
    """Return the number of the newest run that has claimed a root; None if none has."""
    claim = newest_claim(_store_of(root, "run_at_work"))
    return None if claim is None else claim.run


def newest_where(
    root: str, fits: Callable[[int, int, dict[str, Any]], bool]
) -> tuple[int, dict[str, Any]] | None:
    """Return the newest durable step for which `fits(run, step, plain values)` is true, and its plain
    values; None if there is none.  Damaged steps are skipped with a warning; if no step fits, their error
    is raised."""
    function_of(fits, "newest_where", "fits", "of a run, a step and its plain values", 3)
    store = _store_of(root, "newest_where")
    saved = bounded(lambda: committed(store), "look at", root)
    fault = None
    for candidate in reversed(saved):
        step = candidate.step
        try:
            extras = open_step(root, step=step).extras
        except (Corrupt, FormatError) as error:
            fault = error
            warn_user(f"{root}: step {step} is passed over: {error.message}")
            continue
        if fits(candidate.run, step, extras):
            tell_passed_over(root, saved, step)
            return step, extras
    if fault is not None:
        raise fault
    return None


def labels_of(root: str) -> dict[str, int]:
    """Return the labels of a root, and the step that each label keeps."""
    return read_notes(_store_of(root, "labels_of")).live_labels


def give_label(root: str, label: str, step: int | None) -> None:
    """Let a label name a committed step of a root that no Checkpointer of this process uses; None takes the
    label away.  On one rank.  NotFound if there is no such step."""
    store, label = _store_of(root, "give_label"), label_of(label, "give_label")
    if step is None:
        unpin(store, label)
    else:
        pin(store, step_of(step, "give_label"), label)


def _store_of(root: str, call: str) -> Store:
    return open_store(path_of(root, call, "root"))


def check_metrics(metrics: Mapping[str, float], call: str) -> None:
    """UsageError unless `metrics` are numbers by name; `call` is named in the error."""
    metrics_of(metrics, call)


def read_files(
    files: Mapping[str, FileSource], call: str, complain: Callable[[BaseException], object]
) -> dict[str, bytes]:
    """Return the contents of files, given as for `Checkpointer(files=)`.  A file that cannot be read is
    left out, and `complain` is called with its error.  On rank 0."""
    found = attached(files, None, None, call, complain, reads=True)
    return {} if found is None else found.contents


# -- trainers: engines ------------------------------------------------------------------------------


def check_engine(engine: Any, call: str) -> None:
    """UsageError unless `engine` is a DeepSpeed engine that can be saved completely."""
    if not is_engine(engine):
        raise unfit(call, "engine", engine, "an engine of deepspeed.initialize()")
    zero_of(engine)


def engine_counters(engine: Any) -> dict[str, int]:
    """Return a DeepSpeed engine's counters of steps, samples and batches."""
    return {name: getattr(engine, name) for name in COUNTERS}


def put_engine_counters(engine: Any, saved: Mapping[str, int]) -> None:
    """Put saved counters back into a DeepSpeed engine, at the beginning of a batch."""
    put_counters(engine, saved)


# -- formats ----------------------------------------------------------------------------------------


def read_into(saved: Checkpoint, parts: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
    """Read boxes of a step's tensors, `(name, box, tensor)`, into tensors of the boxes' shapes, on any
    device; values are cast to their dtypes.  Blocks.  Corrupt for bytes that differ from their digest."""
    wants = []
    for name, box, tensor in parts:
        if box.size:
            number = saved.index(name)
            dtype = saved.manifest.tensors[number].dtype
            wants.append(Want(number, box, target_of(tensor.detach(), dtype, name)))
    read_alone(saved.images, wants)


def values_in(saved: Checkpoint) -> dict[str, Any]:
    """Return the JSON trees of a step's plain values, by key, without values of single ranks."""
    trees, _ = keep_extras(saved)
    return trees


def decode_torch(tag: str, body: Any, on_other: Callable[[str, Any], Any]) -> Any:
    """Decode torch's own values in a step: small tensors, dtypes, quantised tensors, objects.  Call it in
    the `on_other` of `decode`; its own `on_other` decodes inner values.  FormatError for any other tag."""
    match tag:
        case "$tensor":
            return outline_tensor(body)
        case "$dtype":
            return torch_dtype(body)
        case "$object":
            return decode(body, on_other)
        case "$quantized":
            return quantised(decode(body, on_other))
    raise FormatError(f"malformed extras: unknown tag {tag!r}")
