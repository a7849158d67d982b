"""Segments whose digests are right and whose headers lie: refused in words, and nothing is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from cli import calling
from holdfast.codec.digest import digest
from holdfast.delta.segment import HEAD_BYTES, aligned

pytestmark = pytest.mark.slow

Header = dict[str, Any]


def train(root: Path) -> None:
    """Save step 1 in full, and records of steps 2 and 3."""
    model = nn.Linear(4, 4)
    optim = torch.optim.AdamW(model.parameters())
    every = holdfast.Every(durable=100, delta=1)
    with holdfast.Checkpointer(
        root,
        {"model": model, "optim": optim},
        every=every,
        delta=holdfast.Delta(),
        on_error="raise",
    ) as ckpt:
        for number in (1, 2, 3):
            model(torch.ones(2, 4)).square().mean().backward()
            optim.step()
            optim.zero_grad()
            ckpt.step(number)
            ckpt.wait()


def lie(root: Path, change: Callable[[Header], None]) -> None:
    """Change the headers of all segments, which have the right lengths and digests all the same."""
    for path in (root / "log").rglob("r00000.log"):
        raw = path.read_bytes()
        end = HEAD_BYTES + int.from_bytes(raw[8:16], "little")
        header = json.loads(raw[HEAD_BYTES:end])
        change(header)
        body = json.dumps(header).encode()
        head = raw[:8] + len(body).to_bytes(8, "little") + digest(body).to_bytes(8, "little") + body
        path.write_bytes(head.ljust(aligned(len(head)), b"\0") + raw[aligned(end) :])


def replay(root: Path) -> tuple[int, str]:
    code, out, err = calling.call("replay", root, root / "full", "--to", 3)
    return code, out + err


def test_what_is_true(tmp_path: Path) -> None:
    train(tmp_path)
    lie(tmp_path, lambda header: None)
    assert replay(tmp_path)[0] == 0
    assert holdfast.steps(tmp_path / "full") == [3]


@pytest.mark.parametrize(
    "kind",
    [
        "os:system",
        "torch.optim:Optimizer",
        "torch.optim:Nothing",
        "torch.optim.nothing:Adam",
        "torch.optimus:Adam",
        "torch.optim..os:system",
        "torch.optim",
        "torch.optim.optimizer:deepcopy",
        "torch.optim.swa_utils:AveragedModel",
    ],
)
def test_an_optimizer_that_is_none_of_torchs(tmp_path: Path, kind: str) -> None:
    train(tmp_path)
    lie(tmp_path, lambda header: header["kinds"].update(optim=kind))
    code, text = replay(tmp_path)
    assert code == 2
    assert "Traceback" not in text
    assert kind.rpartition(":")[2] in text, text
    assert not (tmp_path / "full").exists()


def another_number_of_groups(header: Header) -> None:
    for record in header["records"]:
        for one in record["applied"]:
            one["hyper"] = one["hyper"] * 2


def groups_that_are_none(header: Header) -> None:
    for record in header["records"]:
        for one in record["applied"]:
            one["hyper"] = [7]


def a_setting_of_another_type(header: Header) -> None:
    for record in header["records"]:
        for one in record["applied"]:
            one["hyper"][0]["lr"] = "fast"


def a_number_that_is_too_large(header: Header) -> None:
    header["records"][0]["applied"][0]["hyper"][0]["lr"] = 1 << 70


@pytest.mark.parametrize(
    "change",
    [
        another_number_of_groups,
        groups_that_are_none,
        a_setting_of_another_type,
        a_number_that_is_too_large,
    ],
)
def test_groups_that_no_optimizer_has(tmp_path: Path, change: Callable[[Header], None]) -> None:
    train(tmp_path)
    lie(tmp_path, change)
    code, text = replay(tmp_path)
    assert code == 1
    assert "Traceback" not in text
    assert not (tmp_path / "full").exists()
