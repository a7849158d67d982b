"""torchtitan's checkpoint manager with checkpoints by holdfast.

    checkpoint=HoldfastCheckpointManager.Config(enable=True, interval=500, memory_every=10)

The folder is a root of holdfast: a step that is due is copied when `save` is called, and written while
training goes on.  The manager is a subclass of torchtitan's, which reads and writes the rest: Hugging
Face's files, by the model's adapter, and torchtitan's own steps, from which a run goes on until holdfast
has saved a step in the folder.

    a loader's iterator is made    draws a seed from the default generator, after the restore
    its first batch is fetched     needs the restored generators, so they are restored again right before;
                                   for other loaders, before the first forward pass
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import distributed as dist
from torchtitan.components.checkpointer.base import DATALOADER, MODEL, OPTIMIZER
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.tools import filesystem

from holdfast import Checkpointer, Delta, Every, Found, Keep, Memory, errors, load, save, steps
from holdfast import open as open_step

errors.need(
    "torchtitan", CheckpointManager,
    "_close", "_create_checkpoint_id", "_find_load_step", "_load", "_save", "_save_last_step",
    "_wait_for_saving",
)  # fmt: skip

__all__ = ["HoldfastCheckpointManager"]


class HoldfastCheckpointManager(CheckpointManager):
    """Saves into, and restores from, a root of holdfast's."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's options, and these."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """`disabled`: saving blocks until the commit.  The other two are the same, because holdfast always
        copies into pinned memory."""

        memory_every: int = 0
        """Number of steps between snapshots in the memory of the hosts; 0 for none."""

        record_every_step: bool = False
        """True if every step is recorded, so that a restart loses none."""

    save_future: Future[None] | None
    ckpt: Checkpointer | None = None
    """The Checkpointer; None with `load_only`, or if checkpoints are disabled."""
    _to_forget: list[Callable[[], Any]]
    """Calls that remove the hooks that wait for the first batch."""

    def __init__(self, config: Any, *, ft_manager: Any = None, **parts: Any) -> None:
        if ft_manager is not None and ft_manager.enabled:
            raise errors.UsageError(
                "ft_manager: replicas of torchft are groups of ranks that join and leave, but holdfast "
                "saves over all ranks of a job",
                hint="use torchtitan's TorchFTCheckpointManager with torchft",
            )
        super().__init__(replace(config, async_mode="disabled", keep_latest_k=0), **parts)
        self.config, self._to_forget = config, []
        if not self.enable:
            return
        optimizers = list(
            parts["optimizers"].optimizers
        )  # their container has no states of its own
        self._live = {key: value for key, value in self.states.items() if value is not None}
        self._live |= {
            MODEL: parts["model_parts"],
            OPTIMIZER: optimizers if optimizers[1:] else optimizers[0],
        }
        self._rules = {key: "rank0" for key in self._live.keys() - {MODEL, OPTIMIZER, DATALOADER}}
        if not config.load_only:
            memory, delta = config.memory_every or None, 1 if config.record_every_step else None
            self.ckpt = Checkpointer(
                self.folder,
                self._live,
                every=Every(config.interval, memory, delta),
                memory=Memory() if memory else None,
                delta=Delta() if delta else None,
                keep=Keep(last=config.keep_latest_k) if config.keep_latest_k else None,
                when_busy="queue",
                on_resize=self._rules,
                anew=True,
            )

    def __del__(self) -> None:
        """Do nothing, unlike torchtitan's: ranks close together, not when garbage is collected."""

    # -- loading

    def _load(self, step: int = -1) -> bool:
        wanted = None if step == -1 else step
        if wanted is not None and self._is_torchtitans(wanted):
            return bool(super()._load(step))
        found = self.ckpt.find() if self.ckpt is not None and wanted is None else None
        newest = wanted
        if wanted is None and self._loads_part:
            with suppress(errors.NotFound):  # no folder yet: a first run with `load_only`
                newest = max(steps(self.folder), default=None)
        elif found is not None:
            newest = found.step
        if newest is None:
            self._tell_given_up(found, None)
            return self._load_initial()
        if newest == 0:  # a seed
            self._tell_given_up(found, load(self.folder, {MODEL: self._live[MODEL]}, step=0))
        elif self.ckpt is None or self._loads_part:
            self._tell_given_up(found, self._load_part_of(self.folder, wanted))
        else:
            self.ckpt.restore(wanted)
            self._restore_generators_later()
        return True

    @property
    def _loads_part(self) -> bool:
        """True if only full steps of the folder are loaded: a restore from memory or records covers all of
        the state."""
        return self.ckpt is None or bool(self.exclude_from_loading)

    def _tell_given_up(self, found: Found | None, taken: int | None) -> None:
        """Warn if memory or records have a later step than the full step that is loaded."""
        begin = taken or 0
        if found is None or found.step <= begin:
            return
        place = "records" if found.replays else found.tier
        newest = "there is none" if taken is None else f"the newest is step {taken}"
        _warn_on_first_rank(
            f"exclude_from_loading loads full steps only, and {newest}; {self.folder} reaches step "
            f"{found.step} by {place}: {found.step - begin} steps are given up",
            hint="without exclude_from_loading the run goes on from the newest step of all tiers",
        )

    def _is_torchtitans(self, step: int) -> bool:
        """True if only torchtitan has saved a step.  If holdfast has saved it, too, warn that holdfast's is
        loaded, because it is of the run that went on in the folder."""
        path = self._create_checkpoint_id(step)
        if not filesystem.isfile(filesystem.join(path, ".metadata")):
            return False
        if not self._has(step):
            return True
        _warn_on_first_rank(
            f"load_step={step} loads holdfast's step {step} of {self.folder}, and not {path}, which "
            "torchtitan has saved",
            hint="to begin with torchtitan's, use another folder, and name the step by initial_load_path",
        )
        return False

    def _has(self, step: int) -> bool:
        """True if holdfast has the step in a place that `_load` reads.  Collective."""
        if self.ckpt is None or self._loads_part:
            return step in steps(self.folder)
        try:
            return self.ckpt.find(step) is not None
        except (errors.NotFound, errors.NotRecoverable):
            return False

    def _is_of_weights(self, path: str) -> bool:
        """True for a step of weights alone, as torchtitan saves its last one: names are the model's own,
        without a key before them."""
        with open_step(path) as step:
            if step.format != "dcp":
                return False
            own = {name for part in self._live[MODEL] for name in part.state_dict()}
            return not own.isdisjoint(step.names())

    def _load_initial(self) -> bool:
        """Load torchtitan's own newest step of the folder; if there is none, the initial checkpoint."""
        path = self.initial_load_path
        if path is None or self.initial_load_in_hf or self._find_load_step() != -1:
            return bool(super()._load())
        root, step = _place_and_step(path)
        if step is None and (not steps(root) or self._is_of_weights(root)):
            return bool(super()._load())
        if self.initial_load_model_only:
            load(root, {MODEL: self._live[MODEL]}, step=step)
        else:
            self._load_part_of(root, step)
        return True

    def _load_part_of(self, root: str, step: int | None) -> int:
        """Load the keys that are not excluded, without the generators, as torchtitan does; return the
        step."""
        for key in self.exclude_from_loading:
            if key not in self.states:
                raise errors.UsageError(
                    f"exclude_from_loading: the state has no {key!r}",
                    hint=f"it has {', '.join(map(repr, self._live))}",
                )
        excluded = self.exclude_from_loading
        wanted = {key: value for key, value in self._live.items() if key not in excluded}
        rules = {key: rule for key, rule in self._rules.items() if key in wanted}
        return load(root, wanted, step=step, on_resize=rules)

    def _restore_generators_later(self) -> None:
        """Restore the generators again before the first batch, at the latest before the first forward
        pass."""
        loader: Any = self.states.get(DATALOADER)
        self._forget_to_restore()
        make = getattr(loader, "_get_iterator", None)

        def put_back(*_: Any) -> None:
            if not self._to_forget:
                return  # they were restored already
            self._forget_to_restore()
            with suppress(
                errors.UsageError
            ):  # saved on another number of ranks: generators stay as they are
                self.ckpt.restore_rng()  # type: ignore[union-attr]

        def made() -> Any:
            return _before_its_first_batch(make(), put_back)  # type: ignore[misc]

        hooks = [part.register_forward_pre_hook(put_back) for part in self._live[MODEL]]
        self._to_forget = [hook.remove for hook in hooks]
        if make is not None:
            loader._get_iterator = made
            self._to_forget.append(lambda: vars(loader).pop("_get_iterator", None))
        if getattr(loader, "_iterator", None) is not None:  # made by state_dict()
            _before_its_first_batch(loader._iterator, put_back)

    def _forget_to_restore(self) -> None:
        while self._to_forget:
            self._to_forget.pop()()

    # -- saving

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.ckpt is None:
            return False
        if curr_step == 0:  # create_seed_checkpoint
            save(self.folder, {MODEL: self._live[MODEL]}, step=0)
            return True
        exports = last_step and self.last_save_model_only
        is_regular = curr_step % self.interval == 0
        due = is_regular or (last_step and not exports)
        due = due or (curr_step == 1 and self.enable_first_step_checkpoint)
        if due and not is_regular:
            self.ckpt.save(curr_step)
        else:
            self.ckpt.step(curr_step)
        if due:
            self.save_future = Future()  # torchtitan only checks that it exists
        if last_step or self.config.async_mode == "disabled":
            self.ckpt.wait()
        if exports:
            self._save_last_step(curr_step)
        return due or exports

    def dcp_save(self, state_dict: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Save the cast weights of the last step: as Hugging Face's files into the folder, by torchtitan,
        or as a step of the root `<folder>-export`."""
        if options.get("to_hf"):
            return super().dcp_save(state_dict, *args, **options)
        step = int(options["checkpoint_id"].rpartition("-")[2])
        return save(f"{self.folder}-export", {MODEL: dict(state_dict)}, step=step)

    def _wait_for_saving(self) -> None:
        self.save_future = None
        if self.ckpt is not None:
            self.ckpt.wait()

    def _close(self) -> None:
        super()._close()
        if self.ckpt is not None:
            self.ckpt.__exit__(*sys.exc_info())


def _warn_on_first_rank(text: str, hint: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        errors.warn_user(text, hint=hint)


def _place_and_step(path: str) -> tuple[str, int | None]:
    """A path, and None; or the root and the step that it names, as `runs/gpt@1000` does, if no folder is
    called so, and of a bucket, where there are no folders, if that step lies there."""
    root, at, step = path.rpartition("@")
    if at and step.isdecimal():
        try:
            if not steps(path) and int(step) in steps(root):
                return root, int(step)
        except errors.NotFound:
            return root, int(step)
    return path, None


def _before_its_first_batch(iterator: Any, call: Callable[[], None]) -> Any:
    """Make a loader's iterator call `call` once before its first fetch; return the iterator."""
    fetch = getattr(type(iterator), "_next_data", None)
    if fetch is None:
        return iterator

    def first() -> Any:
        vars(iterator).pop("_next_data", None)
        call()
        return fetch(iterator)

    iterator._next_data = first
    return iterator
