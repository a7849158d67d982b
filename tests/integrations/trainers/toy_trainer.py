"""A trainer with callbacks, which saves and goes on by holdfast: public names and the door alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from holdfast import Checkpointer, Every, Keep
from holdfast.extend import data_of, notes_of, order_of, path_of, put_order, tell_other_data


class Place:
    """The place in the data: epoch, batches done in it, and what the order of the epoch follows from."""

    on_resize = "rank0"

    def __init__(self, loader: Any) -> None:
        self.loader, self.epoch, self.batch = loader, 0, 0
        self.order = order_of(loader)

    def state_dict(self) -> dict[str, Any]:
        order = self.order if self.batch else order_of(self.loader)
        place = {"epoch": self.epoch, "batch": self.batch, "order": order}
        return {**place, "data": data_of(self.loader)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.epoch, self.batch = saved["epoch"], saved["batch"]
        put_order(self.loader, saved["order"])
        tell_other_data("loader", saved["data"], data_of(self.loader))


class Trainer:
    """Fits a model; callbacks are told of steps and epochs, and may ask to save."""

    def __init__(self, model: Any, optim: Any, loader: Any, root: str, callbacks: Any) -> None:
        self.model, self.optim, self.callbacks, self.step = model, optim, callbacks, 0
        self.place = Place(loader)
        state = {"model": model, "optim": optim, "place": self.place}
        state |= {type(c).__name__: c for c in callbacks if hasattr(c, "state_dict")}
        root = path_of(root, "Trainer", "root")
        self.ckpt = Checkpointer(root, state, every=Every.by_hand(), keep=Keep(last=2))

    def fit(self, epochs: int) -> int:
        """Train up to so many epochs; return the step that training went on from, 0 if it began."""
        with self.ckpt:
            self.step = begin = int(self.ckpt.restore())
            while self.place.epoch < epochs:
                for x, y in self._batches():
                    self.optim.zero_grad()
                    loss = torch.nn.functional.mse_loss(self.model(x), y)
                    loss.backward()
                    self.optim.step()
                    self.step, self.place.batch = self.step + 1, self.place.batch + 1
                    self.ckpt.step(self.step)
                    self._tell("on_step", loss.item())
                self.place.epoch, self.place.batch = self.place.epoch + 1, 0
                self._tell("on_epoch")
            return begin

    def _batches(self) -> Iterator[Any]:
        done, self.place.order = self.place.batch, order_of(self.place.loader)
        batches = iter(self.place.loader)
        for _ in range(done):
            next(batches)
        if done:
            self.ckpt.restore_rng()  # the loader has drawn from the generators
        yield from batches

    def _tell(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event, lambda *_: None)(self, *args)

    def save(self, label: str | None = None) -> None:
        """Save the step in the background; `label`: keep it under this name."""
        self.ckpt.save(self.step)
        if label is not None:
            notes_of(self.ckpt).pin(self.step, label)
