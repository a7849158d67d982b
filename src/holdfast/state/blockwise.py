"""Steps of torch's optimizers on the host, a block of elements at a time.

For each term of its formula an optimizer goes over whole tensors: AdamW a dozen times, each time through
memory.  Where each element is treated by itself, its kernels may as well be given a block of elements,
whose values and states stay in the processor's caches until the step is made.  That takes half of the
time or less, and what comes out is the same bit for bit.

The latter is not believed but tried, for each kind of parameter group: kernels may round the last elements
of a tensor, which do not fill a vector register, in another way than the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.state.wrapped import ELEMENTWISE

BLOCK_BYTES = 1 << 19
"""Of each tensor.  Larger ones leave the caches, and their intermediate results are new pages each time."""

TRIED = 203
"""Elements: not a multiple of any vector register."""

FEW = 5
"""Fewer elements than fill a vector register."""


@dataclass(frozen=True)
class Block:
    """Elements of a parameter on this rank; in one dim, or in its own shape if they are all."""

    param: torch.Tensor
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == local(self.param).numel()

    @property
    def is_all(self) -> bool:
        return self.start == 0 and self.is_last

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements of a tensor that lies as the parameter does; shares memory."""
        mine = local(tensor).detach()
        return mine if self.is_all else mine.view(-1)[self.start : self.stop]

    def states(self, states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of these elements; one number that serves them all advances with the last block."""
        shape = local(self.param).shape
        found = {}
        for name, value in states.items():
            if local(value).shape == shape:
                found[name] = self.of(value)
            else:
                found[name] = value if self.is_last else value.clone()
        return found


class Blockwise:
    """Makes an optimizer's steps in blocks, where that changes nothing but the time."""

    def __init__(self, optimizer: Optimizer, block_bytes: int | None = None) -> None:
        self._optimizer = optimizer
        self._block_bytes = block_bytes or BLOCK_BYTES
        self._is_exact: dict[tuple[Any, ...], bool] = {}

    def is_possible(self) -> bool:
        """Whether the step that gradients and states call for now can be made so, and is worth it."""
        groups = self._optimizer.param_groups
        return (
            _steps_by_itself(self._optimizer)
            and any(self._is_large(p) for group in groups for p in group["params"])
            and all(self._can_cut(group) for group in groups)
        )

    def _is_large(self, p: torch.Tensor) -> bool:
        return p.grad is not None and local(p).numel() * p.itemsize > self._block_bytes

    def _can_cut(self, group: dict[str, Any]) -> bool:
        """Whether all its gradients and states lie as their parameters do, and cuts change no element."""
        if any(group.get(name) for name in ("fused", "capturable", "differentiable")):
            return False
        given = [p for p in group["params"] if p.grad is not None]
        if not all(_lies_flat(p, self._optimizer.state.get(p, {})) for p in given):
            return False
        return all(self._try(group, dtype) for dtype in {p.dtype for p in given})

    def _try(self, group: dict[str, Any], dtype: torch.dtype) -> bool:
        """Once for all groups that take the same ways through the optimizer."""
        kind = (dtype, *((k, bool(v)) for k, v in sorted(group.items()) if k != "params"))
        if kind not in self._is_exact:
            self._is_exact[kind] = changes_nothing(self._optimizer, group, dtype)
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

    def _blocks(self, params: Sequence[torch.Tensor]) -> Iterator[list[Block]]:
        """Each list is one step: a block of a large parameter, or some small ones."""
        small: list[Block] = []
        size = 0
        for p in params:
            if p.grad is None:
                continue
            count = local(p).numel()
            elements = self._block_bytes // p.itemsize
            if count > elements:
                for start in range(0, count, elements):
                    yield [Block(p, start, min(start + elements, count))]
                continue
            small.append(Block(p, 0, count))
            size += count
            if size >= elements:
                yield small
                small, size = [], 0
        if small:
            yield small


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it; shares memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def unhooked(optimizer: Optimizer) -> Any:
    """The function that makes its steps, without its hooks."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _steps_by_itself(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's own, and nobody has put something else in the place of its step."""
    kind = type(optimizer)
    given = vars(optimizer).get("step")
    is_own = kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENTWISE
    return is_own and (given is None or hasattr(given, "_wrapped_by_lr_sched"))


def _alike(optimizer: Optimizer) -> Optimizer:
    """Another one of its kind, to be given groups and states of its own."""
    one: Optimizer = object.__new__(type(optimizer))
    vars(one).update(vars(optimizer))
    return one


def _lies_flat(p: torch.Tensor, states: dict[str, Any]) -> bool:
    """Whether a parameter, its gradient and its states can be cut alike; not before it has states."""
    mine = local(p)
    grad = local(p.grad)
    if mine.device.type != "cpu" or mine.dtype not in (torch.float32, torch.float64) or not states:
        return False
    if grad.layout != torch.strided or grad.dtype != mine.dtype:
        return False
    if not all(isinstance(value, torch.Tensor) for value in states.values()):
        return False
    found = [local(value) for value in states.values()]
    if any(value.shape != mine.shape and value.ndim for value in found):
        return False
    return all(t.is_contiguous() for t in (mine, grad, *(v for v in found if v.ndim)))


def changes_nothing(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether a few steps on a few elements come out alike in one piece and in many."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(TRIED, dtype=dtype, generator=generator) for _ in range(5)]
    results = []
    for in_blocks in (False, True):
        p = torch.nn.Parameter(draws[0].clone())
        one = _alike(optimizer)
        one.state = defaultdict(dict)
        one.param_groups = [{**group, "params": [p]}]
        many = Blockwise(one, FEW * p.itemsize)
        for number, grad in enumerate(draws[1:]):
            p.grad = grad.clone()
            if in_blocks and number:  # the first step makes the states
                many.step()
            else:
                unhooked(one)(one)
        results.append([p.detach(), *one.state[p].values()])
    return all(torch.equal(whole, parts) for whole, parts in zip(*results))
