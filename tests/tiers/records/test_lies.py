"""Segments whose digests are right and whose headers lie: refused in words, and nothing is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import holdfast
from cli import calling
from holdfast.core.codec.digest import digest
from holdfast.errors import FormatError, HoldfastWarning
from holdfast.store import MemoryStore
from holdfast.tiers.records.segment import (
    HEAD_BYTES,
    Record,
    SegmentHeader,
    aligned,
    encode_header,
    read_header,
)

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


def a_scaler_that_the_optimizer_has_not(header: Header) -> None:
    """What torch's optimizers assert."""
    header["records"][0]["applied"][0]["found_inf"] = 0.0


@pytest.mark.parametrize(
    "change",
    [
        another_number_of_groups,
        groups_that_are_none,
        a_setting_of_another_type,
        a_number_that_is_too_large,
        a_scaler_that_the_optimizer_has_not,
    ],
)
def test_groups_that_no_optimizer_has(tmp_path: Path, change: Callable[[Header], None]) -> None:
    train(tmp_path)
    lie(tmp_path, change)
    code, text = replay(tmp_path)
    assert code == 1
    assert "Traceback" not in text
    assert not (tmp_path / "full").exists()


def test_a_record_that_lies_costs_those_after_it_alone(tmp_path: Path) -> None:
    """Not the steps before: all is read once more, and ends before it."""

    def change(header: Header) -> None:
        for record in header["records"]:
            if record["step"] == 3:
                record["applied"][0]["hyper"][0]["lr"] = "fast"

    train(tmp_path)
    lie(tmp_path, change)
    assert reached(tmp_path) == (2, 2, 0.001)
    lie(tmp_path, groups_that_are_none)
    assert reached(tmp_path) == (1, 1, 0.001)


def reached(root: Path) -> tuple[int, float, float]:
    """The step that a restart reaches, how often AdamW has made one, and its learning rate."""
    model = nn.Linear(4, 4)
    optim = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optim}
    told = pytest.warns(HoldfastWarning, match="records up to step 3 are there and cannot be used")
    with holdfast.Checkpointer(root, state, delta=holdfast.Delta()) as ckpt, told:
        step = int(ckpt.restore())
    return step, float(optim.state[model.weight]["step"]), optim.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "said", [{"parent": (1, 2)}, {"parent": (2, 1)}, {"step": 10**18}, {"table": -(1 << 40)}]
)
def test_records_that_no_run_makes(said: dict[str, Any]) -> None:
    record = Record(2, (1, 1), 16, 8, 8, 8, (), at=0)
    for number, one in enumerate((record, msgspec.structs.replace(record, **said))):
        store = MemoryStore(f"lies-{said}-{number}")
        store.put("x", encode_header(SegmentHeader(1, 0, 1, "p", {}, records=(one,))))
        if number == 0:
            assert read_header(store.open("x"), "x")[0].records == (record,)
            continue
        with pytest.raises(FormatError, match=r"no run can make|digest table"):
            read_header(store.open("x"), "x")
