"""`cast=True` rounds, and changes no value otherwise: what the live dtype cannot hold is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from capabilities import FLOAT8_E8M0
from holdfast.errors import StateMismatch

INF, NAN = float("inf"), float("nan")

LOST: list[tuple[str, list[Any], str, str]] = [
    ("float32", [1.0, 1e5], "float16", "100000"),
    ("float32", [65519.0, 65520.0], "float16", "65520"),
    ("float32", [-3.4e38], "bfloat16", "-3.4e+38"),
    ("float64", [1e300], "float32", "1e+300"),
    ("float32", [464.0, 465.0], "float8_e4m3fn", "465"),
    ("float32", [INF], "float8_e4m3fn", "inf"),
    ("float32", [1e6], "float8_e5m2", "1e+06"),
    ("float8_e5m2", [57344.0], "float8_e4m3fn", "57344"),
    ("float32", [-2.0], "float8_e8m0fnu", "-2"),
    ("bool", [True, False], "float8_e8m0fnu", "False"),
    ("int64", [7, 300], "int8", "300"),
    ("int64", [2**40], "int32", str(2**40)),
    ("int64", [-1], "uint8", "-1"),
    ("int64", [-1], "uint64", "-1"),
    ("uint64", [2**63], "int64", str(2**63)),
    ("int64", [1, 2], "bool", "2"),
    ("int64", [2**24 + 1], "float32", str(2**24 + 1)),
    ("int64", [2**63 - 1], "float64", str(2**63 - 1)),
    ("int64", [70000], "float16", "70000"),
    ("float32", [1.0, 0.5], "bool", "0.5"),
    ("float32", [1.5], "int64", "1.5"),
    ("float32", [NAN], "int32", "nan"),
    ("float32", [INF], "int32", "inf"),
    ("float32", [2.0**63], "int64", "9.22337e+18"),
    ("float32", [-1.0], "uint8", "-1"),
    ("complex64", [1 + 2j], "float32", r"(1+2j)"),
    ("complex64", [1e5 + 1j], "complex32", r"(100000+1j)"),
    ("complex64", [2.5 + 0j], "int8", r"(2.5+0j)"),
    ("float64", [1e300], "complex64", "1e+300"),
]

HELD: list[tuple[str, list[Any], str]] = [
    ("float32", [0.1, 65519.0, 1e-30, INF, -INF, NAN, -0.0], "float16"),
    ("float32", [0.1, 1e30, INF, NAN], "bfloat16"),
    ("float64", [0.1, 1e-300], "float32"),
    ("float32", [464.0, -1.7, NAN], "float8_e4m3fn"),
    ("float32", [INF, -INF, 57344.0], "float8_e5m2"),
    ("bfloat16", [1.5, 3e38], "float32"),
    ("int64", [-128, 127], "int8"),
    ("int64", [0, 1], "bool"),
    ("int64", [2**24, -5], "float32"),
    ("int64", [2**62], "float64"),
    ("bool", [True, False], "float16"),
    ("bool", [True, False], "int8"),
    ("bool", [True, True], "float8_e8m0fnu"),
    ("float32", [1.0, 0.0, -0.0], "bool"),
    ("float32", [-(2.0**63), 3.0], "int64"),
    ("complex64", [1 + 0j], "float32"),
    ("complex128", [0.1 + 1j], "complex64"),
    ("float32", [0.5], "complex64"),
]


def known(dtype: str) -> None:
    if dtype == "float8_e8m0fnu":
        FLOAT8_E8M0.require()


def tensor(values: list[Any], dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not dtype.startswith("float8"):
        return torch.tensor(values, dtype=kind)
    return torch.tensor(values).to(kind)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(("saved", "values", "here", "value"), LOST)
def test_a_value_that_the_dtype_cannot_hold_is_refused(
    tmp_path: Path, saved: str, values: list[Any], here: str, value: str
) -> None:
    """With its tensor's name, the value and both dtypes; nothing of it was written."""
    known(here)
    holdfast.save(tmp_path, {"net": {"x": tensor(values, saved)}}, step=1)
    live = torch.zeros(len(values)).to(getattr(torch, here))
    with pytest.raises(StateMismatch) as error:
        holdfast.load(tmp_path, {"net": {"x": live}}, cast=True)
    assert error.value.problems == (
        f"net.x: saved as {saved}, and {value} is no {here}, which it is here",
    )
    poisoned = live.dtype.is_floating_point
    assert live.float().isnan().all() if poisoned else live.dtype.is_complex or not live.any()


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize(("saved", "values", "here"), HELD)
def test_rounding_is_allowed(tmp_path: Path, saved: str, values: list[Any], here: str) -> None:
    """What is no number, or has no end, is that afterwards."""
    known(here)
    before = tensor(values, saved)
    holdfast.save(tmp_path, {"x": before}, step=1)
    live = torch.zeros(len(values)).to(getattr(torch, here))
    holdfast.load(tmp_path, {"x": live}, cast=True)
    assert torch.equal(live.view(torch.uint8), before.to(live.dtype).view(torch.uint8))


def test_a_lost_value_is_found_in_any_block_and_part(tmp_path: Path) -> None:
    """Also in a view with gaps, in an optimizer's states, and by a Checkpointer that resumes."""
    torch.manual_seed(0)
    net = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    net(torch.ones(300)).sum().backward()
    optimizer.step()
    optimizer.state[net.weight]["momentum_buffer"][299, 299] = 1e6
    wide = torch.zeros(300, 600)
    wide[7, 5] = -1e5
    state = {"net": net, "optim": optimizer, "wide": {"x": wide[:, :300]}}
    with holdfast.Checkpointer(tmp_path / "run", state) as ckpt:
        ckpt.save(1).wait()
    half = copy.deepcopy(net).half()
    other = torch.optim.SGD(half.parameters(), momentum=0.9)
    with (
        holdfast.Checkpointer(tmp_path / "run", {"net": half, "optim": other}) as ckpt,
        pytest.raises(StateMismatch, match=r"optim\.weight\.momentum_buffer: .* 1e\+06 is no"),
    ):
        ckpt.restore(cast=True)
    assert half.weight.isnan().all()
    narrow = torch.zeros(300, 900, dtype=torch.float16)
    with pytest.raises(StateMismatch, match=r"wide\.x: .* -100000 is no float16"):
        holdfast.load(tmp_path / "run", {"wide": {"x": narrow[:, ::3]}}, cast=True)


def test_a_source_is_cast_with_the_same_care(tmp_path: Path) -> None:
    """Also a file of torch.save, which others have written."""
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.bias.fill_(1e5)
    torch.save({"net": net.state_dict()}, tmp_path / "theirs.pt")
    half = nn.Linear(3, 2).half()
    with (
        holdfast.Checkpointer(tmp_path / "run", {"net": half}) as ckpt,
        pytest.raises(StateMismatch, match=r"net\.bias: .* 100000 is no float16"),
    ):
        ckpt.restore(source=f"torch:{tmp_path / 'theirs.pt'}", cast=True)
