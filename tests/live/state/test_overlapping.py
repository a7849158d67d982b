"""Live tensors that share memory with themselves, or whose values are not what is in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.errors import LayoutError
from holdfast.live.restore.one_memory import overlaps

Make = Callable[[torch.Tensor], torch.Tensor]

SHARED: dict[str, Make] = {
    "expanded": lambda base: base[:4].unsqueeze(0).expand(3, 4),
    "expanded in the middle": lambda base: base[:6].reshape(2, 1, 3).expand(2, 5, 3),
    "one number": lambda base: base[:1].expand(10),
    "windows": lambda base: base.as_strided((5, 3), (1, 1), 2),
    "interleaved": lambda base: base.as_strided((4, 3), (2, 3)),
    "transposed windows": lambda base: base.as_strided((3, 5), (1, 2)).t(),
}


def base_of(dtype: torch.dtype, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(40).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_values_that_agree_are_loaded_and_nothing_else_is_touched(
    tmp_path: Path, make: Make, dtype: torch.dtype
) -> None:
    saved, live = base_of(dtype, 0), base_of(dtype, 1)
    if dtype.is_floating_point:
        saved[2] = float("nan")
    before = live.clone()
    holdfast.save(tmp_path, {"t": {"x": make(saved)}}, step=1)
    holdfast.load(tmp_path, {"t": {"x": make(live)}})
    expected = before
    expected[make(torch.arange(40))] = make(saved)
    assert live.view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_values_that_differ_are_refused_before_anything_is_loaded(
    tmp_path: Path, make: Make
) -> None:
    shape = make(base_of(torch.float32, 0)).shape
    saved = {"a": torch.ones(3), "x": torch.randn(shape)}
    live = {"a": torch.zeros(3), "x": make(base_of(torch.float32, 1))}
    before = live["x"].clone()
    holdfast.save(tmp_path, {"t": saved}, step=1)
    with pytest.raises(LayoutError, match=r"'t\.x': elements of the live tensor share memory"):
        holdfast.load(tmp_path, {"t": live})
    assert torch.equal(live["x"], before) and not live["a"].any()


def test_a_buffer_that_is_expanded_takes_another_dtype(tmp_path: Path) -> None:
    def module(value: float, dtype: torch.dtype) -> torch.nn.Module:
        built = torch.nn.Module()
        built.register_buffer("scale", torch.full((1,), value, dtype=dtype).expand(6))
        return built

    live = module(0, torch.float64)
    holdfast.save(tmp_path, {"m": module(2.5, torch.float32)}, step=1)
    holdfast.load(tmp_path, {"m": live}, cast=True)
    assert live.scale.tolist() == [2.5] * 6 and live.scale.untyped_storage().nbytes() == 8


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=4))
def test_sharing_is_found_by_strides_just_where_it_is(dims: list[tuple[int, int]]) -> None:
    shape, strides = [n for n, _ in dims], [s for _, s in dims]
    places = torch.arange(200).as_strided(shape, strides).reshape(-1).tolist()
    assert overlaps(torch.zeros(200).as_strided(shape, strides)) == (len(set(places)) < len(places))


LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negative": lambda z: z.conj().imag,
    "negated": torch._neg_view,
    "conjugated": torch.conj,
    "both": lambda z: torch._neg_view(z.conj()),
    "strided": lambda z: z.conj().imag[::2, 1:],
}


@pytest.mark.parametrize("make", LAZY.values(), ids=LAZY)
@pytest.mark.parametrize("form", ["dict", "module", "object"])
def test_negative_and_conjugate_bits(tmp_path: Path, make: Make, form: str) -> None:
    """The values are saved, and the values are loaded: not the memory."""

    class Object:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def state_dict(self) -> dict[str, Any]:
            return {"x": self.tensor}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.tensor.copy_(state["x"])

    def state(tensor: torch.Tensor) -> dict[str, Any]:
        if form == "object":
            return {"t": Object(tensor)}
        if form == "dict":
            return {"t": {"x": tensor}}
        module = torch.nn.Module()
        module.x = torch.nn.Parameter(tensor)
        return {"t": module}

    torch.manual_seed(0)
    saved, live = (make(torch.randn(4, 6, dtype=torch.complex64)) for _ in range(2))
    values = saved.resolve_conj().resolve_neg().clone()
    holdfast.save(tmp_path, state(saved), step=1)
    holdfast.load(tmp_path, state(live))
    assert torch.equal(live.resolve_conj().resolve_neg(), values)
    plain = torch.zeros_like(values)
    holdfast.load(tmp_path, state(plain))
    assert torch.equal(plain, values)


def test_inference_tensors(tmp_path: Path) -> None:
    """Made and used in inference mode; torch lets nobody write to them outside of it."""
    with torch.inference_mode():
        saved, live = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        shared = torch.zeros(1).expand(4)
    holdfast.save(tmp_path, {"m": saved, "x": torch.ones(4)}, step=1)
    holdfast.load(tmp_path, {"m": live, "x": shared})
    assert torch.equal(live.weight, saved.weight) and shared.tolist() == [1] * 4
    holdfast.load(tmp_path, {"m": torch.nn.Linear(3, 2, dtype=torch.float64)}, cast=True)
    with torch.inference_mode():
        other = torch.nn.Linear(3, 2, dtype=torch.float64)
    holdfast.load(tmp_path, {"m": other}, cast=True)
    assert torch.equal(other.weight, saved.weight.double())


def test_saves_begun_in_inference_mode(tmp_path: Path) -> None:
    """What is set aside then is written to again outside of it."""
    state = {"m": torch.nn.BatchNorm1d(3)}
    with holdfast.Checkpointer(tmp_path, state, on_error="raise") as ckpt:
        with torch.inference_mode():
            ckpt.save(1).wait(120)
        state["m"](torch.randn(4, 3))
        ckpt.save(2).wait(120)
        with torch.inference_mode():
            ckpt.save(3).wait(120)
    for step in (2, 3):
        mean = holdfast.open(str(tmp_path), step=step).read("m.running_mean")
        assert torch.equal(torch.from_numpy(mean), state["m"].running_mean)


def test_what_is_loaded_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    def pair(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 3)
        return model, torch.optim.AdamW(model.parameters())

    def trained(model: torch.nn.Module, optim: torch.optim.Optimizer) -> torch.Tensor:
        model(torch.ones(3)).sum().backward()
        optim.step()
        return model.weight.detach()

    model, optim = pair(0)
    trained(model, optim)
    holdfast.save(tmp_path, {"model": model, "optim": optim}, step=1)
    other, other_optim = pair(1)
    with torch.inference_mode():
        holdfast.load(tmp_path, {"model": other, "optim": other_optim})
    optim.zero_grad()
    assert torch.equal(trained(model, optim), trained(other, other_optim))
