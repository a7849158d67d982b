"""What ranks do together in `test_topk`: each function is run by every rank of a life."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.compression import TopK

RATIO = 0.03
Gradients = dict[str, torch.Tensor]


class Net(nn.Module):
    """Parameters of many sizes; one that is laid out in memory by another order of dims."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(8 * 36, 50)
        self.last = nn.Linear(50, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.wide(torch.relu(self.conv(x)).flatten(1))))


def build() -> Net:
    torch.manual_seed(5)
    return Net()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(100 * step + rank))


class Reference:
    """Top-k with error feedback over dense gradients, by sorting: what each rank sends, and their mean."""

    def __init__(self, net: Net, *, error_feedback: bool) -> None:
        self.error_feedback = error_feedback
        self.kept = {n: np.zeros(p.numel(), np.float32) for n, p in net.named_parameters()}

    def sent(self, grads: Gradients) -> dict[str, np.ndarray]:
        found = {}
        for name, grad in grads.items():
            whole = grad.contiguous().view(-1).numpy() + self.kept[name]
            k = max(1, int(np.ceil(RATIO * whole.size)))
            chosen = np.argsort(-np.abs(whole), kind="stable")[:k]
            out = np.zeros_like(whole)
            out[chosen] = whole[chosen]
            if self.error_feedback:
                self.kept[name] = whole - out
            found[name] = out
        return found


def local_gradients(net: Net, inputs: list[torch.Tensor]) -> Gradients:
    """What backward makes on this rank alone."""
    for p in net.parameters():
        p.grad = None
    for x in inputs:
        net(x).square().mean().backward()
    return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


def mean_of_all(sent: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """In the order of ranks, each divided before it is added."""
    told: list[dict[str, np.ndarray]] = [{}] * dist.get_world_size()
    dist.all_gather_object(told, sent)
    size = np.float32(len(told))
    total = {name: np.zeros_like(values) for name, values in sent.items()}
    for one in told:
        for name, values in one.items():
            total[name] += values / size
    return total


def check_gradients(net: Net, expected: dict[str, np.ndarray]) -> None:
    for name, p in net.named_parameters():
        assert p.grad is not None
        found = p.grad.contiguous().view(-1).numpy()
        assert np.array_equal(found, expected[name]), name


def equals_a_dense_reference(root: Path) -> None:
    """With one bucket and with many, with and without memory of what was not sent."""
    rank = dist.get_rank()
    for error_feedback in (True, False):
        for bucket_mb in (0.01, 25.0):
            net = build()
            single = copy.deepcopy(net)
            model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=bucket_mb)
            TopK(RATIO, error_feedback=error_feedback).register(model)
            reference = Reference(net, error_feedback=error_feedback)
            for step in range(4):
                x = batch(step, rank)
                expected = mean_of_all(reference.sent(local_gradients(single, [x])))
                model.zero_grad()
                model(x).square().mean().backward()
                check_gradients(net, expected)


def gradients_accumulate(root: Path) -> None:
    """What `no_sync` has added up is compressed once."""
    rank = dist.get_rank()
    net = build()
    single = copy.deepcopy(net)
    model = nn.parallel.DistributedDataParallel(net)
    TopK(RATIO).register(model)
    reference = Reference(net, error_feedback=True)
    for step in range(3):
        inputs = [batch(10 * step + i, rank) for i in range(3)]
        expected = mean_of_all(reference.sent(local_gradients(single, inputs)))
        model.zero_grad()
        with model.no_sync():
            for x in inputs[:-1]:
                model(x).square().mean().backward()
        model(inputs[-1]).square().mean().backward()
        check_gradients(net, expected)


def what_is_infinite_does_not_stay(root: Path) -> None:
    """As a loss scaler makes it now and then, on one rank: all see it at that step, and none afterwards."""
    net = build()
    model = nn.parallel.DistributedDataParallel(net)
    topk = TopK(RATIO)
    topk.register(model)
    for step in range(4):
        model.zero_grad()
        loss = model(batch(step, dist.get_rank())).square().mean()
        (loss * (float("inf") if step == 1 and dist.get_rank() == 1 else 1.0)).backward()
        finite = [bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None]
        assert all(finite) == (step != 1)
    assert all(bool(r.isfinite().all()) for r in topk._residual.values())


def trained(steps: int, root: Path) -> tuple[nn.Module, TopK]:
    net = build()
    model = nn.parallel.DistributedDataParallel(net)
    topk = TopK(RATIO)
    topk.register(model)
    for step in range(steps):
        model.zero_grad()
        model(batch(step, dist.get_rank())).square().mean().backward()
    return model, topk


def mean_residual(topk: TopK) -> Gradients:
    found = {}
    for name, residual in topk._residual.items():
        total = residual.double()
        dist.all_reduce(total)
        found[name] = total / dist.get_world_size()
    return found


def residuals_are_saved(root: Path) -> None:
    """And come back to the rank that had them."""
    model, topk = trained(3, root)
    holdfast.save(str(root), {"model": model, "topk": topk}, step=3)
    mean = mean_residual(topk)
    if dist.get_rank() == 0:
        torch.save(mean, root / "mean.pt")
    other, again = trained(1, root)
    holdfast.load(str(root), {"model": other, "topk": again})
    for name, residual in topk._residual.items():
        assert residual.any()
        assert torch.equal(again._residual[name], residual)


def residuals_of_another_number_of_ranks(root: Path) -> None:
    """Their mean over ranks is what it was, for that is what is still to be applied."""
    model, topk = trained(1, root)
    holdfast.load(str(root), {"model": model, "topk": topk})
    expected = torch.load(root / "mean.pt")
    for name, mean in mean_residual(topk).items():
        torch.testing.assert_close(mean, expected[name], rtol=1e-5, atol=1e-9)
        assert mean.any()
