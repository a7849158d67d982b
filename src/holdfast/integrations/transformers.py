"""transformers: a `Trainer` that checkpoints with holdfast.

    class MyTrainer(HoldfastTrainer): ...          # or: Trainer = with_holdfast(Trainer)
    trainer = MyTrainer(model, args, train_dataset=data)
    trainer.train(resume_from_checkpoint=True)

The Trainer decides when to save, as ever: `save_strategy`, `save_steps`, `should_save` of a callback.  Step
500 of the root, by default `holdfast` in `output_dir`, replaces the folder `checkpoint-500`.

A TrainerCallback cannot do this: the Trainer computes its position in the data before it calls the first
callback, and generators must be restored after the loader has drawn from them.  So `_Holdfast` overrides
methods of the Trainer.  The Trainer resumes from a folder that only has its `trainer_state.json`; the rest
is restored at once, when model and optimizer are prepared.

*When a step is saved.*  Between two steps: after the Trainer has logged and evaluated at the end of one (at
the end of an epoch, twice), and before it fetches data for the next.  A save that is requested in the
middle of a step is made at its end.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from glob import escape
from pathlib import Path
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import broadcast_object_list, gather_object
from transformers import Trainer, TrainerCallback, TrainerState, trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy, SaveStrategy, get_last_checkpoint

from holdfast import Checkpointer, Every, Found, Keep, errors, load, trainable_only
from holdfast.extend import (
    TOP_NAMES,
    check_metrics,
    gradients_text,
    notes_of,
    notices_of,
    path_of,
    step_of,
    tell_other_data,
    unfit,
    wait_for_copies,
)
from holdfast.integrations.accelerate import LoaderDraws, check_trained_engine, unwrapped
from holdfast.integrations.accelerate_loaders import data_in
from holdfast.integrations.native import kept_by, tell_newer
from holdfast.integrations.trl_parts import moving_reference, tell_of_generated

TRAINER_STATE_NAME, nested_gather, _is_peft_model = errors.need(
    "transformers", "transformers.trainer", "TRAINER_STATE_NAME", "nested_gather", "_is_peft_model"
)
errors.need(
    "transformers", Trainer,
    "_evaluate", "_finalize_training", "_init_training_state", "_load_best_model",
    "_load_from_checkpoint", "_load_rng_state", "_prepare_for_training", "_run_epoch",
    "_save_checkpoint",
)  # fmt: skip

__all__ = ["HoldfastCallback", "HoldfastTrainer", "with_holdfast"]

_NEVER = Every.by_hand()
"""The frequencies of a run in which the Trainer decides when to save, but not by steps."""
SIGTERM_S = 30.0
"""Seconds in which a run with `enable_jit_checkpoint` saves and stops, if `sigterm_s` is not given."""


class HoldfastCallback(TrainerCallback):
    """Raises UsageError: a callback cannot resume a Trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise errors.UsageError(
            "a TrainerCallback comes too late to resume: data would begin again at their first batch, and "
            "generators would be put back before the loader draws from them",
            hint="use holdfast.integrations.transformers.HoldfastTrainer in the place of Trainer, or "
            "with_holdfast(YourTrainer)",
        )


_Mixin: Any = object
"""The type of the base for mypy: the overrides call methods of the Trainer."""


class _Holdfast(_Mixin):
    """Overrides of a Trainer; in the list of bases it stands before the Trainer class."""

    def __init__(self, *args: Any, holdfast: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """The Trainer's arguments, and `holdfast`: a dict of `root` and options of a Checkpointer, such as
        `memory`, `delta`, `keep`."""
        if not isinstance(holdfast, Mapping | None):
            what = "a dict of `root` and options of a Checkpointer"
            hint = 'holdfast={"root": "runs/gpt"}'
            raise unfit("HoldfastTrainer", "holdfast", holdfast, what, hint=hint)
        super().__init__(*args, **kwargs)
        self._holdfast = _HoldfastRun(self.args.output_dir, dict(holdfast or {}))
        if self.args.enable_jit_checkpoint:
            self._holdfast_take_over_sigterm()
        self._holdfast_check_usable()
        self._holdfast_tell_what_is_not_called()

    def _holdfast_tell_what_is_not_called(self) -> None:
        """Warn of a Trainer class, such as TRL's, with code of its own in methods that write or read the
        folder of a checkpoint."""
        if not self.args.should_save or self.args.save_strategy == SaveStrategy.NO:
            return
        names = _not_called(type(self))
        if names:
            are, they = ("is", "it is") if len(names) == 1 else ("are", "they are")
            errors.warn_user(
                f"{', '.join(names)} {are} not called when steps are saved and restored: {they} for the "
                "folder of a checkpoint, which holdfast does not make",
                hint="put what is to be kept into self.accelerator.holdfast.state, in create_optimizer() "
                "of a subclass of with_holdfast(...), and do the rest in a callback's on_save()",
            )

    def _holdfast_check_usable(self) -> None:
        if self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END:
            raise errors.UsageError(
                f"HoldfastTrainer: hub_strategy={self.args.hub_strategy.value!r} pushes the folder of each "
                "checkpoint, which holdfast does not make",
                hint="use hub_strategy='end', which pushes the trained model",
            )
        every = self._holdfast.options.get("every")
        if self.args.save_strategy != SaveStrategy.NO and (
            every is not None and getattr(every, "durable", every) is not None
        ):
            raise errors.UsageError(
                "HoldfastTrainer: every= gives a frequency of durable saves, and so does save_strategy",
                hint="use save_steps for durable saves, and every=Every(memory=..., delta=...); or "
                "save_strategy='no'",
            )

    def _holdfast_take_over_sigterm(self) -> None:
        """Let the Checkpointer handle SIGTERM, which stops all ranks after the same step; the Trainer's own
        handler lets each rank save by itself."""
        from transformers.trainer_jit_checkpoint import JITCheckpointCallback

        callback = self.pop_callback(JITCheckpointCallback)
        (handler,) = errors.need("transformers", callback.jit_manager, "_original_sigterm_handler")
        signal.signal(signal.SIGTERM, handler)
        self._holdfast.options.setdefault("sigterm_s", SIGTERM_S)

    # -- a run --------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As the Trainer's.  `resume_from_checkpoint`: True for the newest step, or a new run if there is
        none; a number, or a name that ends with one, as `checkpoint-500`, for that step; or a folder that
        the Trainer itself has written."""
        run = self._holdfast
        if self.args.save_strategy != SaveStrategy.NO:
            is_first = self.is_world_process_zero()
            _refuse_uploads(self.callback_handler.callbacks, is_first=is_first)
        if trial is not None:
            raise errors.UsageError(
                "HoldfastTrainer: a search for hyperparameters makes many runs, and a root is for one"
            )
        if self.args.save_total_limit:
            run.options.setdefault("keep", Keep(last=self.args.save_total_limit))
        run.losses, run.draws = _Losses(self), LoaderDraws(self.accelerator)
        state = {"trainer": _TrainerProgress(self), "losses": run.losses, "draws": run.draws}
        with Checkpointer(run.root, **{"anew": True, **run.options}) as checkpointer:
            checkpointer.state.update(state)
            run.checkpointer = self.accelerator.holdfast = checkpointer
            try:
                return self._holdfast_train(resume_from_checkpoint or None, trial, *args, **kwargs)
            finally:
                run.draws.forget()
                run.checkpointer = self.accelerator.holdfast = None

    def _holdfast_train(self, resume: Any, *args: Any, **kwargs: Any) -> Any:
        run = self._holdfast
        while True:
            run.found, run.is_restored = None, False
            try:
                with tempfile.TemporaryDirectory() as folder:
                    return super().train(
                        self._holdfast_resumed_from(resume, folder), *args, **kwargs
                    )
            except errors.NotRecoverable as error:
                if run.found is None or run.is_restored or resume is not True:
                    raise
                self._holdfast_forget_the_engine(error)
                errors.warn_user(f"step {run.found.step} is damaged, and is passed over: {error}")

    def _holdfast_forget_the_engine(self, error: errors.NotRecoverable) -> None:
        """Let the next attempt make a new DeepSpeed engine.  NotRecoverable at stage 3, which makes only
        one per model."""
        if not self.is_deepspeed_enabled:
            return
        if self.deepspeed.zero_optimization_partition_weights():
            step = self._holdfast.found.step
            raise errors.NotRecoverable(
                f"step {step} is damaged, and at ZeRO stage 3 the same process cannot load another one: "
                f"{error}",
                hint="train(resume_from_checkpoint=N) with an older step N: "
                f"holdfast ls {self._holdfast.root}",
            ) from error
        self.model_wrapped = self.model

    def _holdfast_resumed_from(self, resume: Any, folder: str) -> Any:
        """Return the folder, with the Trainer's state, from which it resumes; None for a new run."""
        run = self._holdfast
        if resume is None:
            return None
        if (
            isinstance(resume, (str, os.PathLike))
            and (own := self._holdfast_own_folder(resume)) is not None
        ):
            return own
        run.found = run.checkpointer.find(None if resume is True else _step_in(resume))
        if run.found is not None and self.args.save_only_model:
            raise errors.UsageError(
                f"train(resume_from_checkpoint={resume!r}): with save_only_model=True no step has an "
                "optimizer",
                hint=f"load the model: holdfast.load({run.root!r}, {{'model': model}})",
            )
        there = os.path.isdir(self.args.output_dir)
        own = get_last_checkpoint(self.args.output_dir) if there else None
        if run.found is None:
            return self._holdfast_own_folder(own)
        if resume is True and own is not None and self.is_world_process_zero():
            how = f"train(resume_from_checkpoint={own!r})"
            tell_newer(run.found.step, own, _step_in(os.path.basename(own)), how)
        saved = _own_state(run.found)
        Path(folder, TRAINER_STATE_NAME).write_text(
            json.dumps({**saved, "best_model_checkpoint": None})
        )
        return folder

    def _holdfast_own_folder(self, folder: Any) -> Any:
        """Return rank 0's folder that the Trainer has written, on all ranks; None if there is none."""
        is_there = folder is not None and os.path.isdir(folder)
        (found,) = broadcast_object_list([folder if is_there else None])
        if found is not None and not all(gather_object([os.path.isdir(found)])):
            raise errors.UsageError(
                f"train(resume_from_checkpoint=...): some ranks lack the folder {os.fspath(found)!r}",
                hint="put it where all ranks find it",
            )
        return found

    def _init_training_state(
        self, max_steps: int, steps_per_pass: int, num_passes: int, *args: Any, **kwargs: Any
    ) -> Any:
        run = self._holdfast
        position = super()._init_training_state(
            max_steps, steps_per_pass, num_passes, *args, **kwargs
        )
        if run.found is not None:
            found, saved = run.found.extras["trainer"], _own_state(run.found)
            self.state.best_model_checkpoint = saved["best_model_checkpoint"]
            if saved["global_step"] < max_steps:
                self._holdfast_tell_of_callbacks(saved)
            if num_passes == sys.maxsize and "position" in found:
                number, done = found["position"]
                done *= self.args.gradient_accumulation_steps
                position = number, 0 if self.args.ignore_data_skip else done
        run.must_save = run.has_begun = False
        run.last_step, run.last_saved = self.state.global_step, -1
        run.data_pass = _PassOverData(is_stream=num_passes == sys.maxsize)
        self._holdfast_begin_pass(*position)
        return position

    def _holdfast_begin_pass(self, number: int, num_batches: int) -> None:
        """Note that a pass goes on after `num_batches` batches."""
        done = num_batches // self.args.gradient_accumulation_steps
        self._holdfast.data_pass.begin(number, self.state.global_step - done)

    @property
    def _holdfast_position(self) -> list[int]:
        """The number of the pass over the data, and the updates made in it."""
        run = self._holdfast
        return [run.data_pass.number, self.state.global_step - run.data_pass.began]

    def _holdfast_tell_of_callbacks(self, saved: dict[str, Any]) -> None:
        """Warn of callbacks whose state the Trainer does not restore, and of a run that a callback had
        ended."""
        if not self.args.should_save:
            return
        states, step = saved["stateful_callbacks"], saved["global_step"]
        names = {type(c).__name__ for c in self.callback_handler.callbacks} & states.keys()
        if names and not self.args.restore_callback_states_from_checkpoint:
            errors.warn_user(
                f"callbacks begin anew, without their state of step {step}: {', '.join(sorted(names))}",
                hint="TrainingArguments(restore_callback_states_from_checkpoint=True)",
            )
        control = states.get("TrainerControl") or {}
        if step < saved["max_steps"] and control.get("args", {}).get("should_training_stop"):
            errors.warn_user(
                f"a callback had ended this run at step {step}, but training goes on from there, as "
                "without holdfast"
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any) -> Any:
        if self._holdfast.found is None:  # else all is restored at once, after the preparation
            super()._load_from_checkpoint(resume_from_checkpoint, *args)

    def _prepare_for_training(self, max_steps: int, loader: Any, resume: str | None) -> Any:
        run = self._holdfast
        prepared = super()._prepare_for_training(
            max_steps, loader, None if run.found is not None else resume
        )
        run.data_pass.data, run.data_pass.loader = prepared[1].dataset, prepared[1]
        is_read_by_each = run.data_pass.is_stream and self.args.world_size > 1
        dispatches = isinstance(prepared[1], DataLoaderDispatcher)
        if is_read_by_each and not dispatches and self.args.should_save:
            errors.warn_user(
                "each rank reads the stream by itself: if samples are drawn at random, a run that goes on "
                "in the middle of a pass gets other samples than the uninterrupted run",
                hint="accelerator_config={'dispatch_batches': True}, which is the default for streams",
            )
        checkpointer = run.checkpointer
        checkpointer.state.update(self._holdfast_parts())
        if self.args.should_save:
            for name, content in self._holdfast_side_files().items():
                checkpointer.files.setdefault(name, content)
        every, strategy = checkpointer.every, self.args.save_strategy
        if strategy == SaveStrategy.STEPS:
            checkpointer.every = replace(every, durable=int(self.state.save_steps))
        elif strategy != SaveStrategy.NO and every == Every():
            checkpointer.every = _NEVER
        if run.found is not None:
            checkpointer.restore(run.found)
            run.is_restored = True
            if (best := self._holdfast_best_step()) is not None:
                with _told(checkpointer, f"the label 'best' names no step {best}"):
                    notes_of(checkpointer).pin(best, "best")  # the run may have ended before it did
        return prepared

    def _holdfast_parts(self) -> dict[str, Any]:
        """Return the part of the state that exists after the preparation."""
        if _is_peft_model(self.model):
            self._holdfast_leave_out_frozen()
        if self.args.save_only_model:
            return {"model": self.model_wrapped}
        if self.is_deepspeed_enabled:
            check_trained_engine(self.deepspeed)
        parts = {"model": self.model_wrapped, "optimizer": unwrapped(self.optimizer)}
        parts |= {"scheduler": unwrapped(self.lr_scheduler), **moving_reference(self)}
        scaler = getattr(self.accelerator, "scaler", None)
        return parts if scaler is None else {**parts, "scaler": scaler}

    def _holdfast_leave_out_frozen(self) -> None:
        if self.is_deepspeed_enabled and self.deepspeed.zero_optimization_partition_weights():
            errors.warn_user(
                "at ZeRO stage 3 the weights that the adapter leaves frozen are saved all the same"
            )
        else:
            trainable_only(self.model)

    def _holdfast_side_files(self) -> dict[str, bytes]:
        """Return the files that `from_pretrained` needs beside weights: configurations, and the
        tokenizer's."""
        model = self.accelerator.unwrap_model(self.model)
        peft = getattr(model, "peft_config", {}).values() if _is_peft_model(model) else ()
        collator = getattr(self.data_collator, "tokenizer", None)
        config, generation = (getattr(model, n, None) for n in ("config", "generation_config"))
        with tempfile.TemporaryDirectory() as folder:
            for part in (config, generation, self.processing_class or collator, *peft):
                if hasattr(part, "save_pretrained"):
                    part.save_pretrained(folder)
            return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file()}

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._holdfast.found is None:
            super()._load_rng_state(checkpoint)
        else:
            self._holdfast.draws.put_back()

    def _run_epoch(self, *args: Any, epoch: int, **kwargs: Any) -> None:
        run = self._holdfast
        if run.found is not None and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = (
                True  # the run had ended; the Trainer would make one more step
            )
            return
        run.losses.put_back()
        goes_on = epoch == kwargs["epochs_trained"] and kwargs["resume_from_checkpoint"] is not None
        self._holdfast_begin_pass(epoch, kwargs["steps_trained_in_current_epoch"] if goes_on else 0)
        run.has_begun = True
        super()._run_epoch(*args, epoch=epoch, **kwargs)
        if run.data_pass.is_over or self.control.should_epoch_stop:
            self._holdfast_begin_pass(epoch + 1, 0)
        self._holdfast_between_steps()

    def get_batch_samples(self, iterator: Any, num_batches: int, *args: Any, **kwargs: Any) -> Any:
        run = self._holdfast
        if not run.data_pass.is_over:  # else the epoch ends first, evaluates, and may save
            self._holdfast_between_steps()
        found = super().get_batch_samples(iterator, num_batches, *args, **kwargs)
        loaders = self.accelerator.gradient_state.dataloader_references
        run.data_pass.go_on(len(found[0]) == num_batches, loaders)
        return found

    # -- saving -------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        self._holdfast.must_save = True
        self._holdfast_name_the_best()

    def _holdfast_name_the_best(self) -> None:
        """Let the Trainer's state name the step that is being saved as the best, if it is the best."""
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = (
                f"{self._holdfast.root}@{self.state.best_global_step}"
            )

    def _holdfast_best_step(self) -> int | None:
        """Return the best step of the root; None if the best is a folder of the Trainer's."""
        number = re.search(r"@(\d+)$", self.state.best_model_checkpoint or "")
        return None if number is None else int(number[1])

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        run = self._holdfast
        metrics = super()._evaluate(*args, **kwargs)
        if run.has_begun:  # not the evaluation before the first step
            run.evaluated.add(self.state.global_step, metrics, tells=self.args.should_save)
        return metrics

    def _holdfast_between_steps(self) -> None:
        """Save if a save is due, or was requested in the step that has ended."""
        run = self._holdfast
        step, checkpointer = self.state.global_step, run.checkpointer
        if checkpointer is None or not (run.must_save or step != run.last_step):
            return
        is_new, run.last_step = step != run.last_step, step
        must_save, run.must_save = run.must_save, False
        metrics = run.evaluated.metrics_of(step)
        if must_save:  # again, because an evaluation at the end of the epoch may have followed
            self._holdfast_name_the_best()
        durable = checkpointer.every.durable
        if is_new:
            checkpointer.step(step)
            if durable is not None and step % durable == 0:
                run.last_saved = step
        if must_save and run.last_saved != step:
            self._holdfast_tell_of_gradients(step)
            checkpointer.save(step)
            run.last_saved = step
        if run.last_saved == step:
            tell_of_generated(self, step, notices_of(checkpointer).once)
        if _exchanges_weights(self.optimizer):
            wait_for_copies()
        if must_save and metrics:
            with _told(checkpointer, f"metrics of step {step} are not kept"):
                notes_of(checkpointer).measure(step, metrics)
        if must_save and self.state.best_global_step == step:
            with _told(checkpointer, f"the label 'best' names no step {step}"):
                notes_of(checkpointer).pin(step, "best")

    def _holdfast_tell_of_gradients(self, step: int) -> None:
        """Give a notice of a save at the end of a pass whose last batches have made no update."""
        run = self._holdfast
        if not self.accelerator.gradient_state.sync_gradients:
            notices_of(run.checkpointer).once(
                "gradients",
                f"{gradients_text(step)}; the last batches of a pass over the stream make no update: use "
                "save_strategy='steps', or a stream whose number of batches is a multiple of "
                "gradient_accumulation_steps",
            )

    def _load_best_model(self) -> None:
        best = self._holdfast_best_step()
        if best is None:
            super()._load_best_model()
            return
        self._holdfast.checkpointer.wait()
        try:
            load(self._holdfast.root, {"model": self.model_wrapped}, step=best)
        except errors.NotFound as error:
            errors.warn_user(f"the best model, of step {best}, is not loaded: {error}")

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Push as the Trainer does, without its own checkpoints, and without the root."""
        with _left_out(self._holdfast.root, self.args.output_dir):
            return super().push_to_hub(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        limit = self.args.save_total_limit
        if self._holdfast_best_step() is not None:
            # else the Trainer would look for the best among its own folders, and delete the others
            self.args.save_total_limit = None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit


@contextmanager
def _told(checkpointer: Checkpointer, what: str) -> Iterator[None]:
    """A block that labels or measures a step.  Reports a failure as that of a save is reported, with the
    text that this was not done; nothing for a step that does not exist, which has been reported."""
    try:
        yield
    except errors.NotFound:
        pass
    except (errors.StoreError, errors.FormatError) as error:
        notices_of(checkpointer).complain(error, f"{what}: {error}")


@contextmanager
def _left_out(root: str, folder: str) -> Iterator[None]:
    """In this block the Trainer uploads `folder` without the root in it.  Its own calls set the ignored
    patterns, so the patterns of the root are added in the Hub's API."""
    patterns = _patterns_of(root, folder)
    if not patterns:
        yield
        return
    own = trainer.hf_api

    class Api:
        """The Trainer's calls of the Hub, except that uploads of folders ignore more patterns."""

        def __getattr__(self, name: str) -> Any:
            return getattr(own(), name)

        def upload_folder(self, *, ignore_patterns: Any = None, **options: Any) -> Any:
            ignored = [ignore_patterns] if isinstance(ignore_patterns, str) else ignore_patterns
            return own().upload_folder(ignore_patterns=[*(ignored or ()), *patterns], **options)

    trainer.hf_api = Api
    try:
        yield
    finally:
        trainer.hf_api = own


def _patterns_of(root: str, folder: str) -> list[str]:
    """Return patterns, relative to `folder`, of the files of a root; empty if it is not in the folder."""
    root = root.removeprefix("file://")
    if "://" in root:
        return []
    place, within = Path(root).resolve(), Path(folder).resolve()
    if place == within:  # beside what is uploaded
        return [pattern for top in sorted(TOP_NAMES) for pattern in (top, f"{top}/*")]
    if not place.is_relative_to(within):
        return []
    return [f"{escape(place.relative_to(within).as_posix())}/*"]


class _HoldfastRun:
    """The state of the overrides, in one attribute of the Trainer, so that names do not clash with
    subclasses."""

    def __init__(self, output_dir: str, options: dict[str, Any]) -> None:
        root = options.pop("root", None) or os.path.join(output_dir, "holdfast")
        self.root = path_of(root, "HoldfastTrainer", "root")
        self.options = options
        self.checkpointer: Any = None
        self.found: Any = None
        """The step from which `train` goes on; set before it is restored."""
        self.must_save = self.is_restored = self.has_begun = False
        self.last_step = self.last_saved = 0
        self.data_pass = _PassOverData()
        self.evaluated = _Evaluated()
        self.losses: Any = None
        self.draws: Any = None


class _Evaluated:
    """The metrics of the step that was evaluated last, without values that a step does not accept."""

    def __init__(self) -> None:
        self._step = 0
        self._metrics: dict[str, float] = {}
        self._has_told = False

    def add(self, step: int, found: dict[str, Any], *, tells: bool) -> None:
        """Add the numbers of an evaluation to those of this step.  Values that are no metrics, which would
        make the save fail, are left out, with one warning."""
        numbers = {name: v for name, v in found.items() if isinstance(v, (int, float))}
        left_out = [name for name, value in numbers.items() if not _is_metric(name, value)]
        fit = {name: value for name, value in numbers.items() if name not in left_out}
        self._metrics, self._step = self.metrics_of(step) | fit, step
        if left_out and tells and not self._has_told:
            self._has_told = True
            shown = ", ".join(f"{name!r:.60}" for name in left_out)
            errors.warn_user(
                f"step {step} is saved without values of its evaluation that are no metrics: {shown}",
                hint="metrics are numbers, not True or False, by names of up to 100 characters",
            )

    def metrics_of(self, step: int) -> dict[str, float]:
        """Return the metrics of a step; none if another one was evaluated last."""
        return self._metrics if step == self._step else {}


def _own_state(found: Found) -> dict[str, Any]:
    """Return the Trainer's own state in a step.  UsageError if something else saved the step, FormatError
    if the state is damaged."""
    own = kept_by("the Trainer", found.extras, "trainer", found.step)
    try:
        saved = json.loads(own["json"])
        return {**saved, "global_step": int(saved["global_step"]),
                "best_model_checkpoint": saved["best_model_checkpoint"]}  # fmt: skip
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise errors.FormatError(
            f"step {found.step}: the Trainer's own state is damaged: {error!r}"
        ) from None


def _is_metric(name: str, value: float) -> bool:
    try:
        check_metrics({name: value}, "HoldfastTrainer")
    except errors.UsageError:
        return False
    return True


class _PassOverData:
    """The pass over the training data that is under way, for streams without length."""

    def __init__(self, *, is_stream: bool = False) -> None:
        self.is_stream = is_stream
        self.data: Any = None
        self.loader: Any = None
        self.number = self.began = 0
        """Its number, and what `global_step` was when it began."""
        self.is_over = False

    def begin(self, number: int, step: int) -> None:
        self.number, self.began, self.is_over = number, step, False

    def go_on(self, is_whole: bool, loaders: Any) -> None:
        """Note that batches for a step were fetched; `is_whole`: all batches that the step needs."""
        if self.is_stream:
            ended = (
                d.end_of_dataloader for d in loaders if d is not None and d.dataset is self.data
            )
            self.is_over |= not is_whole or any(ended)


class HoldfastTrainer(_Holdfast, Trainer):
    """The Trainer, with holdfast's checkpoints; see `with_holdfast` for a Trainer of your own."""


def with_holdfast(trainer_class: type[Trainer]) -> type[Trainer]:
    """Return a subclass of this Trainer class that checkpoints with holdfast."""
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise unfit(
            "with_holdfast", "trainer_class", trainer_class, "a class of transformers' Trainers"
        )
    return type(f"Holdfast{trainer_class.__name__}", (_Holdfast, trainer_class), {})


_OF_WEIGHTS = ("save_model", "_save", "_load_from_checkpoint")
_OF_FOLDERS = (
    "_save_checkpoint",
    *_OF_WEIGHTS,
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
)
"""The Trainer's methods that write the folder of a checkpoint, or read it."""


_LIBRARIES = ("transformers", "trl", "sentence_transformers")
"""Packages whose classes write weights in another form; a step has all of the model."""


def _not_called(trainer_class: type) -> list[str]:
    """Return the overrides of `_OF_FOLDERS` that are not called, but those of weights in `_LIBRARIES`."""
    found, comes_after = [], False
    for base in trainer_class.__mro__:
        if base is Trainer:
            break
        if base is _Holdfast:
            comes_after = True
            continue
        known = base.__module__.partition(".")[0] in _LIBRARIES
        for name in _OF_FOLDERS:
            is_called = not comes_after and name in vars(_Holdfast)
            is_harmless = known and name in _OF_WEIGHTS
            if name in vars(base) and not (is_called or is_harmless):
                found.append(f"{base.__name__}.{name}()")
    return found


_UPLOADS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "WandbCallback": (lambda c: _of(c, "_log_model") == "checkpoint", "WANDB_LOG_MODEL=end"),
    "MLflowCallback": (lambda _: _is_true("HF_MLFLOW_LOG_ARTIFACTS"), "HF_MLFLOW_LOG_ARTIFACTS=0"),
    "NeptuneCallback": (
        lambda c: _of(c, "_log_checkpoints"),
        "NeptuneCallback(log_checkpoints=None)",
    ),
    "ClearMLCallback": (
        lambda c: _is_true("CLEARML_LOG_MODEL", default=not _of(c, "_clearml").Task.current_task()),
        "CLEARML_LOG_MODEL=FALSE",
    ),
    "FlyteCallback": (lambda c: c.sync_checkpoints, "FlyteCallback(sync_checkpoints=False)"),
    "DVCLiveCallback": (
        lambda c: _of(c, "_log_model") == "all",
        "HF_DVCLIVE_LOG_MODEL=TRUE, not all",
    ),
}
"""By the class of a callback that may upload a checkpoint's folder in on_save(): a function that states
whether an instance does, and the setting that turns it off."""


def _of(callback: Any, name: str) -> Any:
    return errors.need("transformers", callback, name)[0]


def _is_true(variable: str, *, default: bool = False) -> bool:
    return os.environ.get(variable, str(default)).upper() in {"1", "ON", "YES", "TRUE"}


def _refuse_uploads(callbacks: Sequence[Any], *, is_first: bool) -> None:
    """UsageError, on all ranks, for a callback that uploads the folder of a checkpoint.  The first rank
    decides, because callbacks act there alone.  Collective."""
    mine = next(filter(None, map(_upload_of, callbacks)), None) if is_first else None
    (found,) = broadcast_object_list([mine])
    if found is not None:
        name, way_out = found
        raise errors.UsageError(
            f"HoldfastTrainer: {name} uploads the folder of each checkpoint, which holdfast does not make",
            hint=f"{way_out}; holdfast={{'upload': 's3://bucket/run'}} copies steps to a bucket",
        )


def _upload_of(callback: Any) -> tuple[str, str] | None:
    """Return the class name and the way out if a callback uploads the folder of a checkpoint; else None."""
    for kind in type(callback).__mro__:
        if kind.__module__ == "transformers.integrations.integration_utils":
            uploads, way_out = _UPLOADS.get(kind.__name__, (None, ""))
            if uploads is not None and uploads(callback):
                return kind.__name__, way_out
    return None


def _exchanges_weights(optimizer: Any) -> bool:
    """True for an optimizer, such as a schedule-free one, whose `train()` changes weights in place: the
    Trainer calls it after an evaluation, before the next step."""
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's has such a method in any case
    return callable(getattr(inner, "train", None))


def _step_in(resume: Any) -> int:
    """Return the step that a number, or a name such as `checkpoint-500`, stands for."""
    if isinstance(resume, (str, os.PathLike)):
        number = re.search(r"(\d+)/*$", os.fspath(resume))
        if number is None:
            raise errors.UsageError(
                f"train(resume_from_checkpoint={os.fspath(resume)!r}): there is no such folder, and the "
                "name does not end with the number of a step",
                hint="give True for the newest step, or the number of a step",
            )
        return int(number[1])
    return step_of(resume, "train", "resume_from_checkpoint")


# -- what is saved beside the model ------------------------------------------------------------------


class _TrainerProgress:
    """The TrainerState, rank 0's for all ranks, because the times that ranks measure differ."""

    on_resize = "rank0"

    def __init__(self, trainer: Any) -> None:
        self._of = trainer
        self._logged: list[str] = []
        """Entries of the log that will not change any more, as text."""
        self._logged_by: Any = None
        """The TrainerState that has them: an attempt with a smaller batch begins another one."""

    def state_dict(self) -> dict[str, Any]:
        state, control = self._of.state, self._of.control
        values = {f.name: getattr(state, f.name) for f in fields(state)}
        for name in ("is_local_process_zero", "is_world_process_zero", "log_history"):
            del values[name]
        callbacks = [*self._of.callback_handler.callbacks, control]
        exported = [c for c in callbacks if isinstance(c, ExportableState)]
        values["stateful_callbacks"] = TrainerState(stateful_callbacks=exported).stateful_callbacks
        if self._logged_by is not state:
            self._logged, self._logged_by = [], state
        del self._logged[max(len(state.log_history) - 8, 0) :]
        self._logged += [json.dumps(entry) for entry in state.log_history[len(self._logged) :]]
        text = json.dumps(values)
        log = ", ".join(self._logged)
        return {
            "json": f'{text[:-1]}, "log_history": [{log}]}}',
            "position": self._of._holdfast_position,
            "data": self._data(),
        }

    def _data(self) -> dict[str, Any]:
        """Return the units of a place in the data; `update` is the samples of one update of all ranks."""
        loader = self._of._holdfast.data_pass.loader
        found = {} if loader is None else data_in(loader)
        if (batch := found.pop("global_batch", None)) is not None:
            found["update"] = batch * self._of.args.gradient_accumulation_steps
        return found

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Warn if the place in the data, which the Trainer has computed from the number of updates, means
        another one with this data.  The Trainer got the state itself before the model was prepared."""
        if "data" in saved and not self._of.args.ignore_data_skip:
            tell_other_data("train_dataset", saved["data"], self._data())


class _Losses:
    """The sums of each rank since the last log, so that the next log is that of an uninterrupted run."""

    on_resize = "fresh"

    def __init__(self, trainer: Any) -> None:
        self._of = trainer
        self._saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        of = self._of
        if self._saved is not None:  # it is saved again before training goes on
            return self._saved
        return {
            "sum": float(getattr(of, "_tr_loss", 0.0)),
            "logged": getattr(of, "_globalstep_last_logged", of.state.global_step),
            "flos": of.current_flos,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._saved = saved

    def put_back(self) -> None:
        """Add the restored sums, once the Trainer has set its sums to zero."""
        saved, self._saved, of = self._saved, None, self._of
        errors.need("transformers", of, "_globalstep_last_logged", "_total_loss_scalar", "_tr_loss")
        if saved is not None:
            of._tr_loss += saved["sum"]
            of._globalstep_last_logged, of.current_flos = saved["logged"], saved["flos"]
            # the loss of this call to train() is of its own steps
            of._total_loss_scalar = -nested_gather(of._tr_loss, of.args.parallel_mode).mean().item()
