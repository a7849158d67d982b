"""DeepSpeed: an engine whose `save_checkpoint` and `load_checkpoint` are holdfast's.

    engine, *_ = deepspeed.initialize(...)
    with attach(engine, "runs/gpt", every=100) as ckpt:
        path, client_state = engine.load_checkpoint("runs/gpt")
        ...; engine.backward(loss); engine.step()                       # saves each 100 steps
        engine.save_checkpoint("runs/gpt", client_state={"epoch": 3})   # and at a call

DeepSpeed makes checkpoints by methods of the engine, which every trainer above it calls, and by
`CheckpointEngine`, which gets one file after another of gathered values.  Only the methods know the engine,
so that each rank can write its own share, and another layout can load it.  So the methods of the one
instance are replaced; DeepSpeed itself is not patched.

A step of the root is an optimizer step of the engine (`global_steps`).  In a folder that is not the root,
`save_checkpoint` writes, after the commit, the files that trainers look for: `latest`, and a folder with
the tag's name, in which `holdfast.json` names the root and the step.  A tag that is not `global_stepN`
keeps its step by a label: the tag itself or, in another folder, one made from folder and tag.  DeepSpeed
reads the folders that it has written itself.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import xxhash

import holdfast
from holdfast import Checkpointer, errors, store, trainable_only
from holdfast.extend import (
    check_engine,
    check_root,
    engine_counters,
    give_label,
    go_on_from,
    labels_of,
    newest_where,
    notes_of,
    path_of,
    put_engine_counters,
    unfit,
)
from holdfast.integrations.native import run_of, tell_newer

(tree_map,) = errors.need("torch", "torch.utils._pytree", "tree_map")

if TYPE_CHECKING:
    from holdfast import Auto, Delta, Every, Found, Keep, Memory, Save

__all__ = ["attach"]

_POINTER = "holdfast.json"
"""File in the folder of a tag, in a folder that is not the root."""
_LATEST = "latest"
"""DeepSpeed's file that names the newest tag of a folder."""
CLIENT = "client_state"
"""Key of the caller's values in a checkpoint."""
_PLACES = {"durable": "the root", "memory": "memory", "upload": "the home behind the root"}
"""Words for the places of steps."""
_TAG = re.compile(r"global_step(\d+)")

T = TypeVar("T")

Loaded = tuple[str | None, dict[str, Any] | None]


def attach(
    engine: Any,
    root: str | os.PathLike[str],
    *,
    every: Every | Auto | int | None = None,
    memory: Memory | None = None,
    delta: Delta | None = None,
    keep: Keep | None = None,
    client_state: Callable[[], dict[str, Any]] | None = None,
    **options: Any,
) -> Checkpointer:
    """Make `engine.save_checkpoint` and `engine.load_checkpoint` use `root`; return the Checkpointer behind
    them, which the caller must close.  Collective: call it on every rank, after `deepspeed.initialize`.

    `every`, `memory`, `delta`, `keep` and `options` are those of `holdfast.Checkpointer`.  With `every`,
    the engine saves at the end of its own `step()` (of a pipeline, `train_batch()`); with `sigterm_s`, it
    checks for SIGTERM there.  `client_state`: called at such a save; `load_checkpoint` returns its result.

    `save_checkpoint` blocks until buffers and plain values are copied; the rest is written in the
    background. UsageError for an engine that cannot be saved completely.
    """
    check_engine(engine, "integrations.deepspeed.attach")  # not only at the first save
    if "save_checkpoint" in vars(engine):
        raise errors.UsageError(
            "this engine is attached already",
            hint="call attach once for an engine, and keep the Checkpointer that it returns",
        )
    if client_state is not None and not callable(client_state):
        raise unfit("integrations.deepspeed.attach", "client_state", client_state, "a function")
    root = path_of(root, "integrations.deepspeed.attach", "root")
    check_root(root)
    _refuse_efficiency(engine)
    client = ClientState(engine, client_state)
    state: dict[str, Any] = {"model": engine, CLIENT: client}
    if engine.optimizer is not None:
        state["optim"] = engine.optimizer
    if engine.lr_scheduler is not None:
        state["sched"] = engine.lr_scheduler
    ckpt = Checkpointer(
        root, state, every=every, memory=memory, delta=delta, keep=keep, **{"anew": True, **options}
    )
    steps = every is not None or options.get("sigterm_s") is not None
    _replace_methods(AttachedEngine(engine, root, ckpt, client, steps=steps))
    return ckpt


def _refuse_efficiency(engine: Any) -> None:
    """UsageError for features of DeepSpeed's data efficiency whose state an attached engine does not
    save."""
    samples = engine.training_dataloader is not None and engine.curriculum_learning_enabled()
    if samples or engine.random_ltd_enabled():
        what = "curriculum learning" if samples else "random-LTD"
        whose = "training_dataloader.data_sampler" if samples else "random_ltd_scheduler"
        raise errors.UsageError(
            f"this engine uses {what}, whose state an attached engine does not save",
            hint=f"in a loop of your own, put engine.{whose} into the state of a Checkpointer",
        )


def _replace_methods(attached: AttachedEngine) -> None:
    """Replace the methods of this engine by those of `attached`, with the same signatures."""
    engine = attached.engine
    stepping = "train_batch" if engine.pipeline_parallelism else "step"
    step = getattr(engine, stepping)

    @wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps != before:
            attached.stepped()
        return result

    @wraps(engine.save_checkpoint)
    def save_checkpoint(
        save_dir: str,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        return attached.save(
            save_dir,
            tag,
            dict(client_state or {}),
            latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
        )

    @wraps(engine.load_checkpoint)
    def load_checkpoint(
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Loaded:
        wanted = Wanted(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
        )
        return attached.load(load_dir, tag, wanted, custom_load_fn)

    setattr(engine, stepping, stepped)
    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


class Wanted(NamedTuple):
    """The parts of a checkpoint, besides weights, that a call of `load_checkpoint` asks for."""

    strict: bool
    optimizer: bool
    scheduler: bool
    counters: bool


class ClientState:
    """The caller's values in a checkpoint, as an object of the state; rank 0's, as in DeepSpeed."""

    on_resize = "rank0"

    def __init__(self, engine: Any, ask: Callable[[], dict[str, Any]] | None) -> None:
        self._engine = engine
        self._ask = ask
        self._given: dict[str, Any] | None = None
        """The values of a call of `save_checkpoint`; None if the engine saves by itself."""
        self._made: list[dict[str, Any]] = []
        """The entries of the last `state_dict`, one for each call."""
        self._restored: list[dict[str, Any]] = []
        self._kept: tuple[int, list[dict[str, Any]]] = (-1, [])
        """The step that was saved or restored last, and its entries."""
        self.leaves_out = False
        """True if frozen weights are not saved."""
        self.counters: dict[str, int] = {}

    def give(self, values: dict[str, Any], *, latest: bool, folder: str, tag: str) -> None:
        """Store `values` with the next save, under a tag in a folder; "" is the root."""
        self._given = {"values": _copied(values), "latest": latest, "folder": folder, "tag": tag}

    def clear(self) -> None:
        """Let the next save be one of the engine's own."""
        self._given, self._made = None, []

    def saved(self, step: int) -> None:
        """Let a later save of the same step, which replaces it, keep its entries."""
        if self._made:
            self._kept = step, self._made

    def goes_on(self, step: int) -> None:
        """Let a later save of the restored step keep its entries."""
        self._kept = step, self._restored

    def state_dict(self) -> dict[str, Any]:
        given, (step, before) = self._given, self._kept
        if given is None:
            values = {} if self._ask is None else _copied(self._ask())
            given = {"values": values, "latest": True}
        if step != self._engine.global_steps:
            before = []
        replaced = [one for one in before if _place_of(one) == _place_of(given)]
        others = [one for one in before if _place_of(one) != _place_of(given)]
        is_latest = given["latest"] or any(one["latest"] for one in replaced)
        self._made = [*others, {**given, "latest": is_latest}]
        return {
            "saves": self._made,
            "latest": any(one["latest"] for one in self._made),
            "trainable_only": self.leaves_out,
            "counters": engine_counters(self._engine),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._restored, self.counters = _saves_of(saved), dict(saved["counters"])

    def restored(self, folder: str, tag: str | None) -> dict[str, Any]:
        """Return the values stored under a tag in a folder; without a tag, those of the newest save with
        `save_latest`.  Also finds a folder that was moved, or a step by its number."""
        found = self._restored
        saves = [one for one in found if tag is not None and _place_of(one) == (folder, tag)]
        saves = saves or [one for one in found if one["latest"]] or found
        own = [one for one in saves if _place_of(one)[0] == folder]
        return _copied((own or saves)[-1]["values"]) if saves else {}


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy: a later save of the same step writes these values again, and by then the caller
    may have changed the originals."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone()
        try:
            return deepcopy(leaf)
        except Exception:  # the save refuses it by its name
            return leaf

    return {key: tree_map(copied, value) for key, value in values.items()}


def _saves_of(client: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of a step, one for each call of `save_checkpoint`; steps of older versions have
    one."""
    saves: list[dict[str, Any]] = client.get("saves", [client])
    return [{"latest": True, **one} for one in saves]


def _place_of(save: dict[str, Any]) -> tuple[str, str | None]:
    return save.get("folder", ""), save.get("tag")


class Pointed(NamedTuple):
    """The step to which a tag in a folder points."""

    root: str
    step: int
    tag: str
    run: int | None
    """The run that has saved it; None if unknown."""


class Pending(NamedTuple):
    """A save whose pointer is written once it is committed."""

    save: Save
    folder: str
    tag: str
    latest: bool


@dataclass
class AttachedEngine:
    """An engine, and the Checkpointer that keeps its checkpoints."""

    engine: Any
    root: str
    ckpt: Checkpointer
    client: ClientState
    steps: bool
    """True if `Checkpointer.step` has to be called at each step, for `every` or `sigterm_s`."""
    pending: list[Pending] = field(default_factory=list)
    unwritten: list[Pending] = field(default_factory=list)
    """Committed saves whose pointers could not be written."""
    labelled: dict[str, tuple[str, str]] | None = None
    """The folder and the tag of each label whose pointer was written; None until they are looked up."""
    has_warned_of_frozen: bool = False

    def __post_init__(self) -> None:
        own = type(self.engine).load_checkpoint
        self._by_deepspeed: Callable[..., Loaded] = own.__get__(self.engine)
        self.ckpt.on_commit(lambda step: self._point())

    # -- saving -----------------------------------------------------------------------------------

    def stepped(self) -> None:
        """Called after each optimizer step."""
        if self.steps:
            step, every = self.engine.global_steps, self.ckpt.every
            self.client.clear()
            self.ckpt.step(step)
            if any(n is not None and step % n == 0 for n in (every.durable, every.memory)):
                self.client.saved(step)
        self._point()

    def save(
        self,
        folder: str,
        tag: Any,
        client_state: dict[str, Any],
        *,
        latest: bool,
        exclude_frozen: bool,
    ) -> bool:
        """The new `save_checkpoint`."""
        if not folder:
            raise ValueError(f"save_dir must be a non-empty string, got {folder!r}")
        if exclude_frozen:
            self._leave_out_frozen()
        step = self.engine.global_steps
        name = f"global_step{step}" if tag is None else str(tag)
        is_root = self._is_root(folder)
        if is_root:
            _check_label(name, step)
        label = name if is_root else _label_of(folder, name)
        place = self._place(folder)
        self.client.give(client_state, latest=latest, folder=place, tag=name)
        try:
            save = self.ckpt.save(step)
            self.client.saved(step)
        finally:
            self.client.clear()
        if not is_root:  # absolute: a script may change its working directory before the commit
            self.pending.append(Pending(save, place, name, latest))
        if _TAG.fullmatch(name) is None:
            self._pin(step, label)
        self._point(again=True)
        return True

    def _pin(self, step: int, label: str) -> None:
        """Let a label keep a step; warn if it cannot be written, because the save goes on."""
        try:
            notes_of(self.ckpt).pin(step, label)
        except errors.NotFound:  # the save has failed, and reports it
            pass
        except errors.HoldfastError as error:
            errors.warn_user(
                f"step {step} cannot get its label {label!r}, so `keep` may delete it: {error}"
            )

    def _leave_out_frozen(self) -> None:
        """Write, and expect, no frozen weights from now on.  Warn once at ZeRO stage 3, where they are
        written all the same."""
        if self.client.leaves_out or self.has_warned_of_frozen:
            return
        if self.engine.zero_optimization_partition_weights():
            self.has_warned_of_frozen = True
            errors.warn_user(
                "exclude_frozen_parameters: at ZeRO stage 3 frozen weights are saved all the same"
            )
            return
        trainable_only(self.engine.module)
        self.client.leaves_out = True

    def _point(self, *, again: bool = False) -> None:
        """On rank 0: write the pointers to committed steps.  `again`: also those that could not be written
        before, in their order, so that the newest is written last."""
        done = [one for one in self.pending if one.save.done()]
        self.pending = [
            one for one in self.pending if one not in done
        ]  # others may have ended since
        if again:
            done, self.unwritten = [*self.unwritten, *done], []
        if self.engine.global_rank == 0:
            for one in done:
                if one.save.error is None:
                    self._point_to(one)
            if again:
                self._let_go()

    def _point_to(self, one: Pending) -> None:
        """Write a pointer, or keep it for the next save or load if it cannot be written."""
        if one.latest:  # unwritten pointers are no longer the latest
            self.unwritten = [
                older._replace(latest=older.latest and older.folder != one.folder)
                for older in self.unwritten
            ]
        step = one.save.step
        pointed = Pointed(self.root, step, one.tag, run_of(self.root, step))
        if not _has_written(pointed, one.folder, one.latest):
            self.unwritten.append(one)
        elif _TAG.fullmatch(one.tag) is None:
            self._labelled_folders()[_label_of(one.folder, one.tag)] = one.folder, one.tag

    def _labelled_folders(self) -> dict[str, tuple[str, str]]:
        """Return `labelled`, with labels of earlier runs whose folders exist: a missing folder may be on
        another machine, or have been moved."""
        if self.labelled is None:
            self.labelled = {}
            try:
                steps = set(holdfast.steps(self.root))
                for label, step in labels_of(self.root).items():
                    extras = holdfast.open(self.root, step=step).extras if step in steps else {}
                    for folder, tag in map(_place_of, _saves_of(extras.get(CLIENT, {}))):
                        if not folder or tag is None or label != _label_of(folder, tag):
                            continue
                        if Path(folder, tag).exists():
                            self.labelled[label] = folder, tag
            except (errors.HoldfastError, OSError) as error:
                errors.warn_user(
                    f"{self.root}: labels of earlier runs cannot be looked up, so their steps stay even if "
                    f"their folders are deleted: {error}"
                )
        return self.labelled

    def _let_go(self) -> None:
        """Remove the labels whose folders were deleted since, as trainers delete old ones, so that `keep`
        deletes the steps, too."""
        coming = {(one.folder, one.tag) for one in (*self.pending, *self.unwritten)}
        labelled = self._labelled_folders()
        for label, (folder, tag) in list(labelled.items()):
            try:
                is_there = Path(folder, tag).exists()
            except OSError:  # raising on this rank only would leave the others waiting
                is_there = True
            if (folder, tag) not in coming and not is_there:
                del labelled[label]
                try:
                    give_label(self.root, label, None)
                except errors.HoldfastError as error:
                    errors.warn_user(
                        f"{Path(folder, tag)} is deleted, but its step stays, because the label {label!r} "
                        f"cannot be removed: {error}"
                    )

    # -- loading ----------------------------------------------------------------------------------

    def load(self, folder: str, tag: Any, wanted: Wanted, custom_load_fn: Any) -> Loaded:
        """The new `load_checkpoint`."""
        self.ckpt.wait()
        self._point(again=True)
        is_root, tag = self._is_root(folder), None if tag is None else str(tag)
        found = self.ckpt.find() if is_root else None
        is_newest = tag is None
        if is_newest and found is None:
            tag = self._on_the_first(lambda: _latest_of(folder))
        elif is_newest and found is not None and self.engine.global_rank == 0:
            _tell_of_deepspeeds(folder, found.step)
        latest = tag
        has_own = found is not None if is_root else None
        if self._on_the_first(lambda: self._is_for_deepspeed(folder, tag, has_own)):
            return self._load_by_deepspeed(folder, tag, wanted, custom_load_fn)
        if custom_load_fn is not None:
            raise errors.UsageError(
                "load_checkpoint(custom_load_fn=): holdfast itself puts each value into the model, "
                "without a function of yours",
                hint="leave it out, or load by holdfast.load(root, {'model': engine}, only=...)",
            )
        restored: int | None
        is_own = is_root
        if not is_root:
            newest = self._on_the_first(lambda: self._step_in(folder, tag, is_newest))
            if newest is None:
                return None, None
            restored, tag = self._load_pointed(folder, newest, wanted), newest.tag
            is_own = _same(newest.root, self.root)
            if self.engine.global_rank == 0 and newest != self._pointed(folder, latest):
                _has_written(newest, folder, is_newest)
        elif tag is None:
            restored = self._load_newest(found, wanted)
        else:
            restored = self._load_own(self._step_of(tag), wanted)
        if restored is None:
            return None, None
        if wanted.counters and is_own:
            self.client.goes_on(restored)
        path = os.path.join(folder, tag or f"global_step{restored}")
        return path, self.client.restored(self._place(folder), tag)

    def _is_for_deepspeed(self, folder: str, tag: str | None, has_own: bool | None) -> bool:
        """True if DeepSpeed itself must load.  `has_own`: for the root, True if it has steps; None for
        another folder."""
        if has_own is None:
            has_own = _is_pointer(folder, tag)
        is_universal = self.engine.load_universal_checkpoint() and not has_own
        return bool(is_universal) or _is_deepspeeds(folder, tag)

    def _on_the_first(self, read: Callable[[], T]) -> T:
        """Return rank 0's result of `read` on all ranks, or raise its error: only rank 0 writes
        pointers."""
        found: list[Any] = [None]
        if self.engine.global_rank == 0:
            try:
                found = [read()]
            except Exception as error:
                is_ours = isinstance(error, errors.HoldfastError)
                said = f"{type(error).__name__}: {error}"
                found = [error if is_ours else errors.AgentError(said)]
        dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], errors.HoldfastError):
            raise found[0]
        value: T = found[0]
        return value

    def _load_newest(self, found: Found | None, wanted: Wanted) -> int | None:
        """Restore the newest step that was not saved with `save_latest=False`."""
        if found is None:
            return None
        if wanted.optimizer and _is_latest(found.extras):
            return self._load_own(None, wanted)  # restore() passes over damaged steps
        step = self._on_the_first(self._newest_of_all)
        if step is None and found.tier != "upload" and not _is_latest(found.extras):
            return None
        where = f"{_PLACES[found.tier]} and not in {self.root}"
        if step is None:
            raise errors.NotRecoverable(
                f"step {found.step} is in {where}: without the optimizer's states it cannot be loaded from "
                "there",
                hint=f"load_checkpoint({self.root!r}, 'global_step{found.step}') with the "
                "optimizer's states",
            )
        is_found = step == found.step and run_of(self.root, step) in (None, found.at.run)
        if not is_found and _is_latest(found.extras):
            errors.warn_user(f"the newest step, {found.step}, is in {where}; step {step} is loaded")
        return self._load_own(step, wanted)

    def _load_own(self, step: int | None, wanted: Wanted) -> int:
        """Restore a step of the root (None: the newest), from any tier if the optimizer is wanted, too."""
        if not wanted.optimizer:
            return self._load_some(self.root, step, wanted)
        scheduler = self.engine.lr_scheduler
        before = None if wanted.scheduler or scheduler is None else deepcopy(scheduler.state_dict())
        found = self.ckpt.find(step)
        self._expect({} if found is None else found.extras)
        restored = int(self.ckpt.restore(step, strict=wanted.strict))
        if before is not None:
            scheduler.load_state_dict(before)
        self.engine.global_steps = restored  # other trainers' checkpoints have no counters
        return restored

    def _load_some(self, root: str, step: int | None, wanted: Wanted) -> int:
        """Load the wanted parts from storage."""
        state = dict(self.ckpt.state)
        if not wanted.optimizer:
            state.pop("optim", None)
        if not wanted.scheduler:
            state.pop("sched", None)
        self._expect(holdfast.open(root, step=step).extras)
        found = holdfast.load(root, state, step=step, strict=wanted.strict)
        if wanted.counters:
            put_engine_counters(self.engine, self.client.counters)
            go_on_from(self.ckpt, self.engine.global_steps)
        return found

    def _expect(self, extras: dict[str, Any]) -> None:
        """Leave frozen weights out if the step, by its extras, was saved without them."""
        if extras.get(CLIENT, {}).get("trainable_only"):
            self._leave_out_frozen()

    def _pointed(self, folder: str, tag: str | None) -> Pointed | None:
        """Return the step to which the folder of a tag points; warn and return None without a tag."""
        if tag is None:
            newest = holdfast.steps(self.root).newest
            beside = f"; {self.root} has step {newest}: load from there"
            beside = "" if newest is None else beside
            errors.warn_user(f"{folder} has no file `{_LATEST}`, so nothing is loaded{beside}")
            return None
        try:
            pointer = json.loads(store.LocalStore(Path(folder, tag)).get_small(_POINTER))
            return Pointed(str(pointer["root"]), int(pointer["step"]), tag, pointer.get("run"))
        except (errors.HoldfastError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise errors.NotRecoverable(
                f"{Path(folder, tag)} points to no step: it was not committed, or is no checkpoint "
                f"({type(error).__name__})",
                hint=f"load_checkpoint({self.root!r}) goes on from the newest step of the root",
            ) from None

    def _step_in(self, folder: str, tag: str | None, is_newest: bool) -> Pointed | None:
        """Return the step that a tag, or `latest`, points to or, if that is deleted, the one saved there
        since.

        A run that is killed between a commit and the writing of the pointer leaves one whose step `keep`
        may have deleted.
        """
        pointed = self._pointed(folder, tag)
        if pointed is None or not _same(pointed.root, self.root):
            return pointed
        if pointed.step in holdfast.steps(self.root):
            return pointed
        since = self._newest_saved if is_newest else self._labelled
        return since(folder, pointed) or pointed

    def _labelled(self, folder: str, pointed: Pointed) -> Pointed | None:
        """Return the step with the label of a tag whose step is deleted."""
        step = labels_of(self.root).get(_label_of(folder, pointed.tag))
        if step is None:
            return None
        return Pointed(self.root, step, pointed.tag, run_of(self.root, step))

    def _newest_saved(self, folder: str, pointed: Pointed) -> Pointed | None:
        """Return the newest step saved there after the one of `latest`, which is deleted."""

        def tags_of(extras: dict[str, Any]) -> list[str]:
            saves = _saves_of(extras.get(CLIENT, {}))
            here = [one for one in saves if one.get("folder") == _absolute(folder)]
            return [one["tag"] for one in here if one["latest"]]

        def fits(run: int, step: int, extras: dict[str, Any]) -> bool:
            before = run if pointed.run is None else pointed.run, pointed.step
            return bool(tags_of(extras)) and (run, step) > before

        found = newest_where(self.root, fits)
        if found is None:
            return None
        step, extras = found
        names = f"{Path(folder, _LATEST)} names {pointed.tag}, whose step is deleted"
        errors.warn_user(f"{names}; step {step}, which was saved there later, is loaded")
        return Pointed(self.root, step, tags_of(extras)[-1], run_of(self.root, step))

    def _load_pointed(self, folder: str, pointed: Pointed, wanted: Wanted) -> int:
        run = None if pointed.run is None else run_of(pointed.root, pointed.step)
        if run not in (None, pointed.run) and not _is_saved_at(folder, pointed):
            raise errors.NotRecoverable(
                f"{Path(folder, pointed.tag)} names step {pointed.step} of run {pointed.run} in "
                f"{pointed.root}, which run {run} has saved anew",
                hint=f"load_checkpoint({pointed.root!r}, 'global_step{pointed.step}') loads the step of "
                f"run {run}",
            )
        if _same(pointed.root, self.root):
            return self._load_own(pointed.step, wanted)
        return self._load_some(pointed.root, pointed.step, wanted)

    def _step_of(self, tag: str) -> int:
        """The step of the root that a tag names."""
        number = _TAG.fullmatch(tag)
        if number is not None:
            return int(number[1])
        labelled = labels_of(self.root)
        if tag in labelled:
            return labelled[tag]
        raise errors.NotRecoverable(
            f"{self.root} has no step with the tag {tag!r}", hint=f"holdfast ls {self.root}"
        )

    def _newest_of_all(self) -> int | None:
        newest = newest_where(self.root, lambda run, step, extras: _is_latest(extras))
        return None if newest is None else newest[0]

    def _load_by_deepspeed(
        self, folder: str, tag: str | None, wanted: Wanted, custom_load_fn: Any
    ) -> Loaded:
        loaded = self._by_deepspeed(
            folder,
            tag,
            load_module_strict=wanted.strict,
            load_optimizer_states=wanted.optimizer,
            load_lr_scheduler_states=wanted.scheduler,
            load_module_only=not wanted.counters,
            custom_load_fn=custom_load_fn,
        )
        go_on_from(self.ckpt, self.engine.global_steps)
        return loaded

    def _is_root(self, folder: str) -> bool:
        return _same(os.fspath(folder), self.root)

    def _place(self, folder: str) -> str:
        """Return the folder as a step stores it; "" for the root."""
        return "" if self._is_root(folder) else _absolute(os.fspath(folder))


# -- folders --------------------------------------------------------------------------------------


def _same(one: str, other: str) -> bool:
    """True if two paths or URLs name one place."""
    return _absolute(one) == _absolute(other)


def _absolute(path: str) -> str:
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def _check_label(tag: str, step: int) -> None:
    """UsageError for a tag that names another step."""
    if _TAG.fullmatch(tag) and tag != f"global_step{step}":
        raise errors.UsageError(
            f"save_checkpoint(tag={tag!r}) names another step than {step}, at which the engine is",
            hint="leave the tag out, or use a tag that is not of the form global_stepN",
        )


def _label_of(folder: str, tag: str) -> str:
    """Return the label of the step that a tag in a folder besides the root keeps."""
    place = os.path.join(_absolute(folder), tag)
    name = f"{Path(_absolute(folder)).name}/{tag}"
    return f"{ascii(name)[1:-1][-80:]} {xxhash.xxh3_64_hexdigest(place.encode())[:8]}"


def _is_latest(extras: dict[str, Any]) -> bool:
    """True unless a step was saved with `save_latest=False`."""
    return bool(extras.get(CLIENT, {}).get("latest", True))


def _is_saved_at(folder: str, pointed: Pointed) -> bool:
    """True if a step was saved under its tag in this folder: a run that was killed before it could write
    the pointer leaves that of the step it has replaced."""
    extras = holdfast.open(pointed.root, step=pointed.step).extras
    place = _absolute(folder), pointed.tag
    return any(_place_of(one) == place for one in _saves_of(extras.get(CLIENT, {})))


def _latest_of(folder: str) -> str | None:
    """Return the tag that a folder's `latest` names; None without such a file."""
    try:
        return store.LocalStore(folder).get_small(_LATEST).decode().strip()
    except (errors.NotFound, UnicodeDecodeError):
        return None


def _is_deepspeeds(folder: str, tag: str | None) -> bool:
    """True if DeepSpeed itself has saved something under this tag."""
    return tag is not None and any(Path(folder, tag).glob("*_states.pt"))


def _tell_of_deepspeeds(folder: str, step: int) -> None:
    """Give a notice if DeepSpeed itself has saved a checkpoint in the root that is newer than its steps."""
    tag = _latest_of(folder)
    if tag is not None and (at := _TAG.fullmatch(tag)) and _is_deepspeeds(folder, tag):
        how = f"load_checkpoint({folder!r}, {tag!r})"
        tell_newer(step, os.path.join(folder, tag), int(at[1]), how)


def _is_pointer(folder: str, tag: str | None) -> bool:
    """True if this tag points to a step of a root."""
    return tag is not None and Path(folder, tag, _POINTER).exists()


def _has_written(pointed: Pointed, folder: str, latest: bool) -> bool:
    """Write a pointer.  If that fails, warn and return False: only rank 0 writes, and an exception there
    would leave the others waiting."""
    try:
        _write_pointer(pointed, folder, latest)
    except errors.HoldfastError as error:
        errors.warn_user(
            f"{folder}: tag {pointed.tag} does not point to step {pointed.step}, which is saved: {error}",
            hint=f"each save_checkpoint and load_checkpoint tries again; {pointed.root} has the step",
        )
        return False
    return True


def _write_pointer(pointed: Pointed, folder: str, latest: bool) -> None:
    pointer: dict[str, Any] = {"root": _absolute(pointed.root), "step": pointed.step}
    if pointed.run is not None:
        pointer["run"] = pointed.run
    store.LocalStore(Path(folder, pointed.tag)).put(_POINTER, json.dumps(pointer).encode())
    if latest:
        store.LocalStore(folder).put(_LATEST, pointed.tag.encode())
