"""holdfast: checkpoints that survive anything and load on any parallelism.

    ckpt = holdfast.Checkpointer("runs/gpt", {"model": model, "optim": optimizer},
                                 every=holdfast.Every(durable=1000), keep=holdfast.Keep(last=3))
    step = ckpt.restore()
    while step < total:
        ...; optimizer.step(); step += 1
        ckpt.step(step)
    ckpt.close()

Names are loaded when first used, so that tools which only look never import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast import compression, dcp, errors, events, integrations, sources, store, testing
    from holdfast.checkpoint.opened import Checkpoint
    from holdfast.checkpoint.tidying import Keep
    from holdfast.checkpointer import Checkpointer
    from holdfast.converting import Converted, convert
    from holdfast.delta.options import Delta
    from holdfast.errors import HoldfastError, HoldfastWarning, silence
    from holdfast.layout import Box
    from holdfast.looking import open, steps
    from holdfast.memory.options import Memory
    from holdfast.once import load, save
    from holdfast.policy.tuning import Auto
    from holdfast.restore.result import Found, Restored
    from holdfast.run.recovery import kept, recoverable
    from holdfast.saving import Save
    from holdfast.schedule import Every
    from holdfast.state.ignoring import ignore
    from holdfast.state.rng import Rng
    from holdfast.state.trainable import trainable_only

_HOME = {
    "Auto": "holdfast.policy.tuning",
    "Box": "holdfast.layout",
    "Checkpoint": "holdfast.checkpoint.opened",
    "Checkpointer": "holdfast.checkpointer",
    "Converted": "holdfast.converting",
    "Delta": "holdfast.delta.options",
    "Every": "holdfast.schedule",
    "Found": "holdfast.restore.result",
    "HoldfastError": "holdfast.errors",
    "HoldfastWarning": "holdfast.errors",
    "Keep": "holdfast.checkpoint.tidying",
    "Memory": "holdfast.memory.options",
    "Restored": "holdfast.restore.result",
    "Rng": "holdfast.state.rng",
    "Save": "holdfast.saving",
    "compression": "holdfast",
    "convert": "holdfast.converting",
    "dcp": "holdfast",
    "errors": "holdfast",
    "events": "holdfast",
    "ignore": "holdfast.state.ignoring",
    "integrations": "holdfast",
    "kept": "holdfast.run.recovery",
    "load": "holdfast.once",
    "open": "holdfast.looking",
    "recoverable": "holdfast.run.recovery",
    "save": "holdfast.once",
    "silence": "holdfast.errors",
    "sources": "holdfast",
    "steps": "holdfast.looking",
    "store": "holdfast",
    "testing": "holdfast",
    "trainable_only": "holdfast.state.trainable",
}

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
    "Save",
    "__version__",
    "compression",
    "convert",
    "dcp",
    "errors",
    "events",
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
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    if home == "holdfast":
        return importlib.import_module(f"holdfast.{name}")
    try:
        return getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise ModuleNotFoundError(
                f"holdfast.{name} needs PyTorch: pip install 'holdfast[torch]'", name="torch"
            ) from error
        raise


def __dir__() -> list[str]:
    return __all__
