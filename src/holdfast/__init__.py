"""holdfast: checkpoints that survive anything and load on any parallelism.

    ckpt = holdfast.Checkpointer("runs/gpt", {"model": model, "optim": optimizer},
                                 every=holdfast.Every(durable=1000), keep=holdfast.Keep(last=3))
    step = ckpt.restore()
    while step < total:
        ...; optimizer.step(); step += 1
        ckpt.step(step)
    ckpt.close()

Names are loaded when first used, so that tools that only inspect checkpoints never import torch.  Beside a
torch that is older than the oldest supported one, the import raises UsageError.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from holdfast.base.torch_version import refuse_older
from holdfast.base.version import __version__

TYPE_CHECKING = False  # as in typing, which takes longer to import than all that is here
if TYPE_CHECKING:
    from typing import Any

    from holdfast import extend, integrations, testing
    from holdfast.base import errors, events
    from holdfast.base.errors import HoldfastError, HoldfastWarning, silence
    from holdfast.core import store
    from holdfast.core.checkpoint.opened import Checkpoint
    from holdfast.core.checkpoint.tidying import Keep
    from holdfast.core.layout import Box
    from holdfast.formats.converting import Converted, convert
    from holdfast.formats.looking import open, steps, wait_newer
    from holdfast.integrations import dcp
    from holdfast.launch.recovery import kept, recoverable
    from holdfast.live import gradient_compression as compression
    from holdfast.live import sources
    from holdfast.live.every import Every
    from holdfast.live.restore.result import Found, Restored
    from holdfast.live.saving import Save
    from holdfast.live.state.ignoring import ignore
    from holdfast.live.state.rng import Rng
    from holdfast.live.state.trainable import trainable_only
    from holdfast.policy.tuning import Auto
    from holdfast.session.checkpointer import Checkpointer
    from holdfast.session.save_and_load import load, save
    from holdfast.session.status import RunStatus
    from holdfast.tiers.memory.options import Memory
    from holdfast.tiers.records.options import Delta

refuse_older()

_HOME = {
    "Auto": "holdfast.policy.tuning",
    "Box": "holdfast.core.layout",
    "Checkpoint": "holdfast.core.checkpoint.opened",
    "Checkpointer": "holdfast.session.checkpointer",
    "Converted": "holdfast.formats.converting",
    "Delta": "holdfast.tiers.records.options",
    "Every": "holdfast.live.every",
    "Found": "holdfast.live.restore.result",
    "HoldfastError": "holdfast.base.errors",
    "HoldfastWarning": "holdfast.base.errors",
    "Keep": "holdfast.core.checkpoint.tidying",
    "Memory": "holdfast.tiers.memory.options",
    "Restored": "holdfast.live.restore.result",
    "Rng": "holdfast.live.state.rng",
    "RunStatus": "holdfast.session.status",
    "Save": "holdfast.live.saving",
    "convert": "holdfast.formats.converting",
    "ignore": "holdfast.live.state.ignoring",
    "kept": "holdfast.launch.recovery",
    "load": "holdfast.session.save_and_load",
    "open": "holdfast.formats.looking",
    "recoverable": "holdfast.launch.recovery",
    "save": "holdfast.session.save_and_load",
    "silence": "holdfast.base.errors",
    "steps": "holdfast.formats.looking",
    "trainable_only": "holdfast.live.state.trainable",
    "wait_newer": "holdfast.formats.looking",
}

_ELSEWHERE = {
    "checkpoint": "holdfast.core.checkpoint",
    "codec": "holdfast.core.codec",
    "compression": "holdfast.live.gradient_compression",
    "dcp": "holdfast.integrations.dcp",
    "errors": "holdfast.base.errors",
    "events": "holdfast.base.events",
    "layout": "holdfast.core.layout",
    "rules": "holdfast.formats.rules",
    "sources": "holdfast.live.sources",
    "store": "holdfast.core.store",
}
"""Public names of modules that lie in a room."""

_FORMER = {
    "checkpointer": "holdfast.session.checkpointer",
    "delta": "holdfast.tiers.records",
    "format": "holdfast.core.format",
    "group": "holdfast.core.group",
    "interop": "holdfast.formats.read",
    "memory": "holdfast.tiers.memory",
    "once": "holdfast.session.save_and_load",
    "patience": "holdfast.base.storage_deadlines",
    "restore": "holdfast.live.restore",
    "roots": "holdfast.live.roots",
    "run": "holdfast.launch",
    "saving": "holdfast.live.saving",
    "state": "holdfast.live.state",
    "threads": "holdfast.base.threads",
    "uploading": "holdfast.tiers.mirror",
    "wire": "holdfast.base.wire",
    "writers": "holdfast.formats.write",
}
"""Former names of modules, for scripts that still import them; holdfast itself does not use them."""

_OF_A_RUN = ("close", "find", "metrics", "pin", "restore", "status", "step", "unpin", "wait")
"""Methods of a Checkpointer that are looked for in the package."""

__all__ = [
    "Auto",
    "Box",
    "Checkpoint",
    "Checkpointer",
    "Converted",
    "Delta",
    "Every",
    "Found",
    "HoldfastError",
    "HoldfastWarning",
    "Keep",
    "Memory",
    "Restored",
    "Rng",
    "RunStatus",
    "Save",
    "__version__",
    "compression",
    "convert",
    "dcp",
    "errors",
    "events",
    "extend",
    "ignore",
    "integrations",
    "kept",
    "load",
    "open",
    "recoverable",
    "save",
    "silence",
    "sources",
    "steps",
    "store",
    "testing",
    "trainable_only",
    "wait_newer",
]


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE or name in ("extend", "integrations", "testing"):
        return importlib.import_module(f"holdfast.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}{_instead(name)}")
    try:
        return getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise ModuleNotFoundError(
                f"holdfast.{name} needs PyTorch: pip install 'torch-holdfast[torch]'", name="torch"
            ) from error
        raise


def _instead(name: str) -> str:
    """What else a user may mean by a name that does not exist, in words; empty if nothing."""
    if name.startswith("_"):
        return ""
    if name in _OF_A_RUN:
        return f": it is a method, holdfast.Checkpointer(path, state).{name}(); load and save do it once"
    from holdfast.base.suggest import did_you_mean

    close = did_you_mean(name, __all__) or did_you_mean(name.capitalize(), __all__)
    return f"; {close}" if close else ""


def __dir__() -> list[str]:
    return __all__


class _AtHome:
    """Loads a public name as the module that was imported by its own name.

    A loader in all but its base class: importing `importlib.abc` takes as long as all else here.
    """

    def __init__(self, home: str) -> None:
        self._module = importlib.import_module(home)
        self._spec = self._module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _PublicModules:
    """Finds `holdfast.store` in its room, `holdfast.core.store`: one module with two names."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        first, dot, inner = rest.partition(".")
        home = _ELSEWHERE.get(first) or _FORMER.get(first)
        if package != __name__ or home is None:
            return None
        return ModuleSpec(name, _AtHome(home + dot + inner))  # type: ignore[arg-type]  # no subclass


sys.meta_path.insert(0, _PublicModules())
