"""Observes a training from torch's hooks for all optimizers, and tells `holdfast prove` what it saw.

Everything is looked at as an optimizer is about to step: parameters, gradients, states, settings,
buffers, generators, averages and numbers.  Nothing is changed, drawn or kept.  What torch has no hook for
is wrapped: `autograd.backward` (for the loss), `DataLoader`'s iterators, what saves (of torch, DCP, numpy,
pickle, json and safetensors), and `load_state_dict` of modules, optimizers and schedulers; each wrapper
calls what it wraps.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from holdfast.prove.inside import values
from holdfast.prove.inside.channel import Channel
from holdfast.prove.inside.objects import Objects, Place
from holdfast.prove.inside.wrapping import Check, second, wrap
from holdfast.prove.messages import (
    LAST,
    AfterStep,
    Batch,
    BeforeStep,
    Item,
    LoadedNames,
    WasLoaded,
    WasSaved,
)

_SKETCHED = ("param ", "average ", "copies ")


def install(channel: Channel, check: Check) -> None:
    """Observe this process; called when torch has been imported."""
    observer = StepObserver(channel)
    register_optimizer_step_pre_hook(observer.before)
    register_optimizer_step_post_hook(observer.after)
    wrap(torch.autograd, "backward", observer.on_backward)
    wrap(torch, "save", second("f", check))
    wrap(torch, "save", observer.on_save)
    for name in ("pickle", "json"):  # torch has imported them
        wrap(sys.modules[name], "dump", observer.on_save)
    for name in ("save", "savez", "savez_compressed"):
        wrap(np, name, observer.on_arrays)
    for kind in (nn.Module, Optimizer, *_and_below(LRScheduler)):
        if "load_state_dict" in vars(kind):
            wrap(kind, "load_state_dict", then=observer.on_load)
    _watch_batches(torch.utils.data.dataloader._BaseDataLoaderIter, observer)
    _observers.append(observer)


def install_safetensors(channel: Channel, check: Check) -> None:
    """See what safetensors saves."""
    wrap(sys.modules["safetensors.torch"], "save_file", _observers[0].on_save)


def install_dcp(channel: Channel, check: Check) -> None:
    """See what DCP saves."""
    module = sys.modules["torch.distributed.checkpoint.state_dict_saver"]
    for name in ("save", "async_save"):
        wrap(module, name, _observers[0].on_save)


_observers: list[StepObserver] = []


class StepObserver:
    """Sees the steps of a process; one that is forked begins anew, as ranks of `holdfast run` do."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._objects = Objects()
        self._places: list[Place] = []
        self._stepped: dict[str, weakref.ref[Optimizer]] = {}
        self._main = ""
        self._attempt = 0
        self._is_last = False
        self._batches: list[Batch] = []
        self._losses: list[Item] = []
        self._loaded: set[int] = set()
        self._unseen: dict[str, str] = {}
        self._busy = threading.local()
        self._unused: Tensor | None = None
        """The state of torch's generator when it was looked at, but for draws that nothing depends on."""
        self._num_draws = 0

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Tell everything as the optimizer takes it: with a closure, when this has made the gradients."""
        if "state" not in vars(optimizer) or _holds_others(optimizer):
            return None
        if _is_of_a_library():
            self._losses = []
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._tell(optimizer)
            return None
        told: list[bool] = []

        def then_told() -> Any:
            out = closure()
            if not told:
                told.append(True)
                self._tell(optimizer)
            return out

        if "closure" in kwargs:
            return args, {**kwargs, "closure": then_told}
        return (args[0], then_told, *args[2:]), kwargs

    def _tell(self, optimizer: Optimizer) -> None:
        """Tell everything, and wait for leave to go on."""
        try:
            self._tell_all(optimizer)
        except Exception:
            self._channel.end_for("observer", traceback.format_exc())
            raise

    def _tell_all(self, optimizer: Optimizer) -> None:
        name = self._name(optimizer)
        rank, world = _rank()
        step = BeforeStep(
            rank, world, self._pid, self._attempt, name, self._look(optimizer, name == self._main),
            self._batches, self._losses, self._unseen,
        )  # fmt: skip
        self._batches, self._losses = [], []
        if self._loaded:
            names = {i: n for i, n in self._objects.names.items() if i in self._loaded}
            trained = [i for i in self._loaded if i in self._objects.trained]
            self._channel.tell(LoadedNames(names, trained))
        answer = self._channel.ask(step)
        if name == self._main:
            self._is_last = answer == LAST

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Where this step was to be the last one, tell what it left, and wait to be killed.

        Backward passes that a closure made since `_tell` are of this step, not of the next one.
        """
        self._losses = []
        is_main = self._is_last and self._stepped[self._main]() is optimizer
        if is_main:
            self._channel.ask(AfterStep(self._look(optimizer, True)))

    @contextmanager
    def _seeing(self, what: str) -> Iterator[None]:
        """Tell what could not be looked at, in place of an error in the midst of the script."""
        try:
            yield
        except Exception as error:
            self._unseen.setdefault(what, f"{type(error).__name__}: {error}")

    def on_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Take the loss."""
        for one in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            if isinstance(one, Tensor):
                with self._seeing("loss"):
                    self._losses.append(values.tensor(one))

    def on_batch(self, batch: object, place: int, sampler: object) -> None:
        """Take the digest of a batch."""
        with self._seeing(f"batch of {type(batch).__name__}"):
            seen = values.batch(batch, place)
            seen.is_drawn = sampler is not None and getattr(sampler, "generator", 0) is None
            self._batches.append(seen)

    def on_iterator(self, loader: Any, before: Tensor) -> None:
        """Take note of a draw that nothing depends on: a seed for workers, of a loader that has none."""
        alike = torch.Generator()
        alike.set_state(before)
        torch.empty((), dtype=torch.int64).random_(generator=alike)
        now = torch.get_rng_state()
        is_known = self._unused is not None and torch.equal(before, self._unused)
        if is_known and not loader.num_workers and torch.equal(alike.get_state(), now):
            self._unused = now

    def _draws(self) -> int:
        """How often torch's generator was found in a state that such draws do not explain."""
        now = torch.get_rng_state()
        self._num_draws += self._unused is not None and not torch.equal(now, self._unused)
        self._unused = now
        return self._num_draws

    def on_arrays(self, file: object, *args: Any, **kwargs: Any) -> None:
        """Tell what numpy saves."""
        self.on_save({**{str(n): one for n, one in enumerate(args)}, **kwargs})

    def on_save(self, state: Any = None, *args: Any, **kwargs: Any) -> None:
        """Tell what is being saved; a stateful object of DCP's call is asked, as DCP asks it."""
        state = kwargs.get("state_dict", kwargs.get("obj", state))
        if getattr(self._busy, "saving", False) or state is None:
            return
        self._busy.saving = True
        with self._seeing("what is saved"):
            if isinstance(state, dict):
                state = {
                    k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()
                }
            self._channel.tell(WasSaved(dict(values.leaves_of(state))))
        self._busy.saving = False

    def on_load(self, owner: Any, *args: Any, **kwargs: Any) -> None:
        """Tell what an object has right after it took a state_dict."""
        with self._seeing(f"what {type(owner).__name__} has loaded"):
            self._channel.tell(WasLoaded(*self._taken(owner)))

    def _taken(self, owner: Any) -> tuple[str, int, dict[str, Item]]:
        kind, items = "scheduler", {}
        if isinstance(owner, nn.Module):
            kind = "param"
            items = {n: values.tensor(p) for n, p in owner.named_parameters() if not p.is_meta}
        elif isinstance(owner, Optimizer):
            kind = "group"
            items = {
                f"{g}.{k}": _item(v, False) for g, group in enumerate(owner.param_groups)
                for k, v in group.items() if k != "params" and _is_setting(v)
            }  # fmt: skip
            items["states"] = values.scalar(sum(isinstance(p, Tensor) for p in owner.state))
        else:
            items = {k: values.scalar(v) for k, v in vars(owner).items() if values.is_scalar(v)}
        self._loaded.add(id(owner))
        return kind, id(owner), items

    def _name(self, optimizer: Optimizer) -> str:
        """The name of an optimizer; another one of the same name begins an attempt anew.

        Objects are looked for anew at each step of the first optimizer: scripts replace them.
        """
        known = next((n for n, o in self._stepped.items() if o() is optimizer), None)
        if known is None or known == self._main:
            living = {n: o for n, one in self._stepped.items() if (o := one()) is not None}
            name = self._objects.find(sys._getframe(1), optimizer, living)
            if known is None:
                if name in self._stepped:
                    self._stepped.clear()
                    self._attempt += 1
                    self._main = ""
                self._stepped[name] = weakref.ref(optimizer)
            known = known or name
            self._main = self._main or known
            self._places = list(self._objects.places())
            self._objects.forget()
        return known

    def _look(self, optimizer: Optimizer, at_everything: bool) -> dict[str, Item]:
        """Return what there is to see: of an optimizer that is not the first one, what is its own."""
        items: dict[str, Item] = {}
        for key, value in self._values(optimizer, at_everything):
            with self._seeing(key):
                items[key] = _item(value, key.startswith(_SKETCHED))
        return items

    def _values(self, optimizer: Optimizer, at_everything: bool) -> Iterator[tuple[str, Any]]:
        name = next(n for n, o in self._stepped.items() if o() is optimizer)
        for g, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and _is_setting(value):
                    yield f"group {name}.{g}.{key}", value
            for p, parameter in enumerate(group["params"]):
                known = self._objects.parameters.get(id(parameter), f"{name}.params.{g}.{p}")
                yield f"param {known}", parameter
                if parameter.grad is not None:
                    yield f"grad {known}", parameter.grad
                yield from _flat(f"state {known}", optimizer.state.get(parameter, {}))
        if at_everything:
            yield from _generators()
            yield "draws torch", self._draws()
            for key, holder, attribute in self._places:
                if isinstance(holder, torch.Generator):
                    yield key, holder
                elif attribute is None:
                    yield key, _state_of(holder)
                elif attribute in holder if isinstance(holder, dict) else attribute < len(holder):
                    yield key, holder[attribute]


def _is_of_a_library() -> bool:
    """Whether a library steps, and not the training: DCP, without gradients, to have an optimizer make its
    states, or a spare process of `holdfast run`, to be warm."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module == "torch.distributed.checkpoint.state_dict":
            return True
        if (module, frame.f_code.co_name) == ("holdfast.launch.recovery", "warm_up"):
            return True
        frame = frame.f_back
    return False


def _holds_others(optimizer: Optimizer) -> bool:
    """Whether an optimizer steps others, which are seen themselves."""
    held = [v for k, v in vars(optimizer).items() if k not in ("state", "param_groups", "defaults")]
    inside = [x for v in held if isinstance(v, (list, tuple)) for x in v]
    inside += [x for v in held if isinstance(v, dict) for x in v.values()]
    return any(isinstance(one, Optimizer) for one in (*held, *inside))


def _item(value: object, sketched: bool) -> Item:
    if isinstance(value, torch.Generator):
        item = values.tensor(value.get_state())
        item.text = f"a state after seed {value.initial_seed()}"
        return item
    return values.tensor(value, sketched) if isinstance(value, Tensor) else values.scalar(value)


def _is_setting(value: object) -> bool:
    return values.is_scalar(value) or (isinstance(value, Tensor) and value.numel() == 1)


def _flat(name: str, state: Any) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers of an optimizer's state for one parameter, which may be nested."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, Tensor) or values.is_scalar(value):
            yield f"{name}.{key}", value
        elif isinstance(value, (dict, list, tuple)):
            yield from _flat(f"{name}.{key}", value)


def _generators() -> Iterator[tuple[str, Any]]:
    yield "generator torch", torch.get_rng_state()
    yield "generator python", random.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, place, *_ = numpy.random.get_state()
        yield "generator numpy", [kind, keys.tobytes(), place]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            yield f"generator cuda:{number}", torch.cuda.get_rng_state(number)


def _state_of(holder: Any) -> Any:
    """The state of a generator, or of a scaler."""
    if isinstance(holder, random.Random):
        return holder.getstate()
    if hasattr(holder, "state_dict"):
        return holder.state_dict()
    return getattr(holder, "bit_generator", holder).__getstate__()


def _rank() -> tuple[int, int]:
    """This process among those of the training."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _and_below(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = kind.__subclasses__()
    for one in below:
        yield from _and_below(one)


def _watch_batches(kind: Any, observer: StepObserver) -> None:
    """See each batch of the iterators of a DataLoader, with its number in its iterator."""
    inner = kind.__next__

    @functools.wraps(inner)
    def wrapper(self: Any) -> Any:
        batch = inner(self)
        observer.on_batch(batch, self._num_yielded - 1, self.holdfast_prove_sampler)
        return batch

    begin = kind.__init__

    @functools.wraps(begin)
    def begun(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        of_batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.holdfast_prove_sampler = getattr(of_batches, "sampler", of_batches)
        before = torch.get_rng_state()
        begin(self, loader, *args, **kwargs)
        observer.on_iterator(loader, before)

    kind.__next__, kind.__init__ = wrapper, begun
