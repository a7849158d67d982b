"""Planners of one's own, which hand out other tensors than those of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import ReadItem

from capabilities import ALONE
from holdfast.dcp import Reader, Writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Staging(dcp.DefaultLoadPlanner):  # type: ignore[misc]  # torch gives no types
    """Loads each tensor into one buffer, and from there into its place."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.zeros(64)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        size = read_item.lengths
        return self.buffer[: size.numel()].view(size)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        place: Any = self.state_dict[read_item.dest_index.fqn]
        place.copy_(tensor)


def test_a_planner_with_one_buffer_for_all(tmp_path: Path) -> None:
    saved = {f"t{n}": torch.rand(n, 4) for n in range(9)} | {"one": torch.tensor(3.0)}
    dcp.save(saved, storage_writer=Writer(tmp_path), checkpoint_id="1", **ALONE)
    state = {name: torch.zeros_like(t) for name, t in saved.items()}
    dcp.load(state, storage_reader=Reader(tmp_path), planner=Staging(), **ALONE)
    assert [name for name, t in saved.items() if not torch.equal(state[name], t)] == []
