"""Top-k with error feedback as a communication hook of DistributedDataParallel.

Of each parameter's gradient, with what earlier steps kept back added to it, a rank sends the elements of
largest magnitude and keeps the rest for later steps (deep gradient compression, Lin et al. 2018, section 2;
LowDiff's compressor has no such memory).  All ranks add up what all have sent, in the order
of ranks, so gradients are equal on all of them bit for bit, whatever DDP's buckets are.

    ranks 0 and 1 send   w[3] = 8, w[5] = 2     and   w[3] = 4, w[9] = 6
    w.grad then is       w[3] = 6, w[5] = 1, w[9] = 3, and zero elsewhere
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from holdfast.base.arguments import count_of, flag_of, instance_of, share_of, unfit
from holdfast.base.errors import StateMismatch, UsageError
from holdfast.live.gradient_compression.marks import mark
from holdfast.live.state.module_wrappers import paths

PART_ALIGNMENT = 16
"""The parts of what a rank sends begin at multiples of so many bytes, so that no dtype is torn."""


SAMPLED_FROM = 1 << 16
SAMPLE_STRIDE = 64
"""One element of so many is in the sample of `largest`."""


class TopK:
    """Ranks exchange the part `ratio` of each parameter's gradient: its largest elements, one at least.

    `error_feedback`: what is not sent is added to the next step's gradient.  That residual is as large as
    the gradients, differs on every rank, and is state: hand the object over to the `Checkpointer` beside
    model and optimizer.  Full saves have it, records of steps do not: docs/reference/records.md says what
    that means.  On another number of ranks the mean of the residuals over ranks stays the same.

    A gradient that is not finite empties the residual of its parameter.
    """

    in_records = False
    """False: it changes with every rank's own gradient, of which no record knows."""

    def __init__(self, ratio: float = 0.01, *, error_feedback: bool = True) -> None:
        self.ratio = share_of(ratio, "TopK", "ratio", hint="0.01 is 1 %")
        self.error_feedback = flag_of(error_feedback, "TopK", "error_feedback")
        self._group: Any = None
        self._mesh: DeviceMesh | None = None
        self._residual: dict[str, torch.Tensor] = {}
        self._names: dict[torch.Tensor, str] = {}
        self._former: dict[str, str] = {}
        """Names of parameters, by what they were when wrappers showed in them."""

    def register(self, model: nn.parallel.DistributedDataParallel) -> None:
        """Compress what this model's ranks exchange.  Once, on every rank, before `restore()`."""
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            raise UsageError(
                f"model: TopK is a hook of DistributedDataParallel, not {type(model).__name__}"
            )
        if self._group is not None:
            raise UsageError("this TopK is registered already", hint="make one for each model")
        self._group = model.process_group
        for name, former, p in named_once(model.module):
            if p.requires_grad:
                self._names[p] = name
                self._former[former] = name
                mark(p, self.num_sent(p) * self._group.size())
                if self.error_feedback:
                    self._residual[name] = torch.zeros_like(p, requires_grad=False)
        if self._residual:
            kind = next(iter(self._names)).device.type
            self._mesh = DeviceMesh.from_group(self._group, kind)
        model.register_comm_hook(None, lambda _, bucket: self._exchange(bucket))

    def num_sent(self, parameter: torch.Tensor) -> int:
        """Number of elements of a parameter's gradient that a rank sends."""
        instance_of(parameter, torch.Tensor, "TopK.num_sent", "parameter", "a tensor")
        size = int(parameter.numel())
        return min(max(1, ceil(self.ratio * size)), size)

    # -- the exchange -----------------------------------------------------------------------------

    def _exchange(self, bucket: Any) -> Any:
        """Start the exchange of a bucket; return a future of the gradients that all ranks apply."""
        buffer = bucket.buffer()
        with torch.no_grad():
            values, indices = self._choose(bucket)
        width = values.numel() * values.element_size()
        sent = torch.empty(
            _padded(width) + indices.numel() * indices.element_size(),
            dtype=torch.uint8,
            device=buffer.device,
        )
        sent[:width].view(values.dtype).copy_(values)
        sent[_padded(width) :].view(indices.dtype).copy_(indices)
        size = self._group.size()
        told = torch.empty(size * sent.numel(), dtype=torch.uint8, device=buffer.device)
        work = dist.all_gather_into_tensor(told, sent, group=self._group, async_op=True)

        def add_up(_: Any) -> torch.Tensor:
            with torch.no_grad():
                buffer.zero_()
                for one in told.view(size, -1).unbind():
                    where = one[_padded(width) :].view(indices.dtype)
                    buffer.index_add_(0, where, one[:width].view(values.dtype) / size)
            return buffer

        return work.get_future().then(add_up)

    def _choose(self, bucket: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose what this rank sends of a bucket: values, and their places in it."""
        values, indices, start = [], [], 0
        whole = bucket.buffer().numel()
        dtype = torch.int32 if whole < 1 << 31 else torch.int64
        for p, grad in zip(bucket.parameters(), bucket.gradients()):
            own = _flat(grad)
            if self.error_feedback:
                own = _flat(self._residual[self._names[p]]).add_(own)
            chosen = largest(own, self.num_sent(p))
            value = own[chosen]
            if self.error_feedback:
                own[chosen] = 0
                _empty_unless(value.isfinite().all(), own)
            values.append(value)
            indices.append((chosen + start).to(dtype))
            start += own.numel()
        assert start == whole, "a bucket holds gradients alone"
        return torch.cat(values), torch.cat(indices)

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The residuals of all ranks: of a parameter's shape, with the ranks as first dim."""
        if self._mesh is None:
            return {"ranks": 0, "residual": {}}
        stacked = {
            name: DTensor.from_local(r.unsqueeze(0), self._mesh, [Shard(0)], run_check=False)
            for name, r in self._residual.items()
        }
        return {"ranks": self._group.size(), "residual": stacked}

    def rows_of_rank(self, ranks: int) -> tuple[int, int]:
        """The range of the residuals of so many ranks that become this rank's."""
        self._check_registered()
        ranks = count_of(ranks, "TopK.rows_of_rank", "ranks")
        me, size = self._group.rank(), self._group.size()
        return me * ranks // size, (me + 1) * ranks // size

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's `rows_of_rank` of each residual, given alone or among all of them."""
        self._check_registered()
        try:
            ranks, found = state["ranks"], state["residual"]
        except (TypeError, LookupError):
            what = "what state_dict() of a TopK gave"
            raise unfit("TopK.load_state_dict", "state", state, what) from None
        found = {n if n in self._residual else self._former.get(n, n): v for n, v in found.items()}
        if not self.error_feedback:
            return
        for residual in self._residual.values():
            residual.zero_()
        if not ranks:
            return
        if lost := found.keys() ^ self._residual.keys():
            raise StateMismatch(
                f"residuals of other parameters: {min(lost)!r}", tuple(sorted(lost))
            )
        first, last = self.rows_of_rank(ranks)
        scale = self._group.size() / ranks
        for name, residual in self._residual.items():
            rows = found[name]
            if isinstance(rows, DTensor):  # as `state_dict` gives them
                rows = rows.to_local() if ranks == self._group.size() else rows.full_tensor()
            rows = rows if len(rows) == last - first else rows[first:last]
            for row in rows:
                residual.add_(row.to(residual.device), alpha=scale)

    def _check_registered(self) -> None:
        if self._group is None:
            raise UsageError(
                "this TopK has no model yet", hint="call topk.register(ddp_model) first"
            )


def named_once(root: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Each parameter once: its name, that name with what wrappers put into it, and itself."""
    seen: set[int] = set()
    for prefix, path, part in paths(root):
        for name, p in part._parameters.items():
            if p is not None and id(p) not in seen:
                seen.add(id(p))
                yield prefix + name, path + name, p


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the k elements of largest magnitude, in any order.

    On a CPU a sample tells below what magnitude none of them can be, and few elements are left to choose
    from: a quarter of the time of `torch.topk` over all.
    """
    size = values.abs()
    if size.device.type == "cpu" and len(size) > SAMPLED_FROM and k < len(size) // 8:
        sample = size[::SAMPLE_STRIDE]
        above = torch.topk(sample, min(len(sample), k * 5 // (4 * SAMPLE_STRIDE) + 32)).values[-1]
        left = (size < above).logical_not_().nonzero().squeeze(1)  # what is no number stays
        if len(left) >= k:  # else the sample misled
            return left[torch.topk(size[left], k, sorted=False).indices]
    return torch.topk(size, k, sorted=False).indices


def _padded(size: int) -> int:
    return -(-size // PART_ALIGNMENT) * PART_ALIGNMENT


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as they lie in memory; shares it.  A gradient in a bucket lies as its parameter does."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _empty_unless(finite: torch.Tensor, residual: torch.Tensor) -> None:
    """Set the residual to zero unless `finite`: what has become infinite, or no number, would stay
    so for ever.  Does not wait for a device."""
    if residual.device.type != "cpu":
        residual.copy_(torch.where(finite, residual, 0))
    elif not finite:
        residual.zero_()
