"""One model in many layouts, with values that are known without gathering anything.

Every element is a function of its tensor's name, a `kind` (`param`, `exp_avg`, ...) and its index, so the
right content of any rank's part is known on that rank.  A layout is applied by torch alone to a model
that is filled first; optimizer state takes the parts of a twin model filled with that state's values.

The model has what trips checkpoints up: an odd vocabulary, dims that no axis divides, a dim smaller than
an axis, tied weights, frozen parameters, parameters without optimizer state, scalars and empty tensors,
buffers that are in no checkpoint, and several dtypes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY, WIDTH, HIDDEN, HEADS, LAYERS = 50257, 8, 333, 3, 4
STATES = ("exp_avg", "exp_avg_sq")
NO_STATE = "layers.1.attention.bias"
"""A parameter that has had no gradient yet."""


@cache
def values(name: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The content of a whole tensor; only to be read, for it is shared."""
    salt = zlib.crc32(f"{name}/{kind}".encode())
    index = np.arange(int(np.prod(shape)), dtype=np.uint64)
    mixed = (index * np.uint64(2654435761) + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    number = torch.from_numpy((mixed >> np.uint64(40)).astype(np.int32)).reshape(shape)
    if dtype.is_floating_point:
        return (number.to(torch.float32) / 2**24 - 0.5).to(dtype)
    return (number % 2).bool() if dtype == torch.bool else number.to(dtype)


class Block(nn.Module):
    """Weights cut by rows and by columns, a norm, and a head count smaller than an axis may be."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH * 20, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH * 20 + 1)
        self.attention = nn.Linear(WIDTH, HEADS)
        self.register_buffer("mask", torch.zeros(7, 5, dtype=torch.bool))


class Narrow(nn.Module):
    """Other dtypes, four dims."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(33, 3, 5, 2, dtype=torch.bfloat16))
        self.gate = nn.Parameter(torch.zeros(301, 19, dtype=torch.bfloat16))


class Model(nn.Module):
    """Never run: only its state matters."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.narrow = Narrow()
        self.frozen = nn.Linear(6, 11).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.tie()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("hollow", torch.zeros(2, 0, 3, dtype=torch.float64))
        self.register_buffer("scratch", torch.zeros(13), persistent=False)

    def tie(self) -> None:
        self.head.weight = self.embed.weight


def first_name(name: str) -> str:
    """Tied weights hold the same values."""
    return name.replace("head.weight", "embed.weight")


def fill(model: nn.Module, kind: str) -> None:
    """Known values in every parameter and persistent buffer; NaN in the others."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values(first_name(name), kind, tuple(p.shape), p.dtype))
        for name, b in model.named_buffers():
            known = name.rpartition(".")[2] != "scratch"
            b.copy_(values(name, kind, tuple(b.shape), b.dtype) if known else torch.full_like(b, 9))


# -- layouts --------------------------------------------------------------------------------------

Parts = list[nn.Module]
Apply = Callable[[Model], Parts]


@dataclass(frozen=True)
class Layout:
    """How `num_ranks` ranks hold the model.  `apply` gives what this rank holds."""

    num_ranks: int
    apply: Apply
    leads: Callable[[int], bool]
    """Ranks that together hold everything, each gathering its own part."""


def plain(model: Model) -> Parts:
    return [model]


def ddp(model: Model) -> Parts:
    return [nn.parallel.DistributedDataParallel(model)]


def shard(model: Model, mesh: Any, placement: Any = None) -> None:
    """FSDP2, in the usual groups; tied weights are in one group."""
    for part in (*model.layers.values(), model.narrow):
        fully_shard(part, mesh=mesh, shard_placement_fn=placement)
    fully_shard(model, mesh=mesh, shard_placement_fn=placement)


def fsdp(model: Model) -> Parts:
    shard(model, init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return [model]


def hsdp(model: Model) -> Parts:
    shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return [model]


def cut_tensors(model: Model, mesh: Any) -> None:
    """Tensor parallelism: by columns, by rows, a sequence-parallel norm, the vocabulary."""
    plan: dict[str, Any] = {}
    for i in model.layers:
        plan |= {
            f"layers.{i}.norm": SequenceParallel(),
            f"layers.{i}.up": ColwiseParallel(),
            f"layers.{i}.down": RowwiseParallel(),
            f"layers.{i}.attention": ColwiseParallel(),
        }
    if hasattr(model, "embed"):
        plan["embed"] = RowwiseParallel()
    if hasattr(model, "head"):
        plan["head"] = ColwiseParallel()
    parallelize_module(model, mesh, plan)
    if hasattr(model, "embed") and hasattr(model, "head"):
        model.tie()


def tp(model: Model) -> Parts:
    cut_tensors(model, init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return [model]


def fsdp_tp(dp: int, size: int) -> Apply:
    """Rows are cut by both: by tensor parallelism first, although its axis is the inner one."""

    def apply(model: Model) -> Parts:
        mesh = init_device_mesh("cpu", (dp, size), mesh_dim_names=("dp", "tp"))
        cut_tensors(model, mesh["tp"])
        shard(model, mesh["dp"])
        return [model]

    return apply


def fsdp_tp_apart(model: Model) -> Parts:
    """Two dims, each cut by one axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cut_tensors(model, mesh["tp"])

    def placement(p: nn.Parameter) -> Shard | None:
        cut = [q.dim for q in p.placements if q.is_shard()] if isinstance(p, DTensor) else []
        return Shard(1) if cut == [0] and p.ndim == 2 else None  # FSDP2 cuts dim 1 evenly alone

    shard(model, mesh["dp"], placement)
    return [model]


def stage_of(model: Model, stage: int, num_stages: int, *, embed_twice: bool) -> Model:
    """What one pipeline stage keeps; the last holds the tied weights under one name or the other."""
    for i in list(model.layers):
        if int(i) * num_stages // LAYERS != stage:
            del model.layers[i]
    last = stage == num_stages - 1
    if last and stage > 0:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        if embed_twice:
            model.embed.weight = model.head.weight
    if not last:
        del model.head, model.narrow
    if stage > 0:
        del model.frozen, model.count, model.empty
        if not (last and embed_twice):
            del model.embed
    return model


def pipeline(axes: dict[str, int], *, embed_twice: bool) -> Apply:
    """Pipeline stages outside; `dp` and `tp` inside each."""

    def apply(model: Model) -> Parts:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        stage = stage_of(model, mesh["pp"].get_local_rank(), axes["pp"], embed_twice=embed_twice)
        if "tp" in axes:
            cut_tensors(stage, mesh["tp"])
        if "rep" in axes:
            shard_some(stage, mesh["rep", "dp"])
        elif "dp" in axes:
            shard_some(stage, mesh["dp"])
        return [stage]

    return apply


def shard_some(model: Model, mesh: Any) -> None:
    for part in (*model.layers.values(), *([model.narrow] if hasattr(model, "narrow") else [])):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def virtual_stages(model: Model) -> Parts:
    """Two chunks of the model per rank, interleaved, as a list."""
    rank = torch.distributed.get_rank()
    chunks = []
    for number in (rank, rank + 2):
        chunk = nn.Module()
        chunk.layers = nn.ModuleDict({str(number): model.layers[str(number)]})
        chunks.append(chunk)
    rest = chunks[0] if rank == 0 else chunks[1]
    names = ("embed", "frozen") if rank == 0 else ("narrow", "head")
    for name in names:
        setattr(rest, name, getattr(model, name))
    for name in ("count", "empty", "hollow") if rank == 0 else ():
        rest.register_buffer(name, getattr(model, name))
    return chunks


def first(rank: int) -> bool:
    return rank == 0


LAYOUTS = {
    "plain": Layout(1, plain, first),
    "ddp2": Layout(2, ddp, first),
    "fsdp2": Layout(2, fsdp, first),
    "tp2": Layout(2, tp, first),
    "virtual2": Layout(2, virtual_stages, lambda rank: True),
    "fsdp3": Layout(3, fsdp, first),
    "ddp4": Layout(4, ddp, first),
    "fsdp4": Layout(4, fsdp, first),
    "hsdp2x2": Layout(4, hsdp, first),
    "tp4": Layout(4, tp, first),
    "fsdp2_tp2": Layout(4, fsdp_tp(2, 2), first),
    "fsdp2_tp2_apart": Layout(4, fsdp_tp_apart, first),
    "pp2_dp2": Layout(
        4, pipeline({"pp": 2, "dp": 2}, embed_twice=False), lambda rank: rank % 2 == 0
    ),
    "fsdp8": Layout(8, fsdp, first),
    "fsdp2_tp4": Layout(8, fsdp_tp(2, 4), first),
    "fsdp4_tp2": Layout(8, fsdp_tp(4, 2), first),
    "pp2_dp2_tp2": Layout(
        8, pipeline({"pp": 2, "dp": 2, "tp": 2}, embed_twice=True), lambda rank: rank % 4 == 0
    ),
    "pp2_rep1_dp2_tp2": Layout(
        8,
        pipeline({"pp": 2, "rep": 1, "dp": 2, "tp": 2}, embed_twice=False),
        lambda rank: rank % 4 == 0,
    ),
}


# -- state ----------------------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def raw(tensor: torch.Tensor) -> bytes:
    """Its bytes in row-major order."""
    flat = local(tensor).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def named(parts: Parts) -> dict[str, nn.Parameter]:
    """Every parameter of a rank by its name in the plain model; a tied one once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for part in parts:
        for name, p in part.named_parameters():
            found.setdefault(id(p), (name.removeprefix("module."), p))
    return dict(found.values())


def buffers(parts: Parts) -> dict[str, torch.Tensor]:
    return {n.removeprefix("module."): b for part in parts for n, b in part.named_buffers()}


class Held:
    """What a rank holds of the model in one layout, and what each part must contain."""

    def __init__(self, layout: Layout) -> None:
        self.parts = self._filled(layout, "param")
        self.params = named(self.parts)
        self.twins = {s: named(self._filled(layout, s)) for s in STATES}
        self.right = {name: raw(p) for name, p in self.params.items()}
        self.right |= {name: raw(b) for name, b in buffers(self.parts).items()}
        trained = [p for p in self.params.values() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.25, betas=(0.5, 0.75))
        self.give_state()

    def _filled(self, layout: Layout, kind: str) -> Parts:
        model = Model()
        fill(model, kind)
        return layout.apply(model)

    def give_state(self) -> None:
        """The optimizer state of a run after seven steps."""
        for name, p in self.params.items():
            if p.requires_grad and name != NO_STATE:
                state = {s: self.twins[s][name].detach() for s in STATES}
                self.optimizer.state[p] = {"step": torch.tensor(7.0), **state}
        self.optimizer.param_groups[0]["lr"] = 0.125

    def state(self) -> dict[str, Any]:
        """For holdfast."""
        model: Any = self.parts if len(self.parts) > 1 else self.parts[0]
        return {"model": model, "optim": self.optimizer}

    def spoil(self, *, fresh: bool) -> None:
        """Wrong values everywhere; `fresh`: an optimizer that has made no step."""
        with torch.no_grad():
            for tensor in (*self.params.values(), *buffers(self.parts).values()):
                local(tensor).copy_(torch.ones_like(local(tensor)))
        self.optimizer.param_groups[0]["lr"] = 99.0
        self.optimizer.state.clear()
        if not fresh:
            for p in self.optimizer.param_groups[0]["params"]:
                state = {s: torch.ones_like(p) for s in STATES}
                self.optimizer.state[p] = {"step": torch.tensor(1.0), **state}

    def wrong(self) -> list[str]:
        """Names of tensors of this rank whose bytes are not what they must be."""
        found = []
        for name, tensor in (self.params | buffers(self.parts)).items():
            scratch = name.rpartition(".")[2] == "scratch"
            expected = raw(torch.ones_like(local(tensor))) if scratch else self.right[name]
            if raw(tensor) != expected:
                found.append(name)
        for name, p in self.params.items():
            found += [f"{name}.{s}" for s in self._wrong_states(name, p)]
        if self.optimizer.param_groups[0]["lr"] != 0.125:
            found.append("lr")
        return found

    def _wrong_states(self, name: str, p: nn.Parameter) -> list[str]:
        state = self.optimizer.state.get(p, {})
        if not p.requires_grad or name == NO_STATE:
            return list(state)
        found = [s for s in STATES if s not in state or raw(state[s]) != raw(self.twins[s][name])]
        step = state.get("step")
        return found + (["step"] if step is None or step.item() != 7.0 else [])
