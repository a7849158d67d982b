"""Steps of torch's optimizers on the host, a block of elements at a time.

An optimizer goes over whole tensors for each term of its formula: AdamW a dozen times, each time through
memory.  Where it treats each element by itself, its kernels can be given a block of elements, whose values
and states stay in the processor's caches until the step is made.  That takes half of the time or less, and
the result is the same bit for bit.

A trial proves the latter for each kind of parameter group: kernels may round the last elements of a tensor,
which do not fill a vector register, in another way than the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.live.state.observer import unhooked
from holdfast.live.state.optimizer_wrappers import ELEMENTWISE
from holdfast.live.state.placed import local_of

CACHED_BYTES = 1 << 19
"""Size of a block in each tensor.  Larger blocks leave the caches, and their intermediate results are new
pages each time."""

TRIED = 203
"""Number of elements in a trial: not a multiple of any vector register."""

TRIAL_BLOCK = 3
"""Number of elements in a block of a trial: fewer than fill a vector register."""

IN_PHASES = frozenset(["ASGD", "RAdam"])
"""Optimizers that take other ways from some step on, which a trial now would not see."""


@dataclass(frozen=True)
class ParamBlock:
    """Elements of a parameter on this rank; in one dim, or in its own shape if they are all."""

    param: torch.Tensor
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == local_of(self.param).numel()

    @property
    def is_all(self) -> bool:
        return self.start == 0 and self.is_last

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block's elements of a tensor with the parameter's layout; shares memory."""
        mine = local_of(tensor)
        return mine if self.is_all else mine.view(-1)[self.start : self.stop]

    def states(self, states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """States of the block's elements; a number that all elements share advances with the last block."""
        shape = local_of(self.param).shape
        found = {}
        for name, value in states.items():
            if local_of(value).shape == shape:
                found[name] = self.of(value)
            else:
                found[name] = value if self.is_last else value.clone()
        return found


class Blockwise:
    """Makes an optimizer's steps in blocks, where that changes nothing but the time."""

    def __init__(self, optimizer: Optimizer, block_bytes: int | None = None) -> None:
        self._optimizer = optimizer
        self._block_bytes = block_bytes or CACHED_BYTES
        self._is_exact: dict[tuple[Any, ...], bool] = {}

    def is_possible(self) -> bool:
        """True if the coming step can be made in blocks, and has a tensor that is large enough."""
        groups = self._optimizer.param_groups
        given = [p for group in groups for p in group["params"] if p.grad is not None]
        return (
            steps_by_itself(self._optimizer)
            and any(self._is_large(p) for p in given)
            and all(_lies_flat(p, self._states(p)) for p in given)
            and not _overlap(t for p in given for t in (p, *self._states(p).values()))
            and all(self._can_cut(group) for group in groups)
        )

    def _states(self, p: torch.Tensor) -> dict[str, Any]:
        return self._optimizer.state.get(p, {})

    def _is_large(self, p: torch.Tensor) -> bool:
        return local_of(p).numel() * p.itemsize > self._block_bytes

    def _can_cut(self, group: dict[str, Any]) -> bool:
        """True if cuts into blocks change no element of the group's large parameters."""
        if any(group.get(name) for name in ("fused", "capturable", "differentiable")):
            return False
        large = [p for p in group["params"] if p.grad is not None and self._is_large(p)]
        return all(self._try(group, p) for p in {p.dtype: p for p in large}.values())

    def _try(self, group: dict[str, Any], p: torch.Tensor) -> bool:
        """True if cuts change nothing; tried once for all groups that take the same ways through
        the optimizer."""
        kind = (p.dtype, *((k, _way(v)) for k, v in sorted(group.items()) if k != "params"))
        if kind not in self._is_exact:
            self._is_exact[kind] = changes_nothing(self._optimizer, group, p)
        return self._is_exact[kind]

    def step(self) -> None:
        """Make the step that `optimizer.step()` would make, without its hooks, where that `is_possible`.
        Blocks."""
        one = _alike(self._optimizer)
        make = unhooked(one)
        for group in self._optimizer.param_groups:
            for blocks in self._blocks(group["params"]):
                params = [block.of(block.param) for block in blocks]
                for p, block in zip(params, blocks):
                    p.grad = block.of(block.param.grad)
                one.param_groups = [{**group, "params": params}]
                one.state = {
                    p: block.states(self._optimizer.state[block.param])
                    for p, block in zip(params, blocks)
                }
                make(one)

    def _blocks(self, params: Sequence[torch.Tensor]) -> Iterator[list[ParamBlock]]:
        """Each list is one step: a block of a large parameter, or some small ones."""
        small: list[ParamBlock] = []
        size = 0
        for p in params:
            if p.grad is None:
                continue
            count = local_of(p).numel()
            elements = self._block_bytes // p.itemsize
            if count > elements:
                for start in range(0, count, elements):
                    yield [ParamBlock(p, start, min(start + elements, count))]
                continue
            small.append(ParamBlock(p, 0, count))
            size += count
            if size >= elements:
                yield small
                small, size = [], 0
        if small:
            yield small


def steps_by_itself(optimizer: Optimizer) -> bool:
    """True if an optimizer is one of torch's that treat each element by itself, and its step is torch's.  A
    scheduler's wrapper, which only calls the step, does not count."""
    kind = type(optimizer)
    step: Any = kind.step
    own = [getattr(f, "__globals__", {}) for f in (step, unhooked(optimizer))]
    given = vars(optimizer).get("step")
    inner = getattr(given, "__func__", None), getattr(given, "__wrapped__", None)
    return (
        kind.__name__ in ELEMENTWISE - IN_PHASES
        and all(names.get("__name__", "").startswith("torch.optim.") for names in own)
        and kind.__module__.startswith("torch.optim.")
        and (given is None or any(one is step for one in inner))
    )


def _way(value: Any) -> Any:
    """The part of a setting that may decide which way an optimizer takes."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_way, value))
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return type(value), bool(value), value < 0.5  # lerp takes another formula from 0.5 on
    return type(value)


def _alike(optimizer: Optimizer) -> Optimizer:
    """Another optimizer of the same class, for groups and states of its own."""
    one: Optimizer = object.__new__(type(optimizer))
    vars(one).update(vars(optimizer))
    return one


def _lies_flat(p: torch.Tensor, states: dict[str, Any]) -> bool:
    """True if a parameter, its gradient and its states can be cut alike; False if any is lacking."""
    mine, grad = local_of(p), p.grad
    if mine.device.type != "cpu" or mine.dtype not in (torch.float32, torch.float64) or not states:
        return False
    if (
        grad is None
        or grad.layout != torch.strided
        or not _lie_alike(grad, p)
        or grad.dtype != p.dtype
    ):
        return False
    if not all(isinstance(value, torch.Tensor) for value in states.values()):
        return False
    found = [p, grad, *(v for v in states.values() if local_of(v).ndim)]
    if not all(_lie_alike(value, p) for value in found):
        return False
    return all(local_of(t).is_contiguous() for t in found)


def _lie_alike(one: torch.Tensor, p: torch.Tensor) -> bool:
    """True if a tensor is plain, and covers the same elements as `p`."""
    if isinstance(one, DTensor) and isinstance(p, DTensor) and one.placements != p.placements:
        return False
    inner = one._local_tensor if isinstance(one, DTensor) else one
    is_plain = type(inner) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and local_of(one).shape == local_of(p).shape


def _overlap(tensors: Iterable[torch.Tensor]) -> bool:
    """True if some of these contiguous tensors share memory."""
    found = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize)
        for t in map(local_of, tensors)
        if t.numel()
    )
    return any(end > start for (_, end), (start, _) in pairwise(found))


def changes_nothing(optimizer: Optimizer, group: dict[str, Any], like: torch.Tensor) -> bool:
    """True if a few steps on a few elements come out alike in one piece and in many.

    `like`: a parameter of the group, with states; the elements have such states, of other values.
    """
    shape, results = local_of(like).shape, []
    for in_blocks in (False, True):
        draw = _draws(like.dtype)
        p = torch.nn.Parameter(next(draw))
        one = _alike(optimizer)
        one.param_groups = [{**group, "params": [p]}]
        states = {
            name: next(draw).to(value.dtype) if local_of(value).shape == shape else value.clone()
            for name, value in optimizer.state[like].items()
        }
        one.state = defaultdict(dict, {p: states})
        step = (
            Blockwise(one, TRIAL_BLOCK * p.itemsize).step
            if in_blocks
            else partial(unhooked(one), one)
        )
        try:
            for _ in range(3):
                p.grad = next(draw) - 0.5
                step()
        except Exception:  # a real step tells, if it fails as well
            return False
        results.append({"": p.detach()} | one.state[p])
    whole, parts = results
    return whole.keys() == parts.keys() and all(_same_bits(whole[k], parts[k]) for k in whole)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def _draws(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Random tensors, the same each time; not negative, as the second moments of gradients are."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.rand(TRIED, dtype=dtype, generator=generator)
