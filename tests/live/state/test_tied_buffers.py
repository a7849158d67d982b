"""What is one tensor in modules stays one when a load gives it memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import HoldfastWarning, UsageError

pytestmark = pytest.mark.filterwarnings("error::holdfast.HoldfastWarning")


class Norms(nn.Module):
    """Two layers that update one set of statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.decoder.running_mean = self.encoder.running_mean
        self.decoder.weight = self.encoder.weight


def saved(url: str, state: dict[str, Any]) -> None:
    with torch.no_grad():
        for module in state.values():
            for number, tensor in enumerate(module.state_dict(keep_vars=True).values()):
                tensor.fill_(number + 2)
    holdfast.save(url, state, step=1)


def test_buffers_of_one_module() -> None:
    saved("memory://one-module", {"model": Norms()})
    with torch.device("meta"):
        model = Norms()
    holdfast.load("memory://one-module", {"model": model})
    assert model.encoder.running_mean is model.decoder.running_mean
    assert model.encoder.weight is model.decoder.weight
    model.encoder(torch.randn(8, 4))
    assert torch.equal(model.encoder.running_mean, model.decoder.running_mean)


@pytest.mark.parametrize("as_list", [False, True])
def test_across_keys_of_the_state(as_list: bool) -> None:
    """Also of pipeline stages, whose names are of one key."""

    def build() -> dict[str, Any]:
        first, second = (
            nn.Sequential(nn.BatchNorm1d(4)),
            nn.Sequential(nn.Identity(), nn.BatchNorm1d(4)),
        )
        second[1].running_var, second[1].weight = first[0].running_var, first[0].weight
        return {"model": [first, second]} if as_list else {"a": first, "b": second}

    url = f"memory://across-{as_list}"
    if as_list:
        holdfast.save(url, build(), step=1)
    else:
        saved(url, build())
    with torch.device("meta"):
        state = build()
    first, second = state["model"] if as_list else state.values()
    holdfast.load(url, state)
    assert first[0].running_var is second[1].running_var and first[0].weight is second[1].weight
    assert not first[0].running_mean.is_meta and not second[1].bias.is_meta


class Views(nn.Module):
    """Buffers and a weight in one memory."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.zeros(6)
        self.register_buffer("flat", flat)
        self.register_buffer("rest", flat[3:])
        self.weight = nn.Parameter(flat[:3])


def test_views_of_one_memory() -> None:
    whole = Views()
    with torch.no_grad():
        whole.flat.copy_(torch.arange(6.0))
    holdfast.save("memory://views", {"model": whole}, step=1)
    with torch.device("meta"):
        model = Views()
    holdfast.load("memory://views", {"model": model})
    assert model.flat.tolist() == [0, 1, 2, 3, 4, 5]
    with torch.no_grad():
        model.flat.add_(1)
    assert model.rest.tolist() == [4, 5, 6] and model.weight.tolist() == [1, 2, 3]


def test_a_weight_that_is_a_buffer_too_and_one_that_is_not_persistent() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.weight = nn.Parameter(torch.zeros(3))
            self.inner.register_buffer("seen", self.weight, persistent=False)
            self.register_buffer("kept", torch.zeros(2))
            self.inner.register_buffer("again", self.kept, persistent=False)

    saved("memory://both", {"model": Both()})
    with torch.device("meta"):
        model = Both()
    holdfast.load("memory://both", {"model": model})
    assert model.inner.seen is model.weight and isinstance(model.weight, nn.Parameter)
    assert model.inner.again is model.kept and model.kept.tolist() == [3, 3]
    with torch.device("meta"):
        model = Both()
        model.inner.register_buffer("lost", torch.zeros(1), persistent=False)
    with pytest.raises(UsageError, match=r"buffers inner\.lost are on the meta device"):
        holdfast.load("memory://both", {"model": model})


def test_what_was_one_and_is_two_is_told() -> None:
    """As torch's to_empty() leaves it."""
    saved("memory://untied", {"model": Norms()})
    with torch.device("meta"):
        model = Norms()
    model.to_empty(device="cpu")
    assert model.encoder.running_mean is not model.decoder.running_mean
    with pytest.warns(
        HoldfastWarning, match=r"running_mean and model\.decoder\.running_mean.*\[untied\]$"
    ):
        holdfast.load("memory://untied", {"model": model})
    model.decoder.running_mean, model.decoder.weight = (
        model.encoder.running_mean,
        model.encoder.weight,
    )
    holdfast.load("memory://untied", {"model": model})
    assert torch.equal(model.encoder.running_mean, model.decoder.running_mean)
