"""Every dtype and every way to lie in memory: saved and loaded, the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.core.format.dtypes import DTYPES, numpy_dtype


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bit patterns: NaNs with payloads, infinities and negative zeros among them."""
    count = int(np.prod(shape)) * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    data = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    if dtype == torch.bool:
        data &= 1
    return torch.from_numpy(data).view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes in row-major order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def round_trip(path: Path, tensor: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Save one, load it into the other, in place."""
    holdfast.save(path, {"t": {"x": tensor}}, step=1)
    state = {"t": {"x": into}}
    holdfast.load(path, state)
    assert state["t"]["x"] is into
    return into


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype(tmp_path: Path, name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    dtype = getattr(torch, name)
    shapes = ((), (0, 3), (5, 7), (1000, 3, 101))
    saved = [filled(shape, dtype) for shape in shapes]
    loaded = [filled(shape, dtype, seed=1) for shape in shapes]
    holdfast.save(tmp_path, {"t": saved}, step=1)
    holdfast.load(tmp_path, {"t": loaded})
    assert [raw(t) for t in loaded] == [raw(t) for t in saved]
    with holdfast.open(str(tmp_path)) as checkpoint:
        for i, tensor in enumerate(saved):
            array = checkpoint.read(f"t.[{i}]")
            assert (array.dtype, array.shape) == (numpy_dtype(name), shapes[i])
            assert array.tobytes() == raw(tensor)


def views(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Ways of a (4, 6, 8, 10) tensor to lie in memory."""
    return {
        "transposed": tensor.transpose(0, 3),
        "channels_last": tensor.clone(memory_format=torch.channels_last),
        "strided": tensor[::2, 1::3, :, 3:9],
        "row": tensor[2],
        "column": tensor[:, :, :, 4],
        "expanded": tensor[:, :1].expand(4, 5, 8, 10),
        "permuted": tensor.permute(2, 0, 3, 1),
        "narrowed": tensor.reshape(-1)[7:1000],
    }


@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex64", "float8_e4m3fn", "bool"])
def test_memory_that_is_not_contiguous(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    saved = views(filled((4, 6, 8, 10), dtype))
    plain = {kind: torch.empty(view.shape, dtype=dtype) for kind, view in saved.items()}
    views_too = {kind: views(filled((4, 6, 8, 10), dtype, seed=1))[kind] for kind in saved}
    del views_too["expanded"]  # its elements share memory: nothing can be loaded into it
    holdfast.save(tmp_path, {"t": saved}, step=1)
    for into in (plain, views_too):
        holdfast.load(tmp_path, {"t": into}, only=[f"t.{kind}" for kind in into])
        assert {k: raw(t) for k, t in into.items()} == {k: raw(saved[k]) for k in into}


def test_a_view_takes_its_own_elements_only(tmp_path: Path) -> None:
    base = torch.zeros(6, 6)
    round_trip(tmp_path, torch.ones(2, 6), base[1:5:3])
    assert base.sum(1).tolist() == [0, 6, 0, 0, 6, 0]


@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view, lambda z: torch._neg_view(z.conj())])
def test_lazily_conjugated_and_negated(tmp_path: Path, lazy: object) -> None:
    """Torch keeps conjugation and negation as a bit; what is saved is the values, each time anew."""
    z = torch.randn(5, 4, dtype=torch.complex64)
    state = {"t": {"z": lazy(z)}}
    with holdfast.Checkpointer(tmp_path, state) as ckpt:
        for step in (1, 2):
            z.add_(1)
            ckpt.save(step).wait(120)
    for step, back in ((1, 1), (2, 0)):
        into = torch.empty_like(z)
        holdfast.load(tmp_path, {"t": {"z": into}}, step=step)
        torch.testing.assert_close(into, lazy(z - back).resolve_conj().resolve_neg())


def test_conjugated_parameters(tmp_path: Path) -> None:
    """Parameters are copied in the background, by a plan that is made once."""
    z = torch.randn(6, 3, dtype=torch.complex64)
    module = torch.nn.Module()
    module.z = torch.nn.Parameter(z.conj())
    with holdfast.Checkpointer(tmp_path, {"model": module}) as ckpt:
        for step in (1, 2):
            with torch.no_grad():
                module.z.mul_(2)
            ckpt.save(step).wait(120)
    assert np.array_equal(
        holdfast.open(str(tmp_path), step=2).read("model.z"),
        module.z.detach().resolve_conj().numpy(),
    )


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.float64, torch.int32])
def test_module_tensors_of_one_element_and_none(tmp_path: Path, dtype: torch.dtype) -> None:
    def build(seed: int) -> torch.nn.Module:
        module = torch.nn.Module()
        for i, shape in enumerate([(), (0,), (3, 0, 2), (1,), (7,)]):
            floats = dtype.is_floating_point
            tensor = filled(shape, dtype, seed + i)
            module.register_parameter(f"p{i}", torch.nn.Parameter(tensor, requires_grad=floats))
            module.register_buffer(f"b{i}", filled(shape, dtype, seed + 10 + i))
        return module

    saved, loaded = build(0), build(100)
    holdfast.save(tmp_path, {"m": saved}, step=1)
    holdfast.load(tmp_path, {"m": loaded})
    theirs = loaded.state_dict()
    assert {n: raw(t) for n, t in saved.state_dict().items()} == {
        n: raw(t) for n, t in theirs.items()
    }
