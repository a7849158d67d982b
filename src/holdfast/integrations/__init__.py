"""Trainers of other libraries with holdfast's checkpoints: a module for each, imported when it is used."""

import importlib
from typing import Any

__all__ = ["accelerate", "deepspeed", "lightning", "megatron", "torchtitan", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
