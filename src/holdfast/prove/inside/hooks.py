"""Arms the observer when Python starts: one part waits for torch, and another watches what is written."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from holdfast.prove.inside.channel import Channel
from holdfast.prove.inside.wrapping import second, wrap
from holdfast.prove.messages import OWN

_CALLED_AFTER = {
    "torch": "install",
    "safetensors": "",
    "safetensors.torch": "install_safetensors",
    "torch.distributed.checkpoint.state_dict_saver": "install_dcp",
}
"""Modules, and the function of `observer` that is called when they have been imported; `""` needs none."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def arm() -> None:
    """Watch this process; called once, as Python starts."""
    channel = Channel()
    guard = _Guard(channel)
    finder = _Finder(channel, guard)
    sys.meta_path.insert(0, finder)
    for name in filter(sys.modules.__contains__, _CALLED_AFTER):
        finder.install(name)
    sys.addaudithook(guard)


class _Finder:
    """Finds what the other finders find, and has a function called when some modules are there."""

    def __init__(self, channel: Channel, guard: _Guard) -> None:
        self._channel, self._guard = channel, guard
        self._asked: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _CALLED_AFTER or name in self._asked:
            return None
        self._asked.add(name)
        spec: ModuleSpec | None = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = _Loader(spec.loader, lambda: self.install(name))
            spec.loader = loader
        return spec

    def install(self, name: str) -> None:
        """Observe a module, which has been imported."""
        if name == "safetensors":  # a script may import it before torch, or alone
            wrap(sys.modules[name], "serialize_file", second("filename", self._guard.check))
            return
        observer = importlib.import_module("holdfast.prove.inside.observer")
        getattr(observer, _CALLED_AFTER[name])(self._channel, self._guard.check)


class _Loader:
    """A loader that does what another does, and then calls a function."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        module.__spec__.loader = module.__loader__ = self._loader
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Guard:
    """An audit hook: a file outside of the run's own folders is not written, and questions are told.

    Python's own calls are seen; `observer` asks for paths that go to writers in C++ and Rust.

    Two runs that write to one place would not be apart, and one of them could be the user's.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        home = Path.home()
        caches = (os.environ.get(name) for name in ("HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME"))
        own = os.environ[OWN].split(os.pathsep)
        places = ("/dev", "/proc", "/sys", "/run", sys.prefix, tempfile.gettempdir(), *own)
        self._allowed = tuple(
            os.path.realpath(p) + os.sep for p in (*places, *filter(None, caches))
        )
        self._hidden = f"{home}{os.sep}."

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & _WRITES:
                self.check(path)
        elif event == "os.mkdir":
            self.check(args[0])
        elif event == "os.rename":
            self.check(args[1])
        elif event == "builtins.input":
            self._channel.end_for("input", str(args[0]))

    def check(self, path: object) -> None:
        """Raise PermissionError for a path that a run may not write to."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        real = os.path.realpath(os.fsdecode(path))
        if f"{real}{os.sep}".startswith((*self._allowed, self._hidden, "/memfd:")):
            return
        if "__pycache__" in real or (os.path.exists(real) and not os.path.isfile(real)):
            return
        self._channel.end_for("outside", real)
        raise PermissionError(f"holdfast prove: {real} is outside of the folders of this run")
