"""The root that a fit under Lightning saves into, and the parts of its checkpoints besides tensors.

Home         a Checkpointer on a root, and on rank 0 the pointers that wait for commits
Rest         the parts of a Lightning checkpoint besides weights and optimizer states
RestOfRank   the parts of `Rest` that differ between ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem

from holdfast import Checkpointer, Save, errors
from holdfast.extend import decode, encode, notes_of
from holdfast.integrations.lightning_finetuning import TRAINED
from holdfast.integrations.lightning_pointers import (
    Pointer,
    claimed_by,
    label_start,
    read_pointer,
    remove_pointer,
    unpin_path,
    write_pointer,
)
from holdfast.integrations.native import run_of

DATA = "holdfast.data"
"""The key of the description of the loaders' data in a Lightning checkpoint."""
METRICS = "holdfast.metrics"
"""The key of logged metrics in a Lightning checkpoint."""


class Rest:
    """The parts of a Lightning checkpoint besides weights and optimizer states.

    They are rank 0's, as in Lightning's own; `of_rank` is saved after them, by its key.
    """

    on_resize = "rank0"

    def __init__(self, trainer: Any = None) -> None:
        self._trainer = trainer
        self.value: Any = None
        self.newest: Any = None
        """The parts that were saved last, unless they were given as `value`."""
        self.of_rank = RestOfRank(self)

    def state_dict(self) -> Any:
        if self.value is not None or self._trainer is None:
            return self.value
        checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self.newest = self._trainer.strategy.rest_of(checkpoint)
        return self.newest

    def load_state_dict(self, state: Any) -> None:
        self.value = state

    def take(self) -> Any:
        """Return the loaded parts, with this rank's own in place of rank 0's."""
        rest, self.value = self.value, None
        own, self.of_rank.loaded = self.of_rank.loaded, None
        if own is None and rest is not None and rest.get(METRICS):
            rest[METRICS]["of_first"] = True  # of an earlier version, or on another layout
        for (*path, name), value in zip(_OWN, own or ()):
            if value is not None:
                inner = rest
                for key in path:
                    inner = inner[key]
                inner[name] = value
        return rest


_OWN = ((METRICS,), ("loops", "fit_loop", "state_dict", "combined_loader"))
"""The paths, in a Lightning checkpoint, of the parts that differ between ranks."""


class RestOfRank:
    """The parts that differ between ranks: sums of metrics, and positions of loaders."""

    on_resize = "fresh"

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        self.loaded: Any = None

    def state_dict(self) -> list[Any]:
        rest = self._rest.newest if self._rest.value is None else self._rest.value
        found = []
        for path in _OWN:
            value = rest
            for key in path:
                value = value.get(key, {})
            found.append(value or None)
        return found

    def load_state_dict(self, saved: list[Any]) -> None:
        self.loaded = saved


@dataclass(frozen=True)
class _Committed:
    """A save that was committed before this fit began."""

    step: int
    error: None = None

    def done(self) -> bool:
        return True


class Home:
    """A root that a fit saves into, and on rank 0 the pointers to write and to remove at commits."""

    def __init__(self, strategy: Any, root: str, rest: Rest, state: Any, options: Any) -> None:
        self.strategy, self.root, self.rest = strategy, root, rest
        self.ckpt = Checkpointer(root, state, **{"anew": True, **options})
        self.at: tuple[int, Any] | None = None
        """The step that a path or a restore named last, and the writes to the weights until then."""
        self._newest: Save | _Committed | None = None
        self._waiting: list[tuple[str, Pointer, Save | _Committed | None]] = []
        self._to_remove: list[str] = []
        self._is_good = True
        self._own: dict[str, Any] = {}
        """The plain values that hooks added to the newest save."""
        self._has_told = False

    def has_room(self, step: int) -> bool:
        """False if paths name this step with other weights, on any rank.  Collective."""
        if self.at is None or self.at[0] != step:
            return True
        is_same = self.at[1] == self.strategy.writes()
        return bool(self.strategy.reduce_boolean_decision(is_same))

    def is_newest(self, step: int) -> bool:
        """Tell whether this step was saved or restored last, so that further paths only name it."""
        return self._newest is not None and self._newest.step == step

    def has(self, step: int) -> bool:
        """True if the step can be restored, though it may be another run's than the newest.  Collective."""
        try:
            return self.ckpt.find(step) is not None
        except (errors.NotFound, errors.NotRecoverable, errors.Corrupt):
            return False

    def go_on_from(self, step: int, rest: dict[str, Any]) -> None:
        """Let further paths of a restored step name it as it is: saved again, it would belong to another
        run."""
        self._newest, self._own = _Committed(step), _own_parts(rest)

    def save(self, rest: dict[str, Any], path: str) -> None:
        """Save in the background, for `path` to name the step."""
        step, callbacks = rest["global_step"], _plain(rest.get("callbacks"))
        pointer = {"root": self.root, "step": step, "weights_only": "callbacks" not in rest}
        if self.is_newest(step) and callbacks is not None:
            pointer["callbacks"] = callbacks  # those in the step do not know this path
            self._tell_changed(rest, path)
        else:
            self._own = _own_parts(rest)
            self.rest.value = rest
            try:
                self._newest = self.ckpt.save(step)
            finally:
                self.rest.value = None
            self.at = step, self.strategy.writes()
        is_first = self.strategy.is_global_zero
        if is_first:
            with _told(f"{path} does not name step {step} until that is saved"):
                if not get_filesystem(path).exists(path):
                    coming = {**pointer, **claimed_by(self.root), "is_coming": True}
                    write_pointer(path, coming)  # before the pin, so that a restart knows of it
        try:
            notes_of(self.ckpt).pin(step, f"{label_start(path)}{step}")
        except errors.NotFound:
            pass  # the save has failed already, and reports it
        except errors.HoldfastError as error:
            errors.warn_user(f"{path}: step {step} is not pinned, so it may be deleted: {error}")
        if is_first:
            self._waiting.append((path, pointer, self._newest))

    def _tell_changed(self, rest: dict[str, Any], path: str) -> None:
        """Warn once that a later path of a step lacks changes that hooks have made since the first."""
        own = _own_parts(rest)
        changed = [name for name in own if own[name] != self._own.get(name)]
        if changed and self.strategy.is_global_zero and not self._has_told:
            self._has_told = True
            errors.warn_user(
                f"{path} names step {rest['global_step']} as it was saved for an earlier path: "
                f"{changed[0]!r}, which on_save_checkpoint() adds, has changed since",
                hint="training that goes on from this path repeats what came between, such as a validation",
            )

    def remove(self, path: str) -> None:
        """Remove a path as soon as all earlier saves are committed."""
        self._waiting.append((path, {}, None))
        self.settle()

    def settle(self) -> None:
        """Write and remove the pointers of saves that have ended.  After a failed save, old pointers
        stay."""
        while self._waiting and ((ended := self._waiting[0][2]) is None or ended.done()):
            path, pointer, save = self._waiting.pop(0)
            if save is None:
                self._to_remove.append(path)
            else:
                self._is_good = save.error is None
                with _told(f"{path} is not brought up to date after the save of step {save.step}"):
                    self._point(path, pointer)
            while self._to_remove and self._is_good:
                path = self._to_remove.pop(0)
                with _told(f"{path} is not removed"):
                    self._remove(path)

    def _point(self, path: str, pointer: Pointer) -> None:
        if self._is_good:
            run = run_of(self.root, pointer["step"])
            before = read_pointer(path)
            write_pointer(path, pointer if run is None else {**pointer, "run": run})
            self.strategy.delete_root_of(path, before)
            self._forget(path, but=pointer["step"])
        elif (read_pointer(path) or {}).get("is_coming"):
            self._remove(path)

    def _remove(self, path: str) -> None:
        self._forget(path)  # before the pointer, else a step without a path could stay pinned
        self.strategy.delete_root_of(path, remove_pointer(path))

    def _forget(self, path: str, but: int | None = None) -> None:
        """Unpin the steps that a path named, also for an earlier run that was killed."""
        coming = {
            pointer["step"] for other, pointer, save in self._waiting if save and other == path
        }
        unpin_path(self.root, path, {but, *coming})

    def close(self, error: Any) -> None:
        try:
            self.ckpt.__exit__(*error)
        finally:
            self.settle()


@contextmanager
def _told(what: str) -> Iterator[None]:
    """A block that reads and writes pointers.  Warns if that fails: it runs on rank 0 alone, and an
    exception there would leave the others waiting."""
    try:
        yield
    except Exception as error:
        errors.warn_user(f"{what}: {error}")


def _plain(callbacks: Any) -> Any:
    """Return callbacks' states as JSON; None if there are none, or if they have tensors of several
    elements."""
    try:
        return None if callbacks is None else encode(callbacks, _number)
    except errors.UsageError:
        return None


def _own_parts(rest: dict[str, Any]) -> dict[str, Any]:
    """Return the plain values that hooks have added to a checkpoint, as JSON."""
    moving = ("callbacks", "loops", "lr_schedulers", "epoch", METRICS, DATA, TRAINED)
    return {name: _plain(value) for name, value in rest.items() if name not in moving}


def _number(value: Any, path: str) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim():
        raise errors.UsageError(path)
    return {"$tensor": [str(value.dtype).partition(".")[2], encode(value.item())]}


def number_tensor(tag: str, body: Any) -> torch.Tensor:
    return torch.tensor(decode(body[1]), dtype=getattr(torch, body[0]))
