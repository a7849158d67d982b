"""Finds the objects of a training from the frames that led to `Optimizer.step`, and names their values.

Names are those of the script: `model`, `trainer.ema`.  Attributes are read from `__dict__`, so nothing of
the script runs.  What is looked at of which object is the table of `_values`.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from holdfast.prove.inside import values

_DEEPEST = 6
_MOST = 20_000
"""Objects that are looked at in all."""
_OPAQUE = frozenset(sys.stdlib_module_names) | {
    "holdfast", "numpy", "msgspec", "xxhash", "tqdm", "rich", "wandb", "tensorboard", "pandas", "pyarrow",
    "pydantic", "tokenizers", "sympy", "networkx",
}  # fmt: skip
_DEEPEST_TENSORS, _MOST_TENSORS, _LARGEST = 3, 256, 1 << 20
"""Of tensors in an object of the script: how deep, how many in a container, and of how many elements."""
_OPEN_TORCH = ("torch.nn", "torch.optim", "torch.utils.data", "torch.amp", "torch.cuda.amp")
_SITE = tuple({os.path.dirname(os.path.dirname(torch.__file__)), os.path.dirname(os.__file__)})

Place = tuple[str, Any, Any]
"""Kind and name of a value, the object or container that holds it, and its attribute or key."""


class Objects:
    """What one attempt of a training trains with, by name."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        """By `id`, of what was found."""
        self.parameters: dict[int, str] = {}
        self.trained: set[int] = set()
        """`id` of optimizers that step, of their modules and of the schedulers."""
        self._found: dict[int, Any] = {}
        self._own: set[int] = set()
        """`id` of the script's own variables."""

    def find(
        self, frame: FrameType | None, optimizer: Optimizer, living: Mapping[str, Optimizer]
    ) -> str:
        """Look at everything that the frames reach, breadth first: the shortest path is the name.

        Returns the name of `optimizer`.  Those that have stepped before, `living`, keep theirs as long as
        they are reached.
        """
        variables = list(_of_frames(frame))
        queue: deque[tuple[str, Any, int]] = deque(
            (f"{name}.{n}", one, 1)
            for name, value, _ in variables
            if isinstance(value, (list, tuple))
            for n, one in enumerate(value[:256])
        )  # fmt: skip  before the variables of loops over them, which are others after a resume
        queue.extend((name, value, 0) for name, value, _ in variables)
        self._own = {id(value) for _, value, is_script in variables if is_script}
        self._found.clear()
        self.names.clear()
        seen: set[int] = set()
        while queue and len(seen) < _MOST:
            name, value, depth = queue.popleft()
            if id(value) in seen or not _is_open(value):
                continue
            seen.add(id(value))
            self._found[id(value)] = value
            self.names[id(value)] = name
            if depth < _DEEPEST:
                queue.extend((f"{name}.{key}", v, depth + 1) for key, v in _inside(value))
        reached = {name: one for name, one in living.items() if id(one) in self._found}
        self.names |= {id(one): name for name, one in reached.items()}
        name = self.names.get(id(optimizer), type(optimizer).__name__.lower())
        known = sum(one is not optimizer and n.startswith(name) for n, one in reached.items())
        if reached.get(name, optimizer) is not optimizer:
            name = f"{name}{known + 1}"
        self.names[id(optimizer)] = name
        self._found[id(optimizer)] = optimizer
        self._name_parameters()
        return name

    def _name_parameters(self) -> None:
        named = {self.names[id(o)]: o for o in self._found.values() if isinstance(o, Optimizer)}
        owned = {id(p) for o in named.values() for g in o.param_groups for p in g["params"]}
        roots = [m for m in self._found.values() if isinstance(m, nn.Module)]
        below = {id(child) for m in roots for child in m.modules() if child is not m}
        self.parameters.clear()
        self.trained = {id(o) for o in named.values()}
        for module in roots:
            is_root = id(module) not in below
            if not is_root or not any(id(p) in owned for p in module.parameters()):
                continue
            self.trained |= {id(m) for m in module.modules()}
            for key, parameter in module.named_parameters():
                name = f"{self.names[id(module)]}.{_plain(key)}"
                self.parameters.setdefault(id(parameter), name)
        for name, one in named.items():
            for g, group in enumerate(one.param_groups):
                for p, parameter in enumerate(group["params"]):
                    self.parameters.setdefault(id(parameter), f"{name}.params.{g}.{p}")

    def places(self) -> Iterator[Place]:
        """Yield what is to be looked at, beside optimizers' states and settings, which come and go."""
        shapes = {
            shape
            for o in self._found.values() if isinstance(o, Optimizer)
            for g in o.param_groups for p in g["params"]
            for shape in (tuple(p.shape), tuple(values.local_of(p)[0].shape))
        }  # fmt: skip
        done: set[int] = set()
        known = self._known_tensors()
        for value in list(self._found.values()):
            name = self.names[id(value)]
            if isinstance(value, nn.Module):
                if id(value) not in done:
                    kind = "param" if id(value) in self.trained else "average"
                    yield from _of_module(value, name, kind, self.parameters, done)
            elif isinstance(value, (Optimizer, LRScheduler)):
                kind = "number" if isinstance(value, Optimizer) else "scheduler"
                yield from _attributes(value, name, kind, set())
            elif _is_scaler(value):
                yield f"scaler {name}", value, None
            elif _is_generator(value):
                yield f"generator {name}", value, None
            elif _is_average(value, shapes) and not _is_trainers(value):
                kind = "copies" if isinstance(value, dict) else "average"
                yield from _tensors_of(value, name, kind, known)
                yield from _attributes(value, name, kind, set())
            elif isinstance(value, dict) and id(value) in self._own:
                yield from _numbers_of(value, name)
            elif _is_of_script(value) or isinstance(value, Sampler):
                yield from _attributes(value, name, "counter", set())
                if not isinstance(value, torch.utils.data.Dataset):
                    yield from _nested(vars(value), f"tensor {name}", known, _LARGEST)

    def forget(self) -> None:
        """Hold nothing of the training any more but what `places` has given."""
        self._found.clear()

    def _known_tensors(self) -> set[int]:
        """`id` of the tensors that modules and optimizers have, wherever else they are met."""
        found = list(self._found.values())
        modules = [m for m in found if isinstance(m, nn.Module)]
        optimizers = [o for o in found if isinstance(o, Optimizer)]
        states = [s for o in optimizers for s in vars(o).get("state", {}).values()]
        return {
            *self.parameters,
            *(id(t) for m in modules for t in (*m.parameters(), *m.buffers())),
            *(id(t) for s in states if isinstance(s, dict) for t in s.values()),
        }


def _of_frames(frame: FrameType | None) -> Iterator[tuple[str, Any, bool]]:
    """Yield variables of the frames of the script and of its trainer, from the innermost.

    With each name and value, whether it is one of the script.
    """
    while frame is not None:
        root = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if root == "__main__" or root not in _OPAQUE | {"torch", "runpy"}:
            is_script = not str(frame.f_code.co_filename).startswith(_SITE)
            for scope in (frame.f_locals, frame.f_globals if is_script else {}):
                for name, value in list(scope.items()):
                    if not name.startswith("__"):
                        known = type(value).__name__.lower() if name == "self" else name
                        yield known, value, is_script
        frame = frame.f_back


def _is_open(value: object) -> bool:
    """Whether the inside of an object is looked at."""
    kind = type(value)
    if kind in (dict, list, tuple) or _is_generator(value):
        return True
    if isinstance(value, (Tensor, type)) or not hasattr(value, "__dict__") or (callable(value) and not (
        isinstance(value, nn.Module) or _is_of_script(value) or hasattr(kind, "state_dict")
    )):  # fmt: skip
        return False
    root = kind.__module__.split(".")[0]
    if root == "torch":
        return kind.__module__.startswith(_OPEN_TORCH) or isinstance(value, nn.Module)
    return root not in _OPAQUE or root == "__main__" or isinstance(value, SimpleNamespace)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if _is_generator(value):
        return
    if isinstance(value, nn.Module):
        for key, inner in vars(value).items():
            if key == "_modules":
                yield from ((str(k), m) for k, m in inner.items() if m is not None)
            elif not key.startswith("_") and not type(value).__module__.startswith("torch."):
                yield key, inner
    elif isinstance(value, Mapping):
        yield from ((str(k), v) for k, v in list(value.items())[:256])
    elif isinstance(value, (list, tuple)):
        yield from ((str(k), v) for k, v in enumerate(value[:256]))
    else:
        yield from list(vars(value).items())


def _is_of_script(value: object) -> bool:
    """Whether a class is of the script: not of a package that is installed, and not of Python."""
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    if type(value).__module__ == "__main__" or isinstance(value, SimpleNamespace):
        return True
    return file is not None and not os.path.abspath(file).startswith(_SITE)


def _is_generator(value: object) -> bool:
    return isinstance(
        value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    )


def _is_scaler(value: object) -> bool:
    return any("GradScaler" in kind.__name__ for kind in type(value).__mro__)


def _is_average(value: Any, shapes: set[tuple[int, ...]]) -> bool:
    """Whether an object or a dict holds tensors that are shaped as parameters."""
    if isinstance(value, (torch.utils.data.DataLoader, torch.utils.data.Dataset, Sampler)):
        return False
    if not isinstance(value, dict) and not hasattr(value, "__dict__"):
        return False
    held = value.values() if isinstance(value, dict) else vars(value).values()
    for inner in held:
        some = list(inner.values()) if isinstance(inner, dict) else inner
        some = some if isinstance(some, (list, tuple)) else [some]
        if any(isinstance(t, Tensor) and t.dim() and tuple(t.shape) in shapes for t in some):
            return True
    return False


def _is_trainers(value: Any) -> bool:
    """Whether an object holds an optimizer, as what runs a loop does."""
    held = vars(value).values() if hasattr(value, "__dict__") else value.values()
    return any(isinstance(v, Optimizer) for v in held)


def _of_module(
    module: nn.Module, name: str, kind: str, parameters: Mapping[int, str], done: set[int]
) -> Iterator[Place]:
    yield f"number {name}.training", vars(module), "training"
    for prefix, child in module.named_modules():
        if id(child) in done:
            continue
        done.add(id(child))
        path = f"{name}.{_plain(prefix)}" if prefix else name
        for key, parameter in child._parameters.items():
            if parameter is not None:
                known = parameters.get(id(parameter))
                yield (
                    f"{'param' if known else kind} {known or f'{path}.{key}'}",
                    child._parameters,
                    key,
                )
        for key, buffer in child._buffers.items():
            if buffer is not None:
                own = "buffer" if kind == "param" else kind
                yield f"{own} {path}.{key}", child._buffers, key
        if not type(child).__module__.startswith("torch."):
            yield from _attributes(
                child, path, "average" if kind == "average" else "number", {"training"}
            )
            yield from (
                (f"number {path}.{key}", vars(child), key)
                for key, value in vars(child).items() if isinstance(value, Tensor)
            )  # fmt: skip


def _attributes(value: Any, name: str, kind: str, without: set[str]) -> Iterator[Place]:
    """Yield the numbers that are attributes, and for what is not of the script lists of tensors.

    Those of torch's own base classes begin with an underscore, and count for its warnings.
    """
    if isinstance(value, dict):
        return
    is_torchs = isinstance(value, (Optimizer, LRScheduler))
    for key, held in vars(value).items():
        if key in without or (is_torchs and (key.startswith("_") or key == "param_groups")):
            continue
        if values.is_scalar(held):
            yield f"{kind} {name}.{key}", vars(value), key
        elif kind == "number" and isinstance(held, (list, tuple)):
            yield from _nested(held, f"number {name}.{key}")
        elif kind == "counter" and isinstance(held, dict):
            yield from _numbers_of(held, f"{name}.{key}")


def _numbers_of(held: dict[Any, Any], name: str) -> Iterator[Place]:
    for key, value in list(held.items())[:_MOST_TENSORS]:
        if values.is_scalar(value) and not isinstance(key, Tensor):
            yield f"counter {name}.{key}", held, key


def _tensors_of(value: Any, name: str, kind: str, known: set[int]) -> Iterator[Place]:
    """Yield the tensors of an average, one level down; not those that are the parameters themselves."""
    holder = value if isinstance(value, dict) else vars(value)
    for key, held in holder.items():
        if isinstance(held, Tensor) and id(held) not in known:
            yield f"{kind} {name}.{key}", holder, key
        elif isinstance(held, (dict, list)):
            items: Sequence[Any] = list(held) if isinstance(held, dict) else range(len(held))
            for inner in items:
                if isinstance(held[inner], Tensor) and id(held[inner]) not in known:
                    yield f"{kind} {name}.{key}.{inner}", held, inner


def _nested(
    held: Any,
    name: str,
    known: Collection[int] = (),
    largest: float = math.inf,
    depth: int = _DEEPEST_TENSORS,
) -> Iterator[Place]:
    """Yield tensors in dicts and lists, and how many are in a list; `known` are seen elsewhere."""
    inner = held.items() if isinstance(held, dict) else enumerate(held)
    for number, (key, value) in enumerate(list(inner)[:_MOST_TENSORS]):
        path = f"{name}.{number if isinstance(key, Tensor) else key}"
        if isinstance(value, Tensor) and id(value) not in known and value.numel() <= largest:
            yield path, held, key
        elif depth and isinstance(value, (dict, list, tuple, deque)):
            places = list(_nested(value, path, known, largest, depth - 1))
            yield from places
            if places and isinstance(value, (list, deque)):
                yield f"{path}.length", {"length": len(value)}, "length"


def _plain(name: str) -> str:
    """A name without what wrappers put in it."""
    parts = [p for p in name.split(".") if p not in ("module", "_orig_mod", "_fsdp_wrapped_module")]
    return ".".join(parts)
