"""DCP through holdfast beside kernels that are still to come: what it writes is of the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from capabilities import ALONE
from holdfast.dcp import Reader, Writer
from holdfast.extend import PreparedPart
from system.gpu.devices import DEVICE, needs_device, occupy

pytestmark = needs_device


def values_come_late(model: nn.Module) -> None:
    """Let parameters get their values when the current stream has done something else first."""
    values = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        torch.accelerator.synchronize(torch.device(DEVICE))
        occupy(0.3)
        for p, value in zip(model.parameters(), values):
            p.copy_(value)


@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("on_the_side", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_values_of_the_call(tmp_path: Path, how: str, on_the_side: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1200, 1200) for _ in range(4)]).to(DEVICE)
    expected = {name: t.cpu().clone() for name, t in model.state_dict().items()}
    device = torch.device(DEVICE)
    stream = torch.Stream(device) if on_the_side else torch.accelerator.current_stream(device)
    writer = Writer(tmp_path / "root")
    with torch.cuda.stream(stream) if DEVICE.startswith("cuda") else stream:
        values_come_late(model)
        state = {"model": model.state_dict()}
        if how == "save":
            dcp.save(state, storage_writer=writer, checkpoint_id="1", **ALONE)
        else:
            saving = dcp.async_save(state, storage_writer=writer, checkpoint_id="1", **ALONE)
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            saving.result()
    found = {name: torch.zeros_like(t) for name, t in expected.items()}
    dcp.load({"model": found}, storage_reader=Reader(tmp_path / "root"), checkpoint_id="1", **ALONE)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    again = nn.Sequential(*[nn.Linear(1200, 1200) for _ in range(4)]).to(DEVICE)
    dcp.load(
        {"model": again.state_dict()},
        storage_reader=Reader(tmp_path / "root"),
        checkpoint_id="1",
        **ALONE,
    )
    for name, t in again.state_dict().items():
        assert torch.equal(t.cpu(), expected[name])


def test_what_is_staged_is_of_the_call(tmp_path: Path) -> None:
    """As Megatron-Core asks for, whose process writes it later."""
    tensor = torch.ones(1 << 20, device=DEVICE)
    occupy(0.3)
    tensor.add_(1)
    nothing: Any = None
    prepared = PreparedPart(str(tmp_path), 0, nothing, {}, [], (), nothing, [tensor])
    (staged,) = prepared.staged().tensors
    tensor.zero_()
    assert staged.is_cpu and torch.equal(staged, torch.full((1 << 20,), 2.0))
