"""Make the table of versions tested, from what is installed where the site is built.

python docs/make_site.py
"""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

TESTED = {
    "torch": "everything; 2.6 and newer is supported",
    "transformers": "`Trainer`, models, names of files",
    "accelerate": "`Accelerator`, wrappers",
    "peft": "adapters",
    "lightning": "`Trainer`, Fabric",
    "torchtitan": "checkpoint manager, containers of optimizers",
    "deepspeed": "engines, files, `ds_to_universal`",
    "megatron-core": "models, optimizers, `torch_dist` files",
    "torch-checkpointing": "files",
    "torchao": "quantised weights, low-bit optimizers",
    "bitsandbytes": "quantised layers, 8-bit optimizers",
    "pytorch-optimizer": "optimizers",
    "torchdata": "`StatefulDataLoader`",
    "safetensors": "files",
    "obstore": "buckets",
}
"""Packages of others by what the tests do with them."""


def write(page: Path) -> None:
    """Write the page."""
    rows = [f"| Python | {platform.python_version()} | |"]
    rows += [f"| {name} | {version_of(name)} | {use} |" for name, use in TESTED.items()]
    head = "# Versions tested\n\nMade from what is installed where this site was built.\n"
    columns = ["| package | version | what is tested with it |", "|---|---|---|"]
    page.write_text("\n".join([head, *columns, *rows, ""]))


def version_of(name: str) -> str:
    """The version that is installed, or that none is."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
