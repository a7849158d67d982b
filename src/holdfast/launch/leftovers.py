"""Traces that an attempt leaves in its process besides local variables, and how they are removed.

A rank that stays in its process must compute exactly what a new process would: both work together in the
next attempt.  So before the function is entered again,

* settings of torch and Python, and the random generators, get the values of the first entry (`Settings`):
an
  exception between the two halves of a `with` leaves a setting changed;
* registries and caches that know process groups, meshes or ranks of the last attempt are emptied
  (`registries.py`);
* processes begun by `multiprocessing`, such as DataLoader workers, are ended (`end_children`).

Module globals belong to the script: holdfast only reports those that still hold objects of the last attempt
(`Globals`).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import overrides
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from holdfast.base.errors import need
from holdfast.launch.registries import say_on_rank

need("torch", torch, "_GLOBAL_DEVICE_CONTEXT")
need(
    "torch", overrides,
    "_get_current_function_mode_stack", "_len_torch_function_stack", "_pop_mode", "_push_mode",
)  # fmt: skip
_num_dispatch_modes, _pop_dispatch_mode = need(
    "torch", "torch.utils._python_dispatch", "_len_torch_dispatch_stack", "_pop_mode"
)
need("torch", "torch.utils._device", "CURRENT_DEVICE")

T = TypeVar("T")
Setting = tuple[Callable[[], Any], Callable[[Any], object]]
"""The functions that read and write a setting."""

END_S = 1.0
"""Seconds for processes to end before they are killed."""


class Leftovers:
    """The state of the process before its function is first entered."""

    def __init__(self) -> None:
        self._settings = Settings()
        self._globals = Globals()
        self._children = child_processes()

    def keep(self, load: Callable[[], T]) -> T:
        """Return `load()`; processes that it begins by `multiprocessing` survive attempts."""
        before = child_processes()
        loaded = load()
        self._children |= child_processes() - before
        return loaded

    def end(self) -> None:
        """After an attempt, when its variables are gone: end its processes, and report remaining
        globals."""
        end_children(but=self._children)
        self._globals.tell()

    def put_back(self) -> None:
        """Before an attempt: put settings and random numbers back."""
        self._settings.put_back()


def child_processes() -> set[BaseProcess]:
    """Return the running processes that this process has begun by `multiprocessing`."""
    return set(multiprocessing.active_children())


def end_children(but: Iterable[BaseProcess]) -> None:
    """End the child processes except `but`: the attempt that they worked for is over."""
    begun = child_processes() - set(but)
    for process in begun:
        process.terminate()
    for process in begun:
        process.join(END_S)
        if process.is_alive():
            process.kill()


class Settings:
    """Settings of torch and Python, and states of random generators, recorded when this object is made."""

    def __init__(self) -> None:
        self._settings = [(read, write, read()) for read, write in _settings()]
        self._hooks = [(hooks, dict(hooks)) for hooks in _global_hooks()]
        self._modes = overrides._get_current_function_mode_stack()
        self._num_dispatch_modes = _num_dispatch_modes()
        self._python = random.getstate()
        self._torch, self._seed = torch.get_rng_state(), torch.initial_seed()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def put_back(self) -> None:
        """Put the recorded settings back."""
        for hooks, before in self._hooks:
            if hooks != before:
                hooks.clear()
                hooks.update(before)
        with suppress(AttributeError):
            while torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
                torch._C._autograd._pop_saved_tensors_default_hooks()
        while _num_dispatch_modes() > self._num_dispatch_modes:
            _pop_dispatch_mode()
        if overrides._get_current_function_mode_stack() != self._modes:
            while overrides._len_torch_function_stack():
                overrides._pop_mode()
            for mode in self._modes:
                overrides._push_mode(mode)
        for read, write, before in self._settings:
            if read() != before:
                write(before)
        self._put_random_numbers_back()

    def _put_random_numbers_back(self) -> None:
        """Put random generators back: a newly started script draws the same numbers until it seeds."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(self._seed)


def _settings() -> Iterator[Setting]:
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.get_default_dtype, torch.set_default_dtype
    yield _attribute(
        torch._GLOBAL_DEVICE_CONTEXT, "device_context"
    )  # its mode is put back by itself
    yield _attribute(sys.modules["torch.utils._device"], "CURRENT_DEVICE")
    yield torch.get_num_threads, torch.set_num_threads
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield _deterministic, lambda it: torch.use_deterministic_algorithms(it[0], warn_only=it[1])
    yield _anomaly, lambda it: torch.set_anomaly_enabled(*it)
    yield torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    yield _autocast_nesting, _set_autocast_nesting
    for device in ("cpu", "cuda"):
        yield _of(torch.is_autocast_enabled, device), _of(torch.set_autocast_enabled, device)
        yield _of(torch.get_autocast_dtype, device), _of(torch.set_autocast_dtype, device)
    for name in ("enabled", "benchmark", "deterministic"):
        yield _attribute(torch.backends.cudnn, name)
    yield _attribute(torch.utils.deterministic, "fill_uninitialized_memory")
    yield _attribute(torch.nn.functional, "linear")  # ZeRO-3 replaces it
    yield _attribute(sys, "excepthook")  # every process group wraps it once more
    yield os.getcwd, os.chdir
    yield _start_method, lambda it: multiprocessing.set_start_method(it, force=True)


def _of(call: Callable[..., Any], device: str) -> Callable[..., Any]:
    return lambda *value: call(device, *value)


def _attribute(owner: Any, name: str) -> Setting:
    return lambda: getattr(owner, name, None), lambda value: setattr(owner, name, value)


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _autocast_nesting() -> int:
    """Return the depth of autocast blocks.  If it were too large, casts of weights would stay cached."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _set_autocast_nesting(depth: int) -> None:
    while _autocast_nesting() > depth:
        torch.autocast_decrement_nesting()


def _start_method() -> str | None:
    return multiprocessing.get_start_method(allow_none=True)


def _global_hooks() -> Iterator[dict[int, Any]]:
    """Yield torch's registries of hooks for all modules and for all optimizers."""
    for owner in (modules, optimizers):
        for name, value in vars(owner).items():
            if name.startswith("_global_") and isinstance(value, dict):
                yield value


class Globals:
    """Module globals of the script that hold groups, meshes, models or tensors of an attempt."""

    def __init__(self) -> None:
        self._before = {(module, name): id(value) for module, name, value in _held()}
        self._told: set[tuple[str, str]] = set()

    def tell(self) -> None:
        """Report each global, once, whose value is newer than the first attempt."""
        for module, name, value in _held():
            key = module, name
            if key in self._told or self._before.get(key) == id(value):
                continue
            self._told.add(key)
            say_on_rank(
                f"the global `{name}` of {module} still holds a {type(value).__name__} of the attempt that "
                "has ended: its memory is free when it is set anew, and a group or mesh must be made anew"
            )


def _held() -> Iterator[tuple[str, str, Any]]:
    kinds = _kinds()
    for module in _of_the_script():
        for name, value in list(vars(module).items()):
            if isinstance(value, kinds):
                yield module.__name__, name, value


def _kinds() -> tuple[type, ...]:
    kinds: list[type] = [torch.Tensor, torch.nn.Module, torch.optim.Optimizer]
    mesh = sys.modules.get("torch.distributed.device_mesh")
    if mesh is not None:
        kinds += [mesh.DeviceMesh, torch.distributed.ProcessGroup]
    return tuple(kinds)


def _of_the_script() -> Iterator[ModuleType]:
    """Yield the script's module, and the modules in its folder."""
    root = os.path.join(sys.path[0] or os.getcwd(), "")
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        inside = file.startswith(root) and "site-packages" not in file[len(root) :]
        if name == "__main__" or inside:
            yield module
