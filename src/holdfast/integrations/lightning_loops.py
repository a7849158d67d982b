"""The places in Lightning's loop over epochs where a step may be saved, and how training goes on there.

    saved in              on a restart, first
    on_train_batch_end    a due validation, schedulers of metrics, and the end of the epoch, if it was the
                          last batch
    on_validation_end     schedulers of metrics, and the end of the epoch
    on_train_epoch_end    schedulers of metrics

Lightning's own resume goes on with the next batch from any of these places, and does not save metrics,
which schedulers and callbacks need there.  So a step has the metrics, with their sums over the epoch so
far.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from lightning.pytorch.loops import fit_loop, training_epoch_loop
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from holdfast import errors

(_Loop,) = errors.need("lightning", "lightning.pytorch.loops.loop", "_Loop")

Number = list[Any]
"""A tensor of one element: the name of its dtype, and the value."""
_SIZE = "cumulated_batch_size"


class LoopPlace(Enum):
    """The point of Lightning's loop at which a step was saved."""

    BATCH = "the end of a batch, before what is done after it"
    VALIDATION = "the end of a validation"
    BETWEEN = "between two batches, when all was done"
    EPOCH = "the end of an epoch"
    OTHER = "anything else, from where Lightning goes on as ever"


IN_EPOCH = (LoopPlace.BATCH, LoopPlace.VALIDATION, LoopPlace.BETWEEN)


def loop_place(loops: dict[str, Any], *, was_validating: bool) -> LoopPlace:
    """Return the place where a step was saved, from the state of the loop over epochs.

    For a step at the end of a batch, `loops` is changed to a completed batch; otherwise Lightning would
    count the epoch as done if the batch was the last, and go on with the next batch.
    """
    batches, epoch = loops["epoch_loop.batch_progress"], loops["epoch_progress"]["current"]
    batch = batches["current"]
    if not 0 < batch["ready"] == batch["started"] == batch["processed"]:
        return LoopPlace.OTHER
    if batch["completed"] == batch["processed"] - 1:
        for counts in (batch, batches["total"]):
            counts["completed"] += 1
        return LoopPlace.BATCH
    if batch["completed"] != batch["processed"]:
        return LoopPlace.OTHER
    if epoch["processed"] == epoch["started"] - 1:
        if not was_validating:
            return LoopPlace.BETWEEN
        validation = loops["epoch_loop.val_loop.batch_progress"]
        seen = validation["current"]
        has_ended = validation["is_last_batch"] and 0 < seen["ready"] == seen["completed"]
        return LoopPlace.VALIDATION if has_ended else LoopPlace.BATCH  # the whole of it once more
    is_end = epoch["processed"] == epoch["started"] and epoch["completed"] == epoch["processed"] - 1
    return LoopPlace.EPOCH if is_end and batches["is_last_batch"] else LoopPlace.OTHER


def check_private(trainer: Any) -> None:
    """UsageError if this version of Lightning lacks something by which a fit saves, or goes on amid an
    epoch."""
    of, loop, connector = "lightning", trainer.fit_loop, "_logger_connector"
    (metrics, _) = errors.need(of, trainer, connector, "_checkpoint_connector")
    errors.need(of, metrics, "_callback_metrics", "_first_loop_iter")
    errors.need(of, loop, "_combined_loader", "_data_fetcher", "_restart_stage", "_restarting")
    names = "_restart_stage", "_results", "_should_accumulate", "_skip_next_val"
    errors.need(of, loop.epoch_loop, *names)
    errors.need(of, loop.epoch_loop.val_loop, "_has_run")


def go_on(loop: Any, place: LoopPlace) -> str:
    """Make Lightning's loop over epochs, which is about to begin, go on from `place`.  Metrics must be
    restored.

    Return the name of a metric that a scheduler lacks; else ""."""
    if place in IN_EPOCH:
        loop._restart_stage = fit_loop.RestartStage.RESTARTED_MID_EPOCH
        loop.epoch_loop._restart_stage = training_epoch_loop.RestartStage.RESTARTED_ON_LAST
        loop.epoch_loop.val_loop._has_run = False  # by an earlier fit, which ends the epoch at once
        loop._restarting = False  # else it leaves out schedulers of metrics at the end of the epoch
        _finish_batch(loop.epoch_loop, place)
        if loop.epoch_loop.batch_progress.is_last_batch:
            _finish_epoch(loop)
    if place is not LoopPlace.EPOCH:
        return ""
    current, total = loop.epoch_progress.current, loop.epoch_progress.total
    missing = _missing(loop.trainer, current.processed)
    if not missing:
        current.completed = current.processed - 1  # as it is when Lightning asks which epoch it is
        loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    current.completed, total.completed = current.processed, total.processed
    _Loop.restarting.fset(loop, False)  # with max_steps it stays true
    loop.reset_restart_stage()
    return missing


def undo_go_on(loop: Any) -> None:
    """Undo the changes of `go_on` and `Metrics` after a fit."""
    epoch_loop = loop.epoch_loop
    for where, name in (
        (epoch_loop, "advance"),
        (loop, "on_advance_end"),
        (epoch_loop._results, "log"),
    ):
        vars(where).pop(name, None)


def _missing(trainer: Any, num_epochs: int) -> str:
    """Return a metric that a scheduler needs at the end of that epoch, and that was not logged."""
    is_automatic = trainer.lightning_module.automatic_optimization
    plateaus = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and is_automatic]
    due = (c for c in plateaus if c.interval == "epoch" and num_epochs % c.frequency == 0)
    names = (c.monitor for c in due if c.strict)
    return next((name for name in names if name not in trainer.callback_metrics), "")


def _finish_batch(epoch_loop: Any, place: LoopPlace) -> None:
    """Replace the first batch by nothing, so that only what follows a batch is done.  For a step between
    two batches not even that is done again: the loop goes on with the next batch."""

    def advance(data_fetcher: Any) -> None:
        del epoch_loop.advance
        if place is LoopPlace.BATCH:
            epoch_loop.val_loop.restarting = False
        elif place is LoopPlace.VALIDATION:
            epoch_loop._skip_next_val = True
        else:
            epoch_loop.restarting = False
            epoch_loop.advance(data_fetcher)

    epoch_loop.advance = advance


def _finish_epoch(loop: Any) -> None:
    """Let the run go on, with a warning, if the end of this epoch fails: callbacks may need its batches,
    which this run has not seen."""

    def on_advance_end() -> None:
        del loop.on_advance_end
        progress = loop.epoch_progress
        number = progress.current.processed
        try:
            loop.on_advance_end()
        except Exception as error:
            errors.warn_user(
                f"the end of epoch {number} failed in a run that has seen no batch of the epoch; the rest "
                f"of this end is left out: {type(error).__name__}: {error}",
                hint="keep what on_train_epoch_end() needs in a buffer, or save at the ends of epochs",
            )
            for counts in (progress.current, progress.total):
                counts.completed = counts.processed

    loop.on_advance_end = on_advance_end


def misfit_of_sums(saved: dict[str, Any], num_ranks: int) -> str:
    """Say why the sums of a step's metrics are not this rank's, empty if they are.  `saved`: the metrics of
    the step."""
    if saved["ranks"] != num_ranks:
        counts = f"({saved['ranks']} ranks then, {num_ranks} now)"
        return f"each rank's sums fit only the layout that saved them {counts}"
    if num_ranks > 1 and saved.get("of_first"):
        return (
            "the step gives only those of rank 0, because another layout of as many ranks saved it, or an "
            "earlier version of holdfast"
        )
    return ""


class Metrics:
    """The metrics: the values that callbacks see, and the sums over the epoch so far, of this rank."""

    def __init__(self, trainer: Any) -> None:
        self._connector, self._strategy = trainer._logger_connector, trainer.strategy
        self._ranks, self._is_validating = trainer.world_size, trainer.validating
        self._results = trainer.fit_loop.epoch_loop._results

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics as plain values.  Collective where Lightning has to sum over ranks."""
        seen = self._connector.callback_metrics
        names = [name for name, value in seen.items() if _is_number(value)]
        sums = [result for result in self._results.values() if _is_saved(result)]
        tensors = [seen[name] for name in names]
        for result in sums:
            (last,) = errors.need("lightning", result, "_forward_cache")
            tensors += [result.value, last, getattr(result, _SIZE, None)]
        numbers = iter(_numbers(tensors))
        return {
            "ranks": self._ranks,
            "validating": self._is_validating,
            "seen": {name: next(numbers) for name in names},
            "sums": [
                _arguments_of(result)
                | {"value": next(numbers), "last": next(numbers), "size": next(numbers)}
                for result in sums
            ],
        }

    def left_out(self) -> list[str]:
        """Return the names of the metrics whose sums over an epoch are not saved: torchmetrics has them."""
        of_epoch = (one for one in self._results.values() if one.meta.on_epoch)
        return [one.meta.name for one in of_epoch if not one.has_reset and not _is_saved(one)]

    def load_state_dict(self, saved: dict[str, Any], *, has_sums: bool, is_in_epoch: bool) -> None:
        """Put the metrics back; the sums only if the epoch goes on."""
        if is_in_epoch:
            self._connector._first_loop_iter = False  # the first batch of an epoch resets sums
            keys = [self._put_back(dict(one)) for one in saved["sums"] if has_sums]
            _give_way(self._results, set(keys))
        seen = {name: self._tensor(value) for name, value in saved["seen"].items()}
        self._connector._callback_metrics.update(seen)

    def _put_back(self, saved: dict[str, Any]) -> str:
        """Put a sum back, as if it was logged by this run; return its key."""
        value, size, last, sync = (
            saved.pop(name) for name in ("value", "size", "last", "sync_dist")
        )
        of_torch, name = saved.pop("reduced_by")
        key = f"{saved['fx']}.{saved['name']}"
        self._results.pop(key, None)  # of an earlier fit
        self._results.log(
            value=self._tensor(value),
            reduce_fx=getattr(torch if of_torch else builtins, name),
            batch_size=1,
            sync_dist_fn=self._strategy.reduce,
            **saved,
        )
        metric = self._results[key]
        metric.meta.sync.should = sync  # not before: the value is not to be reduced over ranks now
        metric.value, metric._forward_cache = self._tensor(value), last and self._tensor(last)
        if size is not None:
            setattr(metric, _SIZE, self._tensor(size))
        return key

    def _tensor(self, saved: Number) -> torch.Tensor:
        dtype, value = saved
        return torch.tensor(value, dtype=getattr(torch, dtype), device=self._strategy.root_device)


def _give_way(results: Any, keys: set[str]) -> None:
    """Let a metric that is logged with other arguments than in the saved run replace the restored one."""
    log = results.log

    def log_also_anew(fx: str, name: str, *args: Any, **options: Any) -> None:
        try:
            log(fx, name, *args, **options)
        except MisconfigurationException:
            if f"{fx}.{name}" not in keys:
                raise
            keys.remove(f"{fx}.{name}")
            del results[f"{fx}.{name}"]
            log(fx, name, *args, **options)

    results.log = log_also_anew


def _is_saved(result: Any) -> bool:
    plain = (
        result.is_tensor and result.meta.sync.group is None and result.meta.dataloader_idx is None
    )
    return bool(plain and not result.has_reset)


def _arguments_of(result: Any) -> dict[str, Any]:
    """Return the arguments with which `log` was called for this metric."""
    meta, name = result.meta, result.meta.reduce_fx.__name__
    return {
        "fx": meta.fx, "name": meta.name, "prog_bar": meta.prog_bar, "logger": meta.logger,
        "on_step": meta.on_step, "on_epoch": meta.on_epoch, "enable_graph": meta.enable_graph,
        "reduced_by": [meta.reduce_fx is getattr(torch, name), name],
        "sync_dist": bool(meta.sync.should), "rank_zero_only": meta.sync.rank_zero_only,
        "add_dataloader_idx": meta.add_dataloader_idx,
    }  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _numbers(tensors: Sequence[torch.Tensor | None]) -> list[Number | None]:
    """Return tensors of one number each as plain values, by one copy from a device; None for None."""
    found = [t for t in tensors if t is not None]
    at = found[0].device if found else "cpu"
    same = [t.detach().reshape(()).to(at, torch.float64) for t in found]  # exact below 2**53
    values = iter(torch.stack(same).tolist() if same else ())
    return [None if t is None else [str(t.dtype).partition(".")[2], next(values)] for t in tensors]
