"""Worker, 3 ranks: plain tensors of which each rank has some boxes of the whole, and their padding."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.core.layout import Box, whole
from holdfast.dcp import Reader, Writer
from holdfast.errors import LayoutError

from .cases import run_all

CUTS = 30
dcp_knows_them = hasattr(dcp, "CheckpointableTensor")


def cut(draw: random.Random, box: Box, times: int) -> list[Box]:
    """Disjoint boxes that make up a box."""
    boxes = [box]
    for _ in range(times):
        one = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(box.shape))
        at = draw.randint(one.start[dim], one.stop[dim])
        low, high = list(one.stop), list(one.start)
        low[dim] = high[dim] = at
        boxes += [Box(one.start, tuple(low)), Box(tuple(high), one.stop)]
    return boxes


def marked(local: torch.Tensor, shape: tuple[int, ...], places: list[tuple[Any, Any, Any]]) -> Any:
    one: Any = local
    one.global_shape = shape
    one.global_offsets, one.local_offsets, one.local_sizes = (
        tuple(tuple(place[i]) for place in places) for i in range(3)
    )
    return one


def ragged(draw: random.Random, values: torch.Tensor, *, fill: bool) -> Any:
    """This rank's part of a random cut of `values`; all ranks draw alike.  Without `fill`: NaN."""
    shape = tuple(values.shape)
    boxes = cut(draw, whole(shape), draw.randint(0, 6))
    owners = [draw.randrange(dist.get_world_size()) for _ in boxes]
    pads = [draw.randint(0, 2) for _ in boxes]
    mine = [(b, pad) for b, o, pad in zip(boxes, owners, pads) if o == dist.get_rank() and b.size]
    height = sum(b.shape[0] + pad for b, pad in mine)
    others = [max([b.shape[d] for b, _ in mine], default=0) + 1 for d in range(1, len(shape))]
    local, places, at = torch.full((height, *others), float("nan")), [], 0
    for box, pad in mine:
        start = (at, *[0] * len(others))
        places.append((box.start, start, box.shape))
        if fill:
            local[
                Box(start, tuple(a + n for a, n in zip(start, box.shape))).within((0,) * len(start))
            ] = values[box.within((0,) * len(shape))]
        at += box.shape[0] + pad
    return marked(local, shape, places)


def check(one: Any, values: torch.Tensor) -> None:
    """All parts have their values, and the padding is untouched."""
    seen = torch.zeros(one.shape, dtype=torch.bool)
    for at, start, size in zip(one.global_offsets, one.local_offsets, one.local_sizes):
        here = tuple(slice(a, a + n) for a, n in zip(start, size))
        there = tuple(slice(a, a + n) for a, n in zip(at, size))
        assert torch.equal(one[here], values[there]), (at, start, size)
        seen[here] = True
    assert one[~seen].isnan().all()


def drawn(number: int) -> tuple[random.Random, torch.Tensor]:
    draw = random.Random(number)
    shape = [draw.randint(1, 9) for _ in range(draw.randint(1, 3))]
    return draw, torch.randn(shape, generator=torch.Generator().manual_seed(number))


def random_cuts_go_into_others_and_into_other_layouts(out: Path) -> None:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    for number in range(CUTS):
        draw, values = drawn(number)
        root = out / str(number)
        holdfast.save(root, {"t": ragged(draw, values, fill=True)}, step=1)
        assert torch.equal(torch.from_numpy(holdfast.open(root).read("t")), values)
        other = ragged(draw, values, fill=False)
        holdfast.load(root, {"t": other})
        check(other, values)
        plain = torch.zeros(values.shape)
        holdfast.load(root, {"t": plain})
        assert torch.equal(plain, values)
        for placement in (Shard(0), Replicate()):
            sharded = distribute_tensor(torch.zeros(values.shape), mesh, [placement])
            holdfast.load(root, {"t": sharded})
            assert torch.equal(sharded.full_tensor(), values)
        dealt: DTensor = distribute_tensor(values, mesh, [Shard(values.ndim - 1)])
        holdfast.save(out / f"{number}-dealt", {"t": dealt}, step=1)
        again = ragged(draw, values, fill=False)
        holdfast.load(out / f"{number}-dealt", {"t": again})
        check(again, values)


def files_of_dcp_with_them_are_read_and_written(out: Path) -> None:
    """Bit for bit, both ways; torch has them from 2.15 on."""
    if not dcp_knows_them:
        return
    for number in range(CUTS):
        draw, values = drawn(1000 + number)
        theirs, ours, back = (out / f"{number}-{name}" for name in ("dcp", "own", "back"))
        dcp.save({"t": ragged(draw, values, fill=True)}, checkpoint_id=str(theirs))
        other = ragged(draw, values, fill=False)
        holdfast.load(f"dcp:{theirs}", {"t": other})
        check(other, values)
        holdfast.save(ours, {"t": ragged(draw, values, fill=True)}, step=1)
        holdfast.convert(str(ours), str(back), to="dcp")
        again = ragged(draw, values, fill=False)
        dcp.load({"t": again}, checkpoint_id=str(back))
        check(again, values)
        through = str(out / f"{number}-through")
        state = {"t": ragged(draw, values, fill=True)}
        dcp.save(state, storage_writer=Writer(through), checkpoint_id="1")
        for load in (
            lambda state, root=through: holdfast.load(root, state),
            lambda state, root=through: dcp.load(state, storage_reader=Reader(root)),
        ):
            state = {"t": ragged(draw, values, fill=False)}
            load(state)
            check(state["t"], values)


def they_are_trained_and_go_on_by_records(out: Path) -> None:
    """Of AdamW, whose states lie as the parameter; by the full save, and by records behind it."""
    _, values = drawn(7)

    def new(seed: int) -> dict[str, Any]:
        model = torch.nn.Module()
        local = ragged(random.Random(seed), values, fill=True)
        model.t = torch.nn.Parameter(local.nan_to_num())
        model.t.__dict__.update(local.__dict__)
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}

    def step(state: dict[str, Any], number: int) -> None:
        state["model"].t.grad = torch.full_like(state["model"].t, 1.0 / number)
        state["optim"].step()

    options: Any = {"every": holdfast.Every(durable=4, delta=1), "on_error": "raise"}
    state = new(1)
    with holdfast.Checkpointer(out / "root", state, delta=holdfast.Delta(), **options) as ckpt:
        ckpt.restore()
        for number in range(1, 8):
            step(state, number)
            ckpt.step(number)
    plain = torch.nn.Parameter(values.clone())
    optim = torch.optim.AdamW([plain], lr=0.1)
    for number in range(1, 8):
        plain.grad = torch.full_like(plain, 1.0 / number)
        optim.step()
    for seed in (1, 2):  # the same cut, and another
        again = new(seed)
        with holdfast.Checkpointer(out / "root", again, delta=holdfast.Delta(), **options) as ckpt:
            assert ckpt.restore() == 7
        for one, expected in (
            (again["model"].t.detach(), plain.detach()),
            (
                again["optim"].state[again["model"].t]["exp_avg_sq"],
                optim.state[plain]["exp_avg_sq"],
            ),
        ):
            one.__dict__.update(again["model"].t.__dict__)
            for at, start, size in zip(one.global_offsets, one.local_offsets, one.local_sizes):
                here = one[tuple(slice(a, a + n) for a, n in zip(start, size))]
                assert torch.equal(here, expected[tuple(slice(a, a + n) for a, n in zip(at, size))])


def holes_and_overlaps_are_refused_by_name(out: Path) -> None:
    rank = dist.get_rank()
    for name, starts in (("hole", (0, 2, 6)), ("overlap", (0, 1, 2))):
        places = [((starts[rank],), (0,), (2 + (name == "overlap") * (rank == 2) * 4,))]
        table = marked(torch.zeros(8), (8,), places)
        with pytest.raises(LayoutError, match=r"table.*overlaps or leaves holes"):
            holdfast.save(out / name, {"table": table}, step=1)


CASES = [
    random_cuts_go_into_others_and_into_other_layouts,
    files_of_dcp_with_them_are_read_and_written,
    they_are_trained_and_go_on_by_records,
    holes_and_overlaps_are_refused_by_name,
]


if __name__ == "__main__":
    run_all(CASES)
