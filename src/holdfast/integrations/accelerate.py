"""Accelerate: `save_state` and `load_state` of an Accelerator over holdfast.

    accelerator = attach(Accelerator(project_dir="runs/gpt"))

The Accelerator's own hooks run after models and optimizers were written, so the two methods are replaced on
this object.  They save the objects that the Accelerator has prepared and registered, by role and number:
`model`, `model_1`, `optimizer`, `scheduler`, `custom`, `loader` (stateful loaders), and `scaler`.

A loader draws from the default generators when a pass begins (an order, a seed for workers), and for each
batch if the dataset or collator draws.  It fetches one batch ahead of the training, so a step in the middle
of an epoch needs the generators at three moments, which `LoaderDraws` keeps:

    pass begins      batch n + 1 is fetched      step n ends and is saved
       began  ...........  ahead  ................  the Checkpointer's `rng`

After a restore the loader draws its order from `began`, the batch fetched ahead from `ahead`, and training
goes on with `rng`.  If `rng` alone were restored before the loader begins, every later dropout mask would
differ.

Several passes may be under way, and some were ended by `break`: all of them are saved.  A pass goes on if a
loader over the same data skips the batches that were done; a loader that skips nothing begins a new pass.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.state import GradientState
from accelerate.utils import DistributedType, broadcast_object_list
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import IterableDataset

from holdfast import Checkpointer, Keep, Restored, Rng, errors
from holdfast.extend import (
    check_engine,
    decode,
    gradients_text,
    notices_of,
    path_of,
    put_order,
    samplers_of,
    step_of,
    stop_if_told,
    unfit,
)
from holdfast.integrations.accelerate_loaders import (
    PersistentWorkers,
    begin_without_a_draw,
    data_in,
    order_kept,
    put_order_kept,
    tell_of_data,
)
from holdfast.integrations.accelerate_order import had_by, order_of, reordered, tell_order
from holdfast.integrations.native import tell_newer

__all__ = ["attach"]

errors.need("accelerate", GradientState, "_add_dataloader", "_remove_dataloader")
errors.need("accelerate", DataLoaderDispatcher, "_fetch_batches")
errors.need("accelerate", DataLoaderShard, "_update_state_dict")

_HOOKS = ("_load_model_state_pre_hook", "_save_model_state_pre_hook")
"""Private attributes of an Accelerator: hooks of the script around its own files."""
_KEPT = ("_custom_objects", "_dataloaders", "_models", "_optimizers", "_schedulers")
"""The same: what was prepared and registered."""
_CHANGING = (
    "prepare_model",
    "prepare_data_loader",
    "prepare_optimizer",
    "prepare_scheduler",
    "register_for_checkpointing",
    "free_memory",
)
"""The methods besides `prepare` that change the objects of an Accelerator."""


def attach(
    accelerator: Accelerator, root: str | os.PathLike[str] | None = None, **options: Any
) -> Accelerator:
    """Have the accelerator's `save_state` and `load_state` use holdfast; return the accelerator.

    `root`: by default the folder `holdfast` in `project_dir`.  `options`: those of a Checkpointer, which is
    then `accelerator.holdfast`.  Call its `step(n)` after each optimizer step to save as often as `every`
    says, also into memory and records.  `total_limit` becomes `Keep(last=...)`.  With `sigterm_s`,
    `save_state` and `step` check for SIGTERM: call one of them often.
    """
    if not isinstance(accelerator, Accelerator):
        raise unfit("attach", "accelerator", accelerator, "an Accelerator")
    _check_kind(accelerator)
    if any(errors.need("accelerate", accelerator, *_HOOKS)):
        _refuse_hooks()
    if root is None:
        if accelerator.project_dir is None:
            raise errors.UsageError(
                "attach() has no root: the Accelerator has no project_dir",
                hint="attach(accelerator, 'runs/gpt'), or Accelerator(project_dir='runs/gpt')",
            )
        root = os.path.join(accelerator.project_dir, "holdfast")
    limit = accelerator.project_configuration.total_limit
    if limit is not None:
        options.setdefault("keep", Keep(last=limit))
    _Attached(accelerator, root, options)
    return accelerator


class _Attached:
    """The methods that replace the Accelerator's own."""

    def __init__(
        self, accelerator: Any, root: str | os.PathLike[str], options: dict[str, Any]
    ) -> None:
        self.accelerator, self.root = accelerator, path_of(root, "attach", "root")
        self.last_step = 0
        self.has_told_of_loaders = False
        self.draws = LoaderDraws(accelerator)
        self.own_state = {"accelerate": _Counters(accelerator), "draws": self.draws}
        self.placed: set[str] = set()
        """The keys of the state that `look` has placed."""
        self.checkpointer = Checkpointer(root, **{"anew": True, **options})
        self.load_native = accelerator.load_state
        accelerator.holdfast = self.checkpointer
        accelerator.save_state, accelerator.load_state = self.save_state, self.load_state
        for name in _CHANGING:
            setattr(accelerator, name, self._followed_by_a_look(getattr(accelerator, name)))
        prepare = self._followed_by_a_look(accelerator.prepare)

        def prepared(*args: Any, **kwargs: Any) -> Any:
            result = prepare(*args, **kwargs)
            _check_known(accelerator, args)
            return result

        accelerator.prepare = prepared
        accelerator.register_save_state_pre_hook = _refuse_hooks
        accelerator.register_load_state_pre_hook = _refuse_hooks
        end_training = accelerator.end_training

        def end() -> None:
            self.checkpointer.close()
            end_training()

        accelerator.end_training = end
        self.look()

    def _followed_by_a_look(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.look()
            return result

        return call

    def look(self) -> None:
        """Update the Checkpointer's state with the present objects of the Accelerator."""
        _check_kind(self.accelerator)
        state, found = self.checkpointer.state, self.own_state | state_of(self.accelerator)
        for key in self.placed - found.keys():  # keys that others have put there stay
            state.pop(key, None)
        state.update(found)
        self.placed = {*found}
        loaders = self.accelerator._dataloaders
        if not self.has_told_of_loaders and any(map(self._goes_on_elsewhere, loaders)):
            self.has_told_of_loaders = True
            errors.warn_user(
                "a loader dispatches its batches to several processes, or reads a stream: a run that goes "
                "on in the middle of an epoch may get other data than the uninterrupted run",
                hint="save at the ends of epochs, or use dispatch_batches=False with a dataset that is no "
                "stream",
            )

    def _goes_on_elsewhere(self, loader: Any) -> bool:
        """True if a loader's place in the middle of an epoch is unknown on some process."""
        is_stream = isinstance(loader.dataset, IterableDataset)
        dispatches = isinstance(loader, DataLoaderDispatcher)
        return self.accelerator.num_processes > 1 and (is_stream or dispatches)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True) -> str:
        """Save durably, in the background.  The step is the number at the end of the folder's name or, with
        automatic naming, the next number.  Returns `ROOT@STEP`."""
        self.look()  # its lists may have been changed by hand
        project = self.accelerator.project_configuration
        automatic = project.automatic_checkpoint_naming
        step = project.iteration if automatic else _number_in(output_dir, "save_state")
        if step < self.last_step:
            raise errors.UsageError(
                f"accelerator.save_state(): step {step} is lower than step {self.last_step}, the last one "
                "saved or restored, which a restart would take for the newer one",
                hint="number all checkpoints by one counter that only grows, such as the step's",
            )
        if not self.accelerator.sync_gradients:
            notices_of(self.checkpointer).once(
                "gradients",
                f"{gradients_text(step)}: save where accelerator.sync_gradients is True",
            )
        stop_if_told(self.checkpointer, step)
        self.checkpointer.save(step)
        self.last_step = step
        project.iteration += 1
        return f"{self.root}@{step}"

    def load_state(
        self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any
    ) -> Restored | None:
        """Restore the newest step, or the step that `input_dir` names; return its number, 0 if there is
        none yet.  A folder that Accelerate itself has written is loaded by Accelerate, and None is
        returned: a folder that is named or, before the first step and with automatic naming, the newest."""
        self.look()
        own = self._own_folder(input_dir)
        if own is not None:
            self.load_native(own, load_kwargs, **load_model_func_kwargs)
            return None
        _refuse_for_steps(
            (load_model_func_kwargs.keys() | dict(load_kwargs or {}).keys()) - _HOW_TO_READ
        )
        step = None if input_dir is None else _number_in(input_dir, "load_state")
        restored = self.checkpointer.restore(step)
        self.look()  # objects that were saved in another order have their own keys again
        self.last_step = int(restored)
        if self.accelerator.project_configuration.automatic_checkpoint_naming and restored.found:
            self.accelerator.project_configuration.iteration = int(restored) + 1
        return restored

    def _own_folder(self, input_dir: Any) -> Any:
        """Return the folder that Accelerate itself must load; None if a step is restored."""
        if input_dir is not None:
            is_path = isinstance(input_dir, (str, os.PathLike))
            return input_dir if is_path and os.path.isdir(input_dir) else None
        project = self.accelerator.project_configuration
        if not project.automatic_checkpoint_naming:
            return None
        (newest,) = broadcast_object_list([_newest_in(self.accelerator.project_dir)])
        if newest is None:
            return None
        folder, number = newest
        found = self.checkpointer.find()
        if found is not None:
            if self.accelerator.is_main_process:
                tell_newer(found.step, folder, number, f"load_state({folder!r})")
            return None
        project.iteration = max(project.iteration, number + 1)
        return folder


def _newest_in(project_dir: Any) -> tuple[str, int] | None:
    """Return the newest folder with a name by Accelerate, and its number."""
    if project_dir is None:
        return None
    folders = Path(project_dir, "checkpoints").glob("checkpoint_*")
    numbers = ((re.fullmatch(r"checkpoint_(\d+)", one.name), one) for one in folders)
    found = [(int(number[1]), str(one)) for number, one in numbers if number and one.is_dir()]
    number, folder = max(found, default=(-1, ""))
    return (folder, number) if found else None


_HOW_TO_READ = {"map_location", "mmap", "weights_only"}
"""Arguments of torch.load that make no difference for a step: it has no pickle, and each value is loaded to
the device on which it is used."""


def _refuse_for_steps(names: Collection[str]) -> None:
    """UsageError for arguments that Accelerate passes to loaders of files."""
    if names:
        raise errors.UsageError(
            f"accelerator.load_state({'=, '.join(sorted(names))}=): a step is restored whole, without "
            "the file loaders that take this argument",
            hint="leave it out; holdfast.load(root, {'model': model}, strict=False) loads a part",
        )


def state_of(accelerator: Any) -> dict[str, Any]:
    """Return the prepared and registered objects of an Accelerator as a state for holdfast."""
    loaders = [d for d in accelerator._dataloaders if getattr(d, "use_stateful_dataloader", False)]
    for loader in loaders:
        _tell_what_was_loaded(loader)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        for engine in accelerator._models:
            check_trained_engine(engine)
    roles = {
        "model": accelerator._models,
        "optimizer": list(map(unwrapped, accelerator._optimizers)),
        "scheduler": list(map(unwrapped, accelerator._schedulers)),
        "custom": accelerator._custom_objects,
        "loader": loaders,
        "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
    }
    return {
        role if number == 0 else f"{role}_{number}": value
        for role, values in roles.items()
        for number, value in enumerate(values)
    }


def _tell_what_was_loaded(loader: Any) -> None:
    """Make a loader report the loaded state until it goes on: Accelerate would report its initial state."""

    def load_state_dict(saved: dict[str, Any]) -> None:
        type(loader).load_state_dict(loader, saved)
        loader.dl_state_dict = saved

    loader.load_state_dict = load_state_dict


def unwrapped(wrapped: Any) -> Any:
    """Return the object inside Accelerate's wrappers for DeepSpeed: an engine knows only its own optimizer
    and scheduler."""
    if isinstance(wrapped, DeepSpeedOptimizerWrapper):
        return wrapped.optimizer
    return wrapped.scheduler if isinstance(wrapped, DeepSpeedSchedulerWrapper) else wrapped


def check_trained_engine(engine: Any) -> None:
    """UsageError, before the first save, for a DeepSpeed engine that cannot be saved completely."""
    check_engine(engine, "attach")
    if getattr(engine, "random_ltd_scheduler", None) is not None:
        raise errors.UsageError(
            "this DeepSpeed engine uses random-LTD, whose state is not saved under a trainer",
            hint="in a loop of your own, put engine.random_ltd_scheduler into the state of a Checkpointer",
        )


def _check_known(accelerator: Any, given: tuple[Any, ...]) -> None:
    """UsageError for a scheduler prepared without its model under DeepSpeed: the Accelerator forgets it, so
    no step would have it."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return
    known = [unwrapped(one) for one in accelerator._schedulers]
    known += [getattr(one, "scheduler", None) for one in accelerator._schedulers]
    for one in given:
        if isinstance(one, LRScheduler) and all(one is not other for other in known):
            raise errors.UsageError(
                f"accelerator.prepare(): DeepSpeed's plugin does not keep a {type(one).__name__} that is "
                "prepared without its model, so no checkpoint would have it",
                hint="prepare them together: accelerator.prepare(model, optimizer, scheduler)",
            )


def _check_kind(accelerator: Any) -> None:
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        raise errors.UsageError(
            "attach(accelerator): the Accelerator hides a part of Megatron-LM's state",
            hint="use holdfast.integrations.megatron",
        )


def _refuse_hooks(*_: Any, **__: Any) -> None:
    raise errors.UsageError(
        "attach(accelerator): hooks of register_save_state_pre_hook and register_load_state_pre_hook write "
        "their own files, and a step of holdfast has no place for them",
        hint="register the objects with accelerator.register_for_checkpointing(...) instead",
    )


def _number_in(folder: Any, call: str) -> int:
    """Return the step in the name of a folder such as `step_500`."""
    if isinstance(folder, (str, os.PathLike)):
        number = re.search(r"(\d+)[/\\]*$", os.fspath(folder))
        if number is None:
            raise errors.UsageError(
                f"accelerator.{call}({os.fspath(folder)!r}): the name does not end with a step's number",
                hint="name it as 'step_500', or give the number: 500",
            )
        return step_of(int(number[1]), f"accelerator.{call}")
    return step_of(folder, f"accelerator.{call}")


class _Counters:
    """The Accelerator's own counters, equal on all ranks."""

    on_resize = "rank0"

    def __init__(self, accelerator: Any) -> None:
        self._of = accelerator
        self._left: list[Any] = []
        """Passes that had begun when a step was restored: they do not go on."""
        self._had: list[int] = []
        """Ids of the Accelerator's objects when their order was last noted."""
        self._order: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        had = [id(one) for have in had_by(self._of) for one in have]
        if had != self._had:
            is_first = not self._had
            self._had, self._order = had, order_of(self._of)
            if is_first:
                tell_order(self._order)
        loaders = self._of._dataloaders
        going_on = [now for now in self._under_way() if not now.end_of_dataloader]
        return {
            "step": self._of.step,
            "passes": self._next_passes(),
            "amid": sorted({n for now in going_on for n in of_its_data(now, loaders)}),
            "data": [data_in(one) for one in loaders],
            "orders": [order_kept(one)["seeds"] for one in loaders],
            "order": self._order,
        }

    def _holdfast_arranged(self, saved: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Compare the order of the Accelerator's objects with that of a step before the step is loaded."""
        order = decode(saved, lambda *_: None).get("order")
        return state if order is None else reordered(order, self._of, state)

    def _next_passes(self) -> list[int]:
        """Return, for each loader, the number of the pass that it is in or begins next; the order of its
        data depends on it.  A loader counts a pass after its last batch, so after the save of that step."""
        loaders = self._of._dataloaders
        counted = [getattr(loader, "iteration", 0) for loader in loaders]
        numbers = list(counted)
        for now in self._under_way():  # a later pass overrides an earlier one
            if hasattr(now, "iteration") and now._holdfast not in self._left:
                for number in of_its_data(now, loaders):
                    numbers[number] = max(counted[number], now.iteration + now.end_of_dataloader)
        return numbers

    def _under_way(self) -> list[Any]:
        """Return the loaders with a pass that has begun and not ended, or was broken off, in the order in
        which they began."""
        known = self._of.gradient_state.dataloader_references
        return [now for now in known if now is not None and "_holdfast" in vars(now)]

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._left = [now._holdfast for now in self._under_way()]
        self._of.step = saved["step"]
        for loader, number in zip(self._of._dataloaders, saved["passes"]):
            if hasattr(loader, "iteration"):
                loader.iteration = number
        tell_of_data(self._of._dataloaders, saved.get("data", ()), saved.get("amid", ()))
        for loader, seeds in zip(self._of._dataloaders, saved.get("orders", ())):
            order = {"seeds": seeds, "generators": ()}  # those of each rank come later
            put_order(loader.base_dataloader, order)


def of_its_data(loader: Any, loaders: list[Any]) -> list[int]:
    """Return the numbers of the prepared loaders that a loader stands for: itself, or for a loader that
    skips done batches, all prepared loaders over the same data."""
    whose = [getattr(s, "batch_sampler", None) for s in (loader.batch_sampler, loader.sampler)]
    orders = [id(one) for one in whose if one is not None]
    itself, of_its_order, of_its_dataset = [], [], []
    for number, whole in enumerate(loaders):
        itself += [number] * (whole is loader)
        of_its_order += [number] * any(
            id(s) in orders for s in (whole.batch_sampler, whole.sampler)
        )
        of_its_dataset += [number] * (whole.dataset is loader.dataset)
    return itself or of_its_order or of_its_dataset


# -- the generators that loaders draw from -----------------------------------------------------------


class _Pass:
    """One pass over a loader: the generators at its beginning and before the batch ahead, the number of
    batches that its sampler skipped, and the number fetched since."""

    def __init__(self, began: Any, order: Any, left_out: int) -> None:
        self.began, self.order, self.left_out = began, order, left_out
        self.ahead: Any = None
        self.fetched = 0
        self.is_over = False
        """The restored step was saved at the last batch of this pass; a loader that skips all batches
        repeats it without a draw, so it does not count."""
        self.before: Any = None
        """The generators before the pass, unless those of the restored step must still be put back."""
        self.had_workers = False
        """The pass began with the workers of an earlier pass, and so without a draw for their seed."""


class LoaderDraws:
    """The draws of an Accelerator's loaders from this rank's generators.

    It observes Accelerate's GradientState, which is told of every pass that begins or ends.  The
    Accelerator's `holdfast` is the Checkpointer that has this object in its state.
    """

    on_resize = "fresh"

    def __init__(self, accelerator: Any) -> None:
        errors.need("accelerate", accelerator, *_KEPT)
        self._of, self._rng = accelerator, Rng()
        self._saved: list[dict[str, Any]] = []
        """Passes of the restored step that have not gone on yet."""
        self._over: set[int] = set()
        """Numbers of the loaders whose pass was in its last batch when the restored step was saved."""
        self._is_to_put_back = False
        self._loaded: dict[str, Any] | None = None
        """The restored state, until a pass begins."""
        self._last: Any = None
        """The loader of the last pass, kept since GradientState has only a weak reference."""
        self._workers = PersistentWorkers(accelerator)
        self._state = accelerator.gradient_state
        self._state._add_dataloader = self._begin
        self._state._remove_dataloader = self._end

    # -- as state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        passes, over = [], []
        for loader in dict.fromkeys(self._state.dataloader_references):
            now = None if loader is None else vars(loader).get("_holdfast")
            if now is None or (index := self._index_of(loader)) is None:
                continue
            if loader.end_of_dataloader:
                over.append(index)
                continue
            done = now.left_out + now.fetched
            kept = {"began": now.began, "ahead": now.ahead, "order": now.order}
            passes.append({"loader": index, "done": done, "had_workers": now.had_workers, **kept})
        orders = [order_kept(d) for d in self._of._dataloaders]
        there = self._workers.numbers()
        return {"orders": orders, "passes": passes, "over": over, "workers": there}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for loader, order in zip(self._of._dataloaders, saved["orders"]):
            put_order_kept(loader, order)
        self._saved, self._is_to_put_back = list(saved.get("passes", ())), True
        self._loaded = saved
        self._over = set(saved.get("over", ()))
        self._workers.put(saved.get("workers", ()))
        if saved.get("active") is not None:  # an older step: one pass, without its progress
            one = {"loader": saved["active"], "done": -1, "order": saved["orders"][saved["active"]]}
            self._saved = [{**one, "began": saved["began"], "ahead": saved["ahead"]}]

    def put_back(self) -> None:
        """Put the generators of the restored step back, unless a loader that went on has done so."""
        if self._is_to_put_back:
            self._is_to_put_back = False
            self._of.holdfast.restore_rng()

    def forget(self) -> None:
        """Let no later pass go on from the restored step."""
        self._saved, self._over, self._is_to_put_back = [], set(), False
        self._loaded = self._last = None
        self._workers.put(())

    # -- as loaders go on ---------------------------------------------------------------------------

    def _begin(self, loader: Any) -> None:
        type(self._state)._add_dataloader(self._state, loader)
        self._loaded, self._last = None, loader
        samplers = loader.batch_sampler, loader.sampler
        left_out = max(getattr(sampler, "skip_batches", 0) for sampler in samplers)
        before = None if self._is_to_put_back else self._rng.state_dict()
        is_over = self._is_over(loader, left_out)
        saved = None if is_over else self._take(loader, left_out)
        if saved is not None:
            self._rng.load_state_dict(saved["began"])
            put_order_kept(loader, saved["order"])
        now = loader._holdfast = _Pass(self._rng.state_dict(), order_kept(loader), left_out)
        now.is_over, now.before = is_over, before
        now.had_workers = self._workers.are_there_for(loader)
        if saved is not None:
            now.had_workers = saved.get("had_workers", False)
        if now.had_workers:
            begin_without_a_draw(loader.base_dataloader)
        base, skipped = loader.base_dataloader, getattr(loader, "skip_batches", 0)
        for one in samplers_of(base) if left_out or skipped else ():
            if hasattr(one, "set_epoch") and hasattr(loader, "iteration"):
                one.set_epoch(loader.iteration)  # Accelerate's own call does not reach all samplers
        dispatches = hasattr(loader, "_fetch_batches")
        name = "_fetch_batches" if dispatches else "_update_state_dict"
        method, now.fetched = getattr(type(loader), name), -1 if dispatches else 0
        sampler = vars(base).get("batch_sampler")

        def before_a_fetch(*args: Any) -> Any:
            now.fetched += 1
            if saved is not None and now.fetched > skipped:
                goes_on_here()
            elif saved is not None and now.fetched == skipped:
                fetch_ahead()
            now.ahead = self._rng.state_dict() if base.num_workers == 0 else None
            return method(loader, *args)

        def goes_on_here() -> None:
            nonlocal saved
            saved, vars(base)["batch_sampler"] = None, sampler
            if before is None:
                self.put_back()
            else:  # another loader has put the generators back, and training has drawn since
                self._rng.load_state_dict(before)

        def fetch_ahead() -> None:
            if saved is not None and saved["ahead"] is not None:
                self._rng.load_state_dict(saved["ahead"])

        setattr(loader, name, before_a_fetch)
        if (
            saved is not None
            and sampler is not None
            and not dispatches
            and not hasattr(base, "state_dict")
        ):
            vars(base)["batch_sampler"] = _Watched(sampler, fetch_ahead)

    def _index_of(self, loader: Any) -> int | None:
        """Return the number of the first loader over the same data; None if there is none."""
        loaders = enumerate(self._of._dataloaders)
        return next((number for number, d in loaders if d.dataset is loader.dataset), None)

    def _is_over(self, loader: Any, left_out: int) -> bool:
        """True if a loader skips a whole pass, because the restored step was saved at its last batch.  Only
        the first loader over this data after the restore does so, if it skips batches at all."""
        index = self._index_of(loader)
        was_at_its_end = index in self._over
        self._over.discard(-1 if index is None else index)
        return was_at_its_end and left_out + getattr(loader, "skip_batches", 0) > 0

    def _take(self, loader: Any, done: int) -> dict[str, Any] | None:
        """Return the saved pass that a loader continues, and remove it from the saved passes."""
        places_itself = any(
            hasattr(d, "state_dict") for d in (loader.base_dataloader, loader.dataset)
        )
        done += getattr(loader, "skip_batches", 0)
        if not done and not places_itself:
            return None
        index = self._index_of(loader)
        over_the_same = [one for one in self._saved if one["loader"] == index]
        as_far = [one for one in over_the_same if one["done"] == done]
        taken = next(reversed(as_far or over_the_same), None)
        self._saved = [one for one in self._saved if one is not taken]
        return taken

    def _end(self, loader: Any) -> None:
        type(self._state)._remove_dataloader(self._state, loader)
        now = vars(loader).get("_holdfast")
        if now is not None and now.is_over:
            put_order_kept(loader, now.order)
            if now.before is None:
                self.put_back()
            else:
                self._rng.load_state_dict(now.before)
            return
        for number in of_its_data(loader, self._of._dataloaders):
            whole = self._of._dataloaders[number]
            if whole is not loader and hasattr(whole, "iteration"):
                whole.iteration = getattr(loader, "iteration", whole.iteration + 1)


class _Watched:
    """A batch sampler that calls `before` when its first batch is known but not fetched."""

    def __init__(self, sampler: Any, before: Callable[[], None]) -> None:
        self._sampler, self._before = sampler, before

    def __iter__(self) -> Any:
        for number, batch in enumerate(self._sampler):
            if number == 0:
                self._before()
            yield batch

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
