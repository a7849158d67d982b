"""Tensors that are made of several others come back bit for bit, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import holdfast
from capabilities import FLOAT4
from holdfast.core.checkpoint.verifying import verify
from holdfast.errors import FormatError, LayoutError, StateMismatch, UsageError
from holdfast.live.state.blocks import block_shape
from holdfast.store import open_store


class Halves(torch.Tensor):
    """Keeps its values as two tensors, of which the sum counts; `mark` is what it is besides."""

    upper: torch.Tensor
    lower: torch.Tensor
    mark: Any

    @staticmethod
    def __new__(cls, upper: torch.Tensor, lower: torch.Tensor, mark: Any = None) -> Halves:
        made: Halves = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, upper.shape, dtype=upper.dtype, device=upper.device
        )
        made.upper, made.lower, made.mark = upper, lower, mark
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["upper", "lower"], {"mark": self.mark, "shape": self.shape}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Halves:
        return cls(inner["upper"], inner["lower"], context["mark"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def summed(x: Any) -> Any:
            return x.upper + x.lower if isinstance(x, cls) else x

        if func is torch.ops.aten.detach.default:
            return cls(args[0].upper, args[0].lower, args[0].mark)
        return func(*map(summed, args), **(kwargs or {}))


def halves(seed: int = 0, mark: Any = None) -> Halves:
    torch.manual_seed(seed)
    return Halves(torch.randn(3, 4), torch.randn(3, 4), mark)


def quartered(seed: int) -> Halves:
    return Halves(halves(seed), halves(seed + 1), "nested")


def test_a_subclass_is_saved_as_what_it_is_made_of(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(halves(1), requires_grad=False))
    holdfast.save(tmp_path, {"model": model, "values": {"inner": [quartered(5)]}}, step=1)
    assert sorted(holdfast.open(tmp_path).names()) == [
        "model.weight.lower",
        "model.weight.upper",
        *(f"values.inner[0].{a}.{b}" for a in ("lower", "upper") for b in ("lower", "upper")),
    ]
    other, inner = nn.Module(), quartered(8)
    weight = nn.Parameter(halves(2), requires_grad=False)
    other.register_parameter("weight", weight)
    upper = weight.upper
    assert holdfast.load(tmp_path, {"model": other, "values": {"inner": [inner]}}) == 1
    assert other.weight is weight and weight.upper is upper
    assert torch.equal(weight.upper, halves(1).upper)
    assert torch.equal(weight.lower, halves(1).lower)
    assert torch.equal(inner.lower.upper, quartered(5).lower.upper)
    assert verify(open_store(str(tmp_path)), 1).good


def test_what_a_subclass_is_besides_its_values_is_compared(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"x": halves(0, torch.float16)}, step=1)
    live = halves(1, torch.float32)
    before = live.upper.clone()
    with pytest.raises(
        StateMismatch, match=r"x: a .*Halves saved with .*float16.*, here .*float32"
    ):
        holdfast.load(tmp_path, {"x": live})
    with pytest.raises(StateMismatch, match=r"x: saved as a .*Halves, here it is one tensor"):
        holdfast.load(tmp_path, {"x": torch.zeros(3, 4)})
    with pytest.raises(StateMismatch, match=r"x: saved as a .*Halves, here a torch.sparse_coo"):
        holdfast.load(tmp_path, {"x": torch.zeros(3, 4).to_sparse()})
    assert torch.equal(live.upper, before)
    holdfast.save(tmp_path / "plain", {"x": torch.zeros(3, 4)}, step=1)
    with pytest.raises(StateMismatch, match=r"x: saved as one tensor, here a .*Halves"):
        holdfast.load(tmp_path / "plain", {"x": live})


def test_a_subclass_that_cannot_be_taken_apart_is_refused(tmp_path: Path) -> None:
    class Closed(Halves):
        __tensor_flatten__ = None  # type: ignore[assignment]

    class Wrong(Halves):
        def __tensor_flatten__(self) -> tuple[list[str], Any]:
            return ["mark"], None

    for kind in (Closed, Wrong):
        with pytest.raises(UsageError, match="x.*" + kind.__name__):
            holdfast.save(tmp_path, {"x": kind(torch.ones(2), torch.ones(2), 3)}, step=1)


class Sgd(torch.optim.Optimizer):
    """Keeps a sparse sum of the gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            new = p.grad.to_sparse()
            state["sum"] = (state["sum"] + new).coalesce() if "sum" in state else new
            p.sub_(state["sum"].to_dense(), alpha=0.1)


def trained(seed: int, steps: int) -> tuple[nn.Module, Sgd]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3, bias=False)
    optimizer = Sgd(model.parameters())
    for i in range(steps):
        model.weight.grad = torch.zeros(3, 4)
        model.weight.grad[i % 3, i] = 1.0
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_sparse_state_is_made_or_resized(tmp_path: Path, steps: int) -> None:
    model, optimizer = trained(0, 2)
    holdfast.save(tmp_path, {"model": model, "optim": optimizer}, step=1)
    other, its = trained(1, steps)
    assert holdfast.load(tmp_path, {"model": other, "optim": its}) == 1
    found, expected = its.state[other.weight]["sum"], optimizer.state[model.weight]["sum"]
    assert found.layout is torch.sparse_coo and found.is_coalesced()
    assert torch.equal(found.indices(), expected.indices())
    assert torch.equal(found.values(), expected.values())


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_a_compressed_tensor_takes_another_number_of_elements(
    tmp_path: Path, layout: torch.layout
) -> None:
    holdfast.save(tmp_path, {"x": torch.eye(4).to_sparse(layout=layout)}, step=1)
    live = torch.ones(4, 4).to_sparse(layout=layout)
    holdfast.load(tmp_path, {"x": live})
    assert live.layout is layout and torch.equal(live.to_dense(), torch.eye(4))


def test_indices_that_are_none_are_found(tmp_path: Path) -> None:
    """Nothing of a file reaches torch unchecked: indices outside a sparse tensor would read past it."""
    with torch.sparse.check_sparse_tensor_invariants(False):
        bad = torch.sparse_coo_tensor(torch.tensor([[9], [0]]), torch.ones(1), (3, 4))
    holdfast.save(tmp_path, {"x": bad}, step=1)
    with pytest.raises(FormatError, match="'x': indices"):
        holdfast.load(tmp_path, {"x": torch.zeros(3, 4).to_sparse()})


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore")
def test_a_nested_tensor_takes_values_for_rows_of_its_lengths(
    tmp_path: Path, layout: torch.layout
) -> None:
    def nested(seed: int, *lengths: int) -> torch.Tensor:
        torch.manual_seed(seed)
        rows = [torch.randn(n, 3) for n in lengths]
        return torch.nested.nested_tensor(rows, layout=layout)

    saved, live = nested(0, 2, 4), nested(1, 2, 4)
    holdfast.save(tmp_path, {"x": saved}, step=1)
    holdfast.load(tmp_path, {"x": live})
    assert all(torch.equal(a, b) for a, b in zip(saved.unbind(), live.unbind()))
    with pytest.raises(StateMismatch, match=r"x: a torch\.nested"):
        holdfast.load(tmp_path, {"x": nested(1, 3, 3)})


def test_pairs_of_four_bit_numbers_are_bytes(tmp_path: Path) -> None:
    FLOAT4.require()
    values = torch.arange(12, dtype=torch.uint8).view(3, 4)
    holdfast.save(tmp_path, {"x": values.view(torch.float4_e2m1fn_x2)}, step=1)
    live = torch.zeros(3, 4, dtype=torch.uint8)
    holdfast.load(tmp_path, {"x": live.view(torch.float4_e2m1fn_x2)})
    assert torch.equal(live, values)
    assert holdfast.open(tmp_path).info("x").dtype == "float4_e2m1fn_x2"
    assert holdfast.open(tmp_path).read("x").tobytes() == bytes(range(12))


class Ragged(torch.Tensor):
    """Rows of a matrix, cut by hand: tells its parts as torch's DCP wants to be told."""

    parts: dict[int, torch.Tensor]

    @staticmethod
    def __new__(cls, rows: int, parts: dict[int, torch.Tensor]) -> Ragged:
        made: Ragged = torch.Tensor._make_wrapper_subclass(cls, (rows, 4))  # type: ignore[attr-defined]
        made.parts = parts
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size([at, 0]), part.shape) for at, part in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.parts[index.offset[0]]


def test_parts_cut_by_hand_are_boxes_of_the_whole(tmp_path: Path) -> None:
    whole = torch.arange(28.0).view(7, 4)
    cut = Ragged(7, {5: whole[5:].clone(), 0: whole[:1].clone(), 1: whole[1:5].clone()})
    holdfast.save(tmp_path, {"x": cut}, step=1)
    assert holdfast.open(tmp_path).info("x").shape == (7, 4)
    live = torch.zeros(7, 4)
    holdfast.load(tmp_path, {"x": live})
    assert torch.equal(live, whole)
    other = Ragged(7, {0: torch.zeros(3, 4), 3: torch.zeros(4, 4)})
    holdfast.load(tmp_path, {"x": other})
    assert torch.equal(torch.cat([other.parts[0], other.parts[3]]), whole)
    with pytest.raises(LayoutError, match="overlaps or leaves holes"):
        holdfast.save(tmp_path, {"x": Ragged(7, {0: torch.zeros(3, 4)})}, step=2)
    with pytest.raises(LayoutError, match="not inside"):
        holdfast.save(tmp_path, {"x": Ragged(7, {6: torch.zeros(3, 4)})}, step=2)


def test_blocks_in_a_row_are_boxes_where_dims_divide() -> None:
    for shape in ((6, 4), (2, 3, 8), (12,), (3, 32), (1, 16)):
        for size in range(1, 33):
            block, elements = block_shape(shape, size), torch.arange(int(torch.Size(shape).numel()))
            if block is None or elements.numel() % size:
                continue
            grid = elements.view(shape)
            for d, n in enumerate(block):
                grid = grid.unfold(d, n, n)
            rows = grid.reshape(-1, size)
            assert torch.equal(rows, elements.view(-1, size)), (shape, size)
