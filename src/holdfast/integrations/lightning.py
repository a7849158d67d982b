"""Lightning's `Trainer` with checkpoints by holdfast.

    trainer = Trainer(strategy=strategy("ddp", "runs/gpt"), callbacks=[ModelCheckpoint(save_last=True)])
    trainer.fit(model, data, ckpt_path="newest")

Lightning decides when to save and under which path; the root has the steps.  A path that Lightning knows is
a *pointer*, a small file with a step's number and its run, because another run may save that step again:

    save_checkpoint("top/epoch=1.ckpt")      step 200 is copied, and written in the background
    top/epoch=1.ckpt                         {"holdfast": 1, "root": "../gpt", "step": 200, "run": 1}
                                             written when the step is committed, or at once if there is no
                                             such file, because Lightning checks which names are taken
    remove_checkpoint("top/epoch=0.ckpt")    takes effect when all earlier saves are committed

So the step that a path named stays whole until its replacement exists.  A path pins its step until
Lightning removes the path.  Saves at the end of an epoch block, because callbacks may change weights in
place there. Weights alone are steps of `<root>-weights`.

This is a strategy and not a CheckpointIO, because Lightning calls a CheckpointIO only on rank 0, with all
tensors gathered, and never for sharded models.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core import saving as lightning_saving
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden

from holdfast import Checkpointer, Every, Keep, errors, load, save, steps, store
from holdfast import open as open_step
from holdfast.extend import (
    data_of,
    decode,
    encode,
    gradients_text,
    notices_of,
    path_of,
    read_files,
    tell_other_data,
    torch_dtype,
    wait_for_copies,
    writes_to,
)
from holdfast.integrations.lightning_finetuning import (
    TRAINED,
    callbacks_of,
    names_of_trained,
    prepare,
)
from holdfast.integrations.lightning_home import DATA, METRICS, Home, Rest, number_tensor
from holdfast.integrations.lightning_loops import (
    IN_EPOCH,
    LoopPlace,
    Metrics,
    check_private,
    go_on,
    loop_place,
    misfit_of_sums,
    undo_go_on,
)
from holdfast.integrations.lightning_pointers import (
    GONE_BACK,
    Pointer,
    beside,
    digest_of,
    is_last,
    is_of_requeue,
    newest_native,
    read_pointer,
    remove_pointer,
    replaced_by,
    settle_left,
    unpin_path,
    write_pointer,
)
from holdfast.integrations.native import kept_by, run_of, tell_newer

(_set_sampler_epoch,) = errors.need(
    "lightning", "lightning.fabric.utilities.data", "_set_sampler_epoch"
)

__all__ = ["strategy"]

NEWEST = "newest"
"""The `ckpt_path` of the newest step in any tier; without one, training begins afresh."""
_NEVER = Every.by_hand()
"""The frequencies of a Checkpointer that only saves when Lightning says so."""
_OPTIONS = inspect.signature(Checkpointer).parameters.keys() - {
    "path",
    "state",
    "mesh",
    "sigterm_s",
}


def strategy(of: str | Strategy, root: str | os.PathLike[str], **options: Any) -> Any:
    """Return Lightning's strategy `of`, which saves into `root` by a Checkpointer with these `options`.

    `of`: a strategy for one device, DDP, or ModelParallelStrategy (FSDP2 and tensor parallelism), or its
    name: `auto` (one device), `ddp`, `fsdp2`, or a name of Lightning's.  `every` adds saves to those of
    ModelCheckpoint, also into memory and records.  `keep` applies to steps that no path names; by default
    only the newest of them stays.  UsageError for another strategy, or an unknown option.
    """
    call = "lightning.strategy"
    root = path_of(root, call, "root")
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise errors.UsageError(
            f"{call} has no {unknown[0]}=; it takes {', '.join(sorted(_OPTIONS))}"
        )
    made: Any = _named(of) if isinstance(of, str) else of
    known = isinstance(made, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy))
    is_ddp = isinstance(made, DDPStrategy)
    spawned = is_ddp and errors.need("lightning", made, "_start_method") == ["spawn"]
    if not known or spawned or isinstance(made, DeepSpeedStrategy):
        raise errors.UsageError(
            f"{call} cannot save with {of if isinstance(of, str) else type(of).__name__}",
            hint="it supports one device, DDP (not spawned), and ModelParallelStrategy ('fsdp2')",
        )
    kind: Any = type(f"Holdfast{type(made).__name__}", (_Saving, type(made)), {})
    saving = kind.__new__(kind)
    saving.__dict__.update(vars(made))
    saving._root = root if "://" in root else os.path.realpath(root)
    saving._options = {"every": _NEVER, "when_busy": "queue", "keep": Keep(last=1)} | {
        name: value for name, value in options.items() if value is not None
    }
    return saving


def _weights_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the Checkpointer for weights alone, which only saves for paths."""
    few = {"when_busy", "on_error", "replicas", "deadline_s", "files", "upload_keep"}
    found = {name: options[name] for name in options.keys() & few}
    if "upload" in options:
        found["upload"] = beside(
            path_of(options["upload"], "lightning.strategy", "upload"), "weights"
        )
    return {**found, "keep": Keep(last=1), "every": _NEVER}


def _named(name: str) -> Any:
    if name == "auto":
        return SingleDeviceStrategy("cuda:0" if torch.cuda.is_available() else "cpu")
    if name == "fsdp2":
        return ModelParallelStrategy()
    return StrategyRegistry.get(name) if name in StrategyRegistry.available_strategies() else None


class _Saving:
    """The methods that override a strategy's."""

    _root: str
    _options: dict[str, Any]
    _homes: dict[bool, Home] | None = None
    """The roots that the present fit saves into, by whether they have weights alone."""
    _is_foreign = False
    """True if the checkpoint that is being loaded is Lightning's own."""
    _resumed: Any = None
    """The state of the loop over epochs that a fit goes on from."""
    _place = LoopPlace.OTHER
    """The place in the loop where that state was saved."""
    _metrics: Any = None
    """The metrics of that step; None in a step of an earlier version."""
    _data: Collection[dict[str, Any]] = ()
    """The description of the loaders' data in that step."""
    _told: Collection[str] = ()
    """The notices and texts of warnings that this fit has given."""
    _begins_anew = True
    _has_begun = False
    """True once a fit has its own step or begins; earlier saves, as by Lightning's Tuner, are trials."""
    _step = 0
    _weights: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    """The model's state_dict that hooks get, and a copy of the dict as it was before them."""
    lightning_module: Any

    # -- the life of a fit

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn == TrainerFn.FITTING:
            check_private(trainer)
            self._homes, self._resumed, self._begins_anew = {}, None, True
            self._has_begun, self._place = False, LoopPlace.OTHER
            self._metrics, self._told, self._data = None, (), ()
            self._tell_of_uploads(trainer.loggers)
            # callbacks save after `_Begin` and before `_Steps`
            trainer.callbacks = [_Begin(), *trainer.callbacks, _Steps()]

    def begin(self) -> None:
        """Called when training begins, before any callback may save."""
        if self._is_dry_run:
            return
        self._has_begun = True
        callbacks = self.lightning_module.trainer.checkpoint_callbacks
        for callback in callbacks if self._is_first else ():
            settle_left(getattr(callback, "dirpath", None))

    def on_train_start(self) -> None:
        """Called when the loader has begun its epoch, before the first batch is fetched."""
        super().on_train_start()  # type: ignore[misc]
        if not any(isinstance(c, _Begin) for c in self.lightning_module.trainer.callbacks):
            return  # a trial of Lightning's Tuner, with callbacks of its own
        if not self._is_dry_run:
            self._home(weights_only=False)
        for one in (self.lightning_module, self.lightning_module.trainer.datamodule):
            encode(dict(getattr(one, "hparams", {})), _any_tensor, "hyper_parameters")
        self._step = self.lightning_module.trainer.global_step
        for callback in callbacks_of(self.lightning_module.trainer):
            errors.need("lightning", callback, "_restarting")
            callback._restarting = False  # else its next fit would take the groups of this one
        if self._resumed is not None:
            self._begin_pass(self._resumed)
        self._tell_of_streams()
        looks = self._is_first and not self._is_dry_run
        later = [s for s in steps(self._root) if s > self._step] if looks else []
        if later and self._begins_anew:
            errors.warn_user(
                f"{self._root} has steps of another run, up to {later[-1]}, and this one begins at "
                f"{self._step}: its steps replace old ones of the same number",
                hint=f'fit(ckpt_path="{NEWEST}") goes on from them; or give the run a root of its own',
            )

    def _tell_of_streams(self) -> None:
        loop = self.lightning_module.trainer.fit_loop
        loaders = loop._combined_loader.flattened
        if loop._data_fetcher.length is None and any(hasattr(x, "state_dict") for x in loaders):
            self._tell_once(
                "the training data has no length, so Lightning fetches one batch ahead, and the loader's "
                "place in a step is one batch too far: a run that goes on in the middle of an epoch skips "
                "that batch, as with Lightning's own checkpoints",
                hint="give the dataset a __len__()",
            )

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """With records, call the closure, which computes the gradients, before the optimizer's step.

        Lightning hands the closure to `optimizer.step`, or with scaled losses to its plugin, which calls it
        before.  LBFGS, which calls it several times, and steps after which weights are averaged over ranks
        are not changed here: records refuse them.
        """
        plugin = self.precision_plugin  # type: ignore[attr-defined]
        is_scaled = getattr(plugin, "scaler", None) is not None
        is_ddp = isinstance(self, DDPStrategy)
        is_averaged = is_ddp and errors.need("lightning", self, "_model_averager") != [None]
        is_other = is_scaled or is_averaged or isinstance(optimizer, torch.optim.LBFGS)
        if is_other or "delta" not in self._options:
            return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]
        with torch.enable_grad():
            (wrap,) = errors.need("lightning", plugin, "_wrap_closure")
            result = wrap(model or self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def at_batch_end(self, step: int) -> None:
        for home in (self._homes or {}).values() if step != self._step else ():
            if (home.at and home.at[0]) != step or "delta" in self._options:
                if self._options["every"] is not _NEVER:
                    self._tell_of_losses(step)
                home.ckpt.step(step)
            home.settle()
        self._step = step

    def teardown(self) -> None:
        trainer, homes = self.lightning_module.trainer, self._homes or {}
        failed = trainer.state.status == TrainerStatus.INTERRUPTED
        try:
            for home in homes.values():
                home.close(sys.exc_info() if failed else (None, None, None))
        finally:
            self._homes = None
            undo_go_on(trainer.fit_loop)
            trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, _Begin | _Steps)]
            super().teardown()  # type: ignore[misc]

    @property
    def _is_first(self) -> bool:
        return bool(self.is_global_zero)  # type: ignore[attr-defined]

    @property
    def _is_dry_run(self) -> bool:
        """True for a fit that only tries a few batches: it does not touch the root."""
        return bool(self.lightning_module.trainer.fast_dev_run)

    def _home(self, *, weights_only: bool) -> Home:
        assert self._homes is not None
        if weights_only not in self._homes:
            rest, options, root = Rest(self.lightning_module.trainer), self._options, self._root
            if weights_only:
                options, root = _weights_options(options), beside(root, "weights")
            state = self._state(rest, weights_only=weights_only)
            self._homes[weights_only] = Home(self, root, rest, state, options)
        return self._homes[weights_only]

    def _state(self, rest: Rest, *, weights_only: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self.lightning_module, "lightning": rest}
        if not weights_only:
            state["lightning_rank"] = rest.of_rank
        optimizers = [] if weights_only else self.optimizers  # type: ignore[attr-defined]
        if optimizers:
            state["optim"] = optimizers[0] if len(optimizers) == 1 else list(optimizers)
        return state

    # -- saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the live weights, for hooks to look at."""
        weights = self.lightning_module.state_dict()
        self._weights = weights, dict(weights)
        return self._weights[0]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: optimizers are saved as they are, not gathered."""
        return {}

    def rest_of(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a Lightning checkpoint without weights and optimizers, but with metrics.  UsageError if
        hooks changed the weights."""
        checkpoint.pop("optimizer_states", None)
        if "callbacks" in checkpoint:
            trainer = self.lightning_module.trainer
            checkpoint[METRICS] = Metrics(trainer).state_dict()
            loaders = getattr(trainer.fit_loop._combined_loader, "flattened", ())
            checkpoint[DATA] = [data_of(one) for one in loaders]
            if callbacks_of(self.lightning_module.trainer):
                checkpoint[TRAINED] = names_of_trained(self.lightning_module)
        if changed := self._changed(checkpoint.pop("state_dict")):
            raise errors.UsageError(
                f"on_save_checkpoint() of the LightningModule or of a callback changed {changed!r} in the "
                "state_dict, but holdfast saves the live weights",
                hint="holdfast.trainable_only(model) leaves out frozen weights; keep averages in buffers",
            )
        return checkpoint

    def _changed(self, weights: dict[str, Any]) -> str:
        """Return the name of a weight that a hook has added, replaced or removed; else ""."""
        before = self._weights[1]
        names = (n for n in before | weights if weights.get(n) is not before.get(n))
        return next(names, "")

    def writes(self) -> Any:
        """Return a value that changes whenever the weights do."""
        return writes_to(self.lightning_module)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise errors.UsageError(
                "save_checkpoint(storage_options=) is for a CheckpointIO, which holdfast does not use",
                hint="leave it out",
            )
        rest, path = self.rest_of(checkpoint), self.broadcast(str(filepath))  # type: ignore[attr-defined]
        callbacks = self.lightning_module.trainer.checkpoint_callbacks
        if self._is_dry_run and path in [getattr(c, "last_model_path", "") for c in callbacks]:
            return  # Lightning saves save_last= even then, and the next run would go on from it
        step, weights_only = rest["global_step"], "callbacks" not in rest
        has_home = self._homes is not None and self._has_begun
        home = self._home(weights_only=weights_only) if has_home else None
        has_room = home is not None and home.has_room(step)
        is_named = home is not None and has_room and home.is_newest(step)
        if not weights_only and not is_named:
            self._tell_of_losses(step)
        if home is not None and has_room:
            home.save(rest, path)
            module = self.lightning_module
            if module.trainer.validating or not module.automatic_optimization:
                wait_for_copies()  # weights may be swapped in for now, and put back next
            is_last_batch = module.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            # callbacks that follow may change weights in place; Slurm may end the job
            if is_last_batch or is_of_requeue(path):
                home.ckpt.wait()
                home.settle()
            return
        # the fit is over or has not begun, or weights have changed since a path named this step
        self._settle()  # a waiting pointer of this path must not be written after this one
        own = Rest()
        own.value, root = rest, self._root_of(path)
        state = self._state(own, weights_only=weights_only)
        save(root, state, step=step, **self._single_save_options(root))
        pointer = {"root": root, "step": step, "weights_only": weights_only}
        failed = _why_not_pointed(path, pointer) if self._is_first else ""
        if failed := self.broadcast(failed):  # type: ignore[attr-defined]
            raise errors.StoreError(f"{path} does not name step {step}, which is saved: {failed}")

    def _single_save_options(self, root: str) -> dict[str, Any]:
        """Return the options of a single save into a root of its own; warn once that it is not uploaded.
        Collective."""
        options = {name: self._options[name] for name in self._options.keys() & {"deadline_s"}}
        if self._options.get("replicas") == "trust":
            options["replicas"] = "trust"
        if "files" in self._options:
            options["files"] = self.broadcast(self._file_contents())  # type: ignore[attr-defined]
        if "upload" in self._options:
            self._tell_once(
                "is not uploaded: a step that is saved before or after training, or again with other "
                "weights, has a root of its own",
                hint=f"`holdfast copy {root} DST` copies it to a bucket",
                about=root,
            )
        return options

    def _file_contents(self) -> dict[str, bytes]:
        """Return the contents of `files`, on rank 0; warn of files that cannot be read."""

        def complain(error: BaseException) -> None:
            errors.warn_user(f"the step is saved without a file: {error}")

        if not self._is_first:
            return {}
        return read_files(self._options["files"], "lightning.strategy", complain)

    def _tell_of_losses(self, step: int) -> None:
        """Warn, once of each, of values that a save in the middle of an epoch lacks."""
        module, about = self.lightning_module, f"step {step}"
        trainer = module.trainer
        loop, epoch = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
        batch = loop.batch_progress.current
        is_after_one = 0 < batch.ready == batch.processed
        if module.automatic_optimization and is_after_one and loop._should_accumulate():
            self._tell_once(
                gradients_text(step),
                hint="save after whole steps: val_check_interval as a multiple of accumulate_grad_batches",
                notice="gradients",
            )
        is_at_batch_end = is_after_one and batch.completed < batch.processed
        hook = "on_train_batch_end" if is_at_batch_end else "on_validation_end"
        if (is_at_batch_end or trainer.validating) and is_overridden(hook, module):
            self._tell_once(
                f"lacks what {hook}() of the LightningModule does, because that hook runs after the save: "
                "runs that go on from the step leave it out",
                hint="do this in optimizer_step(), or in the same hook of a callback",
                about=about,
            )
        for name in Metrics(trainer).left_out() if epoch.processed < epoch.started else ():
            self._tell_once(
                f"lacks the sum of {name!r} over the epoch so far, because it is a torchmetrics.Metric or "
                "of a group of ranks: runs that go on from the step sum up the rest of the epoch alone",
                about=about,
            )

    def _tell_of_uploads(self, loggers: Any) -> None:
        """Warn, once of each, of loggers that upload the file at a path."""
        for logger in loggers:
            if getattr(logger, "_log_model", False):
                self._tell_once(
                    f"{type(logger).__name__}(log_model={logger._log_model!r}) uploads the small file that "
                    "names a step, and not the model",
                    hint="log_model=False; upload= of the strategy copies steps to a bucket",
                )

    def _tell_once(
        self, text: str, hint: str | None = None, notice: str | None = None, about: str = ""
    ) -> None:
        """Warn on rank 0, once for each notice or text.  `about`: the subject, put before the text."""
        what = notice or text
        if notice is not None:
            for home in (self._homes or {}).values():
                notices_of(home.ckpt).was_given(notice)
        if self._is_first and what not in self._told:
            self._told = {*self._told, what}
            errors.warn_user(f"{about} {text}".lstrip(), hint=hint, notice=notice)

    def _settle(self) -> None:
        """Block until all saves have ended, and write their pointers."""
        for home in (self._homes or {}).values():
            home.ckpt.wait()
            home.settle()

    def remove_checkpoint(self, filepath: Any) -> None:
        pointer = read_pointer(filepath) if self._is_first else None
        if pointer is None:
            super().remove_checkpoint(filepath)  # type: ignore[misc]
            return
        path, homes = str(filepath), list((self._homes or {}).values())
        if self._is_dry_run and pointer["root"] != self._root_of(path):
            return  # of another run
        home = next((h for h in homes if h.root == pointer["root"]), homes[0] if homes else None)
        if home is None:
            unpin_path(pointer["root"], path)
            self.delete_root_of(path, remove_pointer(path))
        else:
            home.remove(path)

    def delete_root_of(self, path: str, pointer: Pointer | None) -> None:
        """Delete the single-step root that a path named, if it did."""
        root = self._root_of(path)
        if pointer is None or pointer["root"] != root:
            return
        try:
            place = store.open_store(root)
            keys = place.list("")
            if isinstance(place, store.Bulk):
                place.delete_many(keys)
            else:
                for key in keys:
                    place.delete(key)
            if "://" not in root:
                os.rmdir(root)
        except (errors.HoldfastError, OSError) as error:
            errors.warn_user(f"{root}, which only {path} named, cannot be deleted: {error}")

    def _root_of(self, path: str) -> str:
        """Return the root of a single step that only this path names."""
        return beside(self._root, f"{Path(path).stem}-{digest_of(path)}")

    # -- loading

    restore_checkpoint_after_setup = property(lambda self: True)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return self._is_foreign and bool(super().lightning_restore_optimizer)  # type: ignore[misc]

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        path = self.broadcast(str(checkpoint_path))  # type: ignore[attr-defined]
        self._settle()
        here = None if path == NEWEST or not self._is_first else read_pointer(path)
        pointer, replaced = self.broadcast((here, replaced_by(here)))  # type: ignore[attr-defined]
        if replaced and (self._homes is None or pointer["root"] != self._root or not is_last(path)):
            raise errors.NotRecoverable(f"{path} {replaced}", hint=GONE_BACK)
        if replaced:
            errors.warn_user(f"{path} {replaced}: training goes on from the newest step")
            path, pointer = NEWEST, None
        self._is_foreign = pointer is None and path != NEWEST
        if self._is_foreign:
            self._begins_anew = False
            loaded = super().load_checkpoint(checkpoint_path, weights_only)  # type: ignore[misc]
            if self._homes is not None:
                prepare(self.lightning_module.trainer, loaded)
            return loaded
        root, step = (self._root, None) if pointer is None else (pointer["root"], pointer["step"])
        if self._homes is not None and root == self._root and not self._is_dry_run:
            rest = self._restore(path, step)
        elif self._homes is not None and step is None and not self._has_steps():
            rest = None
        else:
            own, module = Rest(), self.lightning_module
            all_of_it = self._homes is not None and not (pointer or {}).get("weights_only")
            if all_of_it and callbacks_of(module.trainer):
                with open_step(root, step=step) as saved:
                    prepare(
                        module.trainer, kept_by("Lightning", saved.extras, "lightning", saved.step)
                    )
            state = self._state(own, weights_only=not all_of_it)
            load(root, state, step=step, strict=module.strict_loading)
            rest = own.take()
        if rest is None:
            return _Nothing({"pytorch-lightning_version": lightning_version})
        self._begins_anew = False
        if "callbacks" in (pointer or {}) and rest["global_step"] == step:
            self._take_over(step, rest["callbacks"], decode(pointer["callbacks"], number_tensor))
        return {**rest, "state_dict": self.lightning_module_state_dict()}

    def _has_steps(self) -> bool:
        """A dry run makes no root; nor need there be one."""
        has_steps = False
        if self._is_first:
            with suppress(errors.NotFound):
                has_steps = bool(steps(self._root))
        return bool(self.broadcast(has_steps))  # type: ignore[attr-defined]

    def _take_over(self, step: int, states: dict[str, Any], newer: dict[str, Any]) -> None:
        """Take callbacks' states from the time when a path was saved.  If the hooks between the save of its
        step and that time run again, only take the states of checkpoint callbacks: the others see the hooks
        again."""
        if self._place is LoopPlace.OTHER:
            states |= newer
            return
        for callback in self.lightning_module.trainer.checkpoint_callbacks:
            key = callback.state_key
            if key in newer and newer[key] != states.get(key):
                states[key] = newer[key]
                callback._last_global_step_saved = step  # it has a path of it

    def _restore(self, path: str, step: int | None) -> Any:
        """Restore the fit's own step; return its `Rest`, None if there is no step."""
        self._has_begun, home = True, self._home(weights_only=False)
        if step is not None and is_last(path):
            newest = home.ckpt.find()
            reached = 0 if newest is None else newest.step
            if reached < step and not home.has(step):
                errors.warn_user(
                    f"{path} names step {step}, which is missing or damaged: "
                    f"training goes on from step {reached}"
                )
                step = None
            elif newest is not None and newest.step > step:
                errors.warn_user(
                    f"{path} names step {step}, but {self._root} has the newer step {newest.step} (tier "
                    f"{newest.tier!r})",
                    hint=f'fit(ckpt_path="{NEWEST}") takes the newest of all tiers',
                )
        trainer = self.lightning_module.trainer
        found = home.ckpt.find(step) if callbacks_of(trainer) else None
        if found is not None and "lightning" in found.extras:
            prepare(trainer, found.extras["lightning"])
        restored = home.ckpt.restore(step)
        rest = home.rest.take()
        if not restored.found:
            return None
        if path == NEWEST and self._is_first:
            folders = [one.dirpath for one in trainer.checkpoint_callbacks if one.dirpath]
            own, number = newest_native(folders)
            tell_newer(int(restored), own or None, number, f"fit(ckpt_path={own!r})")
        home.at = int(restored), self.writes()
        if not restored.replayed and self._lies_in_root(home, restored):
            home.go_on_from(int(restored), rest)
        self._resumed, self._metrics = rest["loops"]["fit_loop"], rest.get(METRICS)
        self._data = rest.get(DATA, ())
        if self._metrics is not None:
            self._place = loop_place(self._resumed, was_validating=self._metrics["validating"])
        return rest

    def _lies_in_root(self, home: Home, restored: Any) -> bool:
        """True if the root has the restored step, even if it was read from memory.  Collective."""
        if restored.tier != "memory":
            return bool(restored.tier == "durable")
        step = int(restored)
        found, run = home.ckpt.find(step), run_of(self._root, step) if self._is_first else None
        run = self.broadcast(run)  # type: ignore[attr-defined]
        return found is not None and not found.replays and run == found.at.run

    def _begin_pass(self, resumed: Any) -> None:
        """Put loaders and generators where the step had them.

        By now Lightning has begun an epoch of the loaders, which draws from the generators; only then do
        samplers get the epoch's number.  If the step was the last of its epoch, a stateful loader is at its
        end, and the next epoch would have no batches.  For a finished epoch Lightning does not load the
        loaders' states, which determine the next order.
        """
        trainer, ckpt = self.lightning_module.trainer, self._home(weights_only=False).ckpt
        loop, batches = trainer.fit_loop, resumed["epoch_loop.batch_progress"]
        done, is_last = batches["current"], batches["is_last_batch"]
        is_old = is_last and done["completed"] < done["processed"]  # a step of an earlier version
        if is_old:
            loop.reset_restart_stage()  # a new epoch begins, and is counted as one
        is_new = is_old or self._place is LoopPlace.EPOCH or (is_last and not loop.restarting)
        loaders, epoch = loop._combined_loader.flattened, loop.epoch_progress.current.processed
        told = [_set_sampler_epoch(loader, epoch) for loader in loaders if epoch]
        has_epochs = told and not is_last and any(map(_has_epochs, loaders))
        is_stateful = any(hasattr(loader, "load_state_dict") for loader in loaders)
        states = resumed["state_dict"].get("combined_loader") if is_stateful else None
        if states and (has_epochs or (is_new and not is_old)):
            (load_states,) = errors.need("lightning", loop._combined_loader, "_load_state_dicts")
            load_states(states)
            iter(loop._data_fetcher)
        for loader, data in zip(loaders, self._data if done["processed"] and not is_last else ()):
            if hasattr(loader, "load_state_dict"):  # others begin their data again
                tell_other_data("train_dataloader", data, data_of(loader))
        if done["processed"]:
            _restore_rng(ckpt)
        if is_new:
            iter(loop._data_fetcher)
        if self._metrics is not None:
            misfit = misfit_of_sums(self._metrics, trainer.world_size)
            at = resumed["epoch_progress"]["current"]
            has_begun = at["processed"] < at["started"] and done["completed"] > 0
            is_open = has_begun or self._place in IN_EPOCH
            if is_open and misfit:
                self._tell_once(f"the sums of metrics over the epoch begin anew: {misfit}")
            Metrics(trainer).load_state_dict(
                self._metrics, has_sums=not misfit, is_in_epoch=is_open
            )
            if is_open:
                loop._restarting = False  # as in `go_on`
            if missing := go_on(loop, self._place):
                self._tell_once(
                    f"the step has no metric {missing!r}, so ReduceLROnPlateau leaves out its step at the "
                    "end of this epoch",
                    hint="save after the metric is logged",
                )

    def load_model_state_dict(self, checkpoint: dict[str, Any], strict: bool = True) -> None:
        if self._is_foreign:
            super().load_model_state_dict(checkpoint, strict=strict)  # type: ignore[misc]
        elif self._changed(checkpoint["state_dict"]):  # by on_load_checkpoint()
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        if self._is_foreign:
            super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]


class _Begin(Callback):
    """Calls the strategy when training begins, before other callbacks may save."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.begin()


class _Steps(Callback):
    """Calls the strategy after each step."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.strategy.at_batch_end(trainer.global_step)


class _Nothing(dict[str, Any]):
    """An empty checkpoint, which is false, so that Lightning restores nothing."""

    def __bool__(self) -> bool:
        return False


def _why_not_pointed(path: str, pointer: Pointer) -> str:
    """Let a path name a step; return why that failed, else "".  On rank 0, which tells the others."""
    try:
        before = read_pointer(path)
        write_pointer(path, pointer)
        if before is not None and before["root"] != pointer["root"]:
            unpin_path(before["root"], path)
    except Exception as error:
        return str(error) or repr(error)
    return ""


def _restore_rng(ckpt: Checkpointer) -> None:
    with suppress(
        errors.UsageError
    ):  # saved on another number of ranks: generators stay as the script seeded them
        ckpt.restore_rng()


def _has_epochs(loader: Any) -> bool:
    return any(hasattr(getattr(loader, name, None), "set_epoch") for name in ("sampler", "dataset"))


def _any_tensor(value: Any, path: str) -> Any:
    return None if isinstance(value, torch.Tensor) else encode(value, path=path)


# -- load_from_checkpoint(path), which opens a path by torch.load

_load = lightning_saving.pl_load


def _load_also_pointers(path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
    pointer = (
        read_pointer(path) if isinstance(path, (str, Path)) and str(path)[:4] != "http" else None
    )
    if replaced := replaced_by(pointer):
        raise errors.NotRecoverable(f"{path} {replaced}", hint=GONE_BACK)
    if pointer is None:
        return _load(path, map_location=map_location, weights_only=weights_only)
    with open_step(pointer["root"], step=pointer["step"]) as step:
        weights = {
            name.partition(".")[2]: torch.from_numpy(step.read(name).reshape(-1).view("u1"))
            .view(torch_dtype(step.info(name).dtype))
            .reshape(step.info(name).shape)
            for name in step.names()
            if name.startswith("model.")
        }
        device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
        moved = {name: tensor.to(device) for name, tensor in weights.items()}
        own = kept_by("Lightning", step.extras, "lightning", pointer["step"])
        return {**own, "state_dict": moved}


lightning_saving.pl_load = _load_also_pointers
