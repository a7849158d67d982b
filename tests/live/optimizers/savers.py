"""Those who save and load: holdfast, torch's DCP, torch_checkpointing.

The two others are given what `get_state_dict` says, which torch made for this, and put it back by
`set_state_dict`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import holdfast
from system.distributed.megatron_cpu import _Cuda

from .zoo import Trained


class Saver(Protocol):
    def save(self, root: str, run: Trained) -> None: ...

    def load(self, root: str, run: Trained) -> None: ...


class Holdfast:
    def save(self, root: str, run: Trained) -> None:
        holdfast.save(root, {"model": run.model, "optim": run.optim}, step=2)

    def load(self, root: str, run: Trained) -> None:
        holdfast.load(root, {"model": run.model, "optim": run.optim})


def _said(run: Trained) -> dict[str, Any]:
    model, optim = get_state_dict(run.model, run.parts)
    return {"model": model, "optim": optim}


def _put(run: Trained, said: dict[str, Any]) -> None:
    model, optim = said["model"], said["optim"]
    set_state_dict(run.model, run.parts, model_state_dict=model, optim_state_dict=optim)


class Dcp:
    def save(self, root: str, run: Trained) -> None:
        dcp.save(_said(run), checkpoint_id=root)

    def load(self, root: str, run: Trained) -> None:
        said = _said(run)
        dcp.load(said, checkpoint_id=root)
        _put(run, said)


class TorchCheckpointing:
    """It gathers what it knows on CUDA, whatever the process group; here those tensors are on the CPU."""

    def __init__(self) -> None:
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        items = {name: ItemSpec(resharder=DefaultResharder()) for name in ("model", "optim")}
        # direct I/O, its default, fails on ext4 for files as small as these
        buffered = LocalFileSystemStorageConfig(use_direct_io=False)
        config = CheckpointManager.Config(
            items=items, save=SyncCheckpointSaverConfig(), storage_config=buffered
        )
        self._manager = CheckpointManager(config)

    def save(self, root: str, run: Trained) -> None:
        with _Cuda():
            done = self._manager.save(root, _said(run))
            if done is not None and hasattr(done, "result"):
                done.result()

    def load(self, root: str, run: Trained) -> None:
        with _Cuda():
            found = self._manager.load(root, into=_said(run))
        _put(run, found)


SAVERS: dict[str, Any] = {
    "holdfast": Holdfast,
    "dcp": Dcp,
    "torch_checkpointing": TorchCheckpointing,
}
