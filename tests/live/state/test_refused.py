"""Tensors that have no values in their memory, or are parts that look whole: refused by name, both ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import holdfast
from holdfast.errors import UsageError


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def viewed(dtype: str) -> torch.Tensor:
    return torch.zeros(4, dtype=torch.uint8).view(getattr(torch, dtype))


def freed(start: int) -> torch.Tensor:
    tensor = torch.zeros(5)[start:]
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


def masked() -> torch.Tensor:
    return torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))


class Computed(torch.Tensor):
    """Three threes, in no memory."""

    @staticmethod
    def __new__(cls) -> Computed:
        return torch.Tensor._make_wrapper_subclass(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


KINDS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "opaque": (lambda: torch.ones(3).to_mkldnn(), "a torch._mkldnn tensor"),
    "masked": (masked, r"MaskedTensor, .*\n  hint: keep its get_data\(\)"),
    "quantised": (quantised, r"torch.qint8 .*\n  hint: .*dequantize\(\)"),
    "half bytes": (lambda: viewed("uint4"), "torch.uint4 .*\n  hint: view it as uint8"),
    "bits": (lambda: viewed("bits8"), "torch.bits8 .*\n  hint: view it as uint8"),
    "meta": (lambda: torch.zeros(3, device="meta"), "meta device, .*\n  hint: make it on a real"),
    "zeros": (lambda: torch._efficientzerotensor(3), "zeros without memory .*\n  hint: clone it"),
    "freed": (lambda: freed(0), "was freed .*0 bytes for 5 elements.*\n  hint: save when"),
    "freed behind its start": (lambda: freed(2), "was freed .*0 bytes for 3 elements"),
    "lazy": (nn.UninitializedParameter, "a lazy tensor .*UninitializedParameter.*\n  hint: run a batch"),
    "lazy buffer": (nn.UninitializedBuffer, "a lazy tensor .*UninitializedBuffer.*\n  hint: run a batch"),
    "fake": (fake, r"FakeTensor, .*\n  hint: build"),
    "computed": (Computed, r"test_refused.Computed, .*\n  hint: keep its values in plain tensors"),
}  # fmt: skip


class Object:
    """Keeps a tensor, as a value of the state or beside a parameter."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"x": [self.tensor]}

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


def as_buffer(tensor: torch.Tensor) -> dict[str, Any]:
    module = nn.Module()
    module.register_buffer("x", tensor)
    return {"m": nn.Sequential(module)}


def as_moment(tensor: torch.Tensor) -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    (p,) = optimizer.param_groups[0]["params"]
    optimizer.state[p]["x"] = tensor
    return {"o": optimizer}


FORMS: dict[str, tuple[Callable[[torch.Tensor], dict[str, Any]], str]] = {
    "itself": (lambda tensor: {"x": tensor}, "x"),
    "dict": (lambda tensor: {"d": {"a": [tensor]}}, "d.a[0]"),
    "object": (lambda tensor: {"o": Object(tensor)}, "o.x[0]"),
    "buffer": (as_buffer, "m.0.x"),
    "moment": (as_moment, "o.group0.0.x"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_saving_is_refused_by_name(tmp_path: Path, kind: str, form: str) -> None:
    if (kind, form) == ("quantised", "object"):
        pytest.skip("what an object says is given back to it, quantised tensors too")
    tensor, expected = KINDS[kind]
    make, name = FORMS[form]
    with pytest.raises(UsageError, match=f"(?s){expected}") as caught:
        holdfast.save(tmp_path, make(tensor()), step=1)
    assert str(caught.value).startswith(f"{name!r}: ")
    assert holdfast.steps(str(tmp_path)) == []


@pytest.mark.filterwarnings("ignore")
def test_what_an_object_says_is_of_plain_tensors(tmp_path: Path) -> None:
    """Others would have to be made anew, to be given back to it."""
    rows = [torch.ones(2), torch.ones(3)]
    for tensor in (
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor(rows),
        torch.nested.nested_tensor(rows, layout=torch.jagged),
    ):
        with pytest.raises(UsageError, match=r"'o\.x\[0\]': a .* cannot be saved"):
            holdfast.save(tmp_path, {"o": Object(tensor)}, step=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = str(tmp_path_factory.mktemp("saved") / "run")
    plain = torch.zeros(3)
    states = [as_buffer(plain), {"x": plain}, as_moment(plain)]
    holdfast.save(root, {k: v for s in states for k, v in s.items()}, step=1)
    return root


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["itself", "buffer", "moment"])
@pytest.mark.parametrize("kind", KINDS)
def test_loading_into_it_is_refused_by_name(saved: str, kind: str, form: str) -> None:
    if (kind, form) == ("meta", "buffer"):
        pytest.skip("a load gives modules memory")
    tensor, expected = KINDS[kind]
    make, name = FORMS[form]
    with pytest.raises(UsageError, match=f"(?s){expected}") as caught:
        holdfast.load(saved, make(tensor()))
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    "transform", [torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())]
)
def test_inside_a_transform(tmp_path: Path, transform: Any) -> None:
    def save(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(
            UsageError, match=r"'t\.x': the memory .* cannot be reached: .*\n.*torch\.func"
        ):
            holdfast.save(tmp_path, {"t": {"x": x}}, step=1)
        return x

    transform(save)(torch.zeros(2, 3))


class Named(nn.Parameter):
    """A user's own, whose memory is as any other's."""


class Told(torch.Tensor):
    """Sees what is called with it, and computes as torch does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_with_plain_memory_are_like_any_tensor(tmp_path: Path) -> None:
    def build(value: float) -> nn.Module:
        module = nn.Module()
        module.own = Named(torch.full((3,), value))
        module.buffer = nn.Buffer(torch.full((3,), value))
        module.told = nn.Parameter(torch.full((3,), value).as_subclass(Told))
        return module

    live = build(0.0)
    holdfast.save(tmp_path, {"m": build(2.0)}, step=1)
    holdfast.load(tmp_path, {"m": live})
    assert all(t.tolist() == [2] * 3 for t in (live.own, live.buffer, live.told))
    assert type(live.own) is Named and type(live.told) is Told


def test_marks_that_say_nothing_here(tmp_path: Path) -> None:
    """Megatron marks what it may cut, and one process cuts nothing."""
    module = nn.Linear(2, 2)
    module.weight.tensor_model_parallel, module.bias.tensor_model_parallel = True, False
    holdfast.save(tmp_path, {"m": module}, step=1)
    assert holdfast.steps(str(tmp_path)) == [1]


# -- packages of others ---------------------------------------------------------------------------


@pytest.mark.soak
def test_bitsandbytes_parameters_are_plain_memory(tmp_path: Path) -> None:
    """What they need besides is their module's business."""
    bnb = pytest.importorskip("bitsandbytes")
    p = bnb.nn.Params4bit(torch.ones(4, 4), requires_grad=False)
    holdfast.save(tmp_path, {"p": {"p": p}}, step=1)
    other = bnb.nn.Params4bit(torch.zeros(4, 4), requires_grad=False)
    holdfast.load(tmp_path, {"p": {"p": other}})
    assert torch.equal(p, other)
