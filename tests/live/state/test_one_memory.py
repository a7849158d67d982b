"""Live tensors of different names in one memory: what was saved of them must agree where they overlap."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import StateMismatch

A = torch.arange(8.0)
B = A + 100


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).square().sum().backward()
    optim.step()
    return model, optim


def test_optimizers_that_share_their_moments(tmp_path: Path) -> None:
    """Both are named, and nothing is touched; where they were one memory when saved, too, it fits."""
    (a, of_a), (b, of_b) = trained(0), trained(1)
    holdfast.save(tmp_path / "apart", {"a": a, "b": b, "of_a": of_a, "of_b": of_b}, step=1)
    (a, of_a), (b, of_b) = trained(2), trained(3)
    of_b.load_state_dict(of_a.state_dict())
    state = {"a": a, "b": b, "of_a": of_a, "of_b": of_b}
    before = copy.deepcopy(of_a.state[a.weight])
    with pytest.raises(
        StateMismatch, match=r"of_a\.weight\.exp_avg and of_b\.weight\.exp_avg share"
    ):
        holdfast.load(tmp_path / "apart", state)
    with (
        holdfast.Checkpointer(tmp_path / "apart", state) as ckpt,
        pytest.raises(StateMismatch, match="different values were saved"),
    ):
        ckpt.restore()
    assert all(torch.equal(of_a.state[a.weight][k], v) for k, v in before.items())
    holdfast.save(tmp_path / "shared", state, step=1)
    (c, of_c), (d, of_d) = trained(4), trained(5)
    of_d.load_state_dict(of_c.state_dict())
    holdfast.load(tmp_path / "shared", {"a": c, "b": d, "of_a": of_c, "of_b": of_d})
    assert torch.equal(of_d.state[d.weight]["exp_avg"], before["exp_avg"])


def test_one_weight_under_two_keys(tmp_path: Path) -> None:
    x, y = nn.Linear(2, 2), nn.Linear(2, 2)
    holdfast.save(tmp_path, {"x": x, "y": y}, step=1)
    y.weight = x.weight
    with pytest.raises(StateMismatch, match=r"x\.weight and y\.weight share memory here"):
        holdfast.load(tmp_path, {"x": x, "y": y})
    holdfast.save(tmp_path, {"x": x, "y": y}, step=2)
    holdfast.load(tmp_path, {"x": x, "y": y}, step=2)


def test_two_states_of_one_parameter(tmp_path: Path) -> None:
    model, optim = trained(0)
    holdfast.save(tmp_path, {"m": model, "o": optim}, step=1)
    states = optim.state[model.weight]
    states["exp_avg_sq"] = states["exp_avg"]
    with pytest.raises(StateMismatch, match=r"o\.weight\.exp_avg and o\.weight\.exp_avg_sq share"):
        holdfast.load(tmp_path, {"m": model, "o": optim})


@pytest.mark.parametrize(("b", "fits"), [(A, True), (B, False)], ids=["equal", "others"])
def test_one_tensor_under_two_names(tmp_path: Path, b: torch.Tensor, fits: bool) -> None:
    """In a dict and in a list, itself or a view of it."""
    holdfast.save(tmp_path, {"plain": {"a": A, "b": [b]}}, step=1)
    for x in (torch.zeros(8), torch.zeros(2, 4)):
        live = {"a": x.view(8), "b": [x if x.ndim == 1 else x.view(8)]}
        if fits:
            holdfast.load(tmp_path, {"plain": live})
            assert torch.equal(x.view(8), A)
        else:
            with pytest.raises(StateMismatch, match=r"plain\.a and plain\.b\[0\] share memory"):
                holdfast.load(tmp_path, {"plain": live})
            assert not x.any()


def test_windows_that_overlap_in_part(tmp_path: Path) -> None:
    memory = torch.zeros(12)
    live = {"a": memory[:8], "b": memory[4:]}
    holdfast.save(tmp_path, {"t": {"a": A, "b": torch.cat([A[4:], B[:4]])}}, step=1)
    holdfast.save(tmp_path, {"t": {"a": A, "b": torch.cat([B[:4], A[4:]])}}, step=2)
    with pytest.raises(StateMismatch, match=r"t\.a and t\.b share memory here"):
        holdfast.load(tmp_path, {"t": live}, step=2)
    assert not memory.any()
    holdfast.load(tmp_path, {"t": live}, step=1)
    assert torch.equal(memory, torch.cat([A, B[:4]]))


def test_views_beside_each_other_share_nothing(tmp_path: Path) -> None:
    """Columns of one matrix, real and imaginary parts, a conjugate that says the same."""
    both, wide = torch.zeros(4, 4), torch.zeros(8, dtype=torch.complex64)
    live: dict[str, Any] = {"a": both[:, :2], "b": both[:, 2:], "re": wide.real, "im": wide.imag}
    saved = {"a": A.view(4, 2), "b": B.view(4, 2), "re": A, "im": B}
    holdfast.save(tmp_path, {"t": saved}, step=1)
    holdfast.load(tmp_path, {"t": live})
    assert torch.equal(both, torch.cat([A.view(4, 2), B.view(4, 2)], 1))
    assert torch.equal(wide, torch.complex(A, B))
    z = torch.complex(A, B)
    holdfast.save(tmp_path, {"t": {"z": z, "turned": z.conj().resolve_conj()}}, step=2)
    holdfast.load(tmp_path, {"t": {"z": wide, "turned": wide.conj()}}, step=2)
    assert torch.equal(wide, z)
    with pytest.raises(StateMismatch, match=r"t\.z and t\.turned share memory"):
        holdfast.load(tmp_path, {"t": {"z": wide, "turned": wide}}, step=2)


def test_each_of_many_is_compared_with_its_own(tmp_path: Path) -> None:
    """A flat memory of which parameters are views, and one of them was saved with another value."""
    views = {f"p{i}": A[2 * i : 2 * i + 2] for i in range(4)}
    holdfast.save(tmp_path, {"t": {"flat": A, **views}}, step=1)
    holdfast.save(tmp_path, {"t": {"flat": A, **views, "p2": B[4:6]}}, step=2)
    flat = torch.zeros(8)
    live = {"flat": flat, **{f"p{i}": flat[2 * i : 2 * i + 2] for i in range(4)}}
    holdfast.load(tmp_path, {"t": live}, step=1)
    with pytest.raises(StateMismatch) as error:
        holdfast.load(tmp_path, {"t": live}, step=2)
    (line,) = error.value.problems
    assert line.startswith("t.flat and t.p2 share memory here")


def test_arrays_that_share_memory(tmp_path: Path) -> None:
    """With one another, and with a tensor; where the saved values fit, they are loaded."""
    saved = {"ids": np.arange(3.0), "p": {"w": torch.arange(3.0).double(), "q": np.ones(2)}}
    holdfast.save(tmp_path, saved, step=1)
    flat = np.zeros(3)
    alike: dict[str, Any] = {"ids": flat, "p": {"w": torch.from_numpy(flat), "q": np.zeros(2)}}
    holdfast.load(tmp_path, alike)
    assert flat.tolist() == [0, 1, 2] and alike["p"]["w"].tolist() == [0, 1, 2]
    flat[:] = 7
    for other in (
        {"ids": flat, "p": {"w": torch.zeros(3).double(), "q": flat[1:]}},
        {"ids": np.zeros(3), "p": {"w": torch.from_numpy(flat), "q": flat[:2]}},
    ):
        with pytest.raises(StateMismatch, match="share memory here, and different values"):
            holdfast.load(tmp_path, other)
    assert flat.tolist() == [7, 7, 7]
