"""What modules derive from their tensors when they are loaded, by `_load_from_state_dict` or hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast


class Halved(nn.Linear):
    """It keeps a half of its weights, made anew whenever these are loaded."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.loads = -1
        self.derive()

    def derive(self, *_: Any) -> None:
        self.half, self.loads = self.weight.detach() / 2, self.loads + 1

    @property
    def is_true(self) -> bool:
        return torch.equal(self.half, self.weight / 2)


class ByItself(Halved):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.derive()


class ByHook(Halved):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(lambda *_: self.derive())


class Above(nn.Sequential):
    """It derives from what it has inside, which comes first."""

    def __init__(self) -> None:
        super().__init__(ByItself())
        self.register_load_state_dict_post_hook(lambda *_: self.look())

    def look(self) -> None:
        assert self[0].is_true


@pytest.mark.parametrize("kind", [ByItself, ByHook])
def test_it_is_derived_from_what_was_loaded(tmp_path: Path, kind: type[Halved]) -> None:
    holdfast.save(tmp_path, {"model": nn.Sequential(kind())}, step=1)
    model = nn.Sequential(kind())
    holdfast.load(tmp_path, {"model": model})
    assert model[0].is_true and model[0].loads == 1


def test_inner_modules_come_first_and_shared_ones_once(tmp_path: Path) -> None:
    def build() -> nn.Module:
        above = Above()
        return nn.ModuleDict({"a": above, "b": above[0]})

    holdfast.save(tmp_path, {"model": build()}, step=1)
    model = build()
    holdfast.load(tmp_path, {"model": model})
    assert model["b"].is_true and model["b"].loads == 1


def test_only_what_was_loaded(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": nn.Sequential(ByItself(), ByItself())}, step=1)
    model = nn.Sequential(ByItself(), ByItself())
    holdfast.load(tmp_path, {"model": model}, only="model.1.*")
    assert [one.loads for one in model] == [0, 1] and model[1].is_true


def test_a_hook_that_fails_is_told(tmp_path: Path) -> None:
    saved, model = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    holdfast.save(tmp_path, {"model": saved}, step=1)

    def fail(*_: Any) -> None:
        raise KeyError("key")

    model[0].register_load_state_dict_post_hook(fail)
    with pytest.warns(holdfast.HoldfastWarning, match=r"model\.0: .*this Linear derives.*KeyError"):
        holdfast.load(tmp_path, {"model": model})
    assert torch.equal(model[0].weight, saved[0].weight)


class Scaled(Halved):
    """Its state_dict() has the weight in other units; a load takes it back, or anything else."""

    def __init__(self, way: str) -> None:
        super().__init__()
        if way != "load":
            self.register_state_dict_post_hook(self._scale)
        self.register_load_state_dict_pre_hook(
            self._in_place if way == "in place" else self._scale_back
        )
        self.register_load_state_dict_post_hook(lambda *_: self.derive())

    @staticmethod
    def _scale(_: Any, entries: Any, prefix: str, __: Any) -> None:
        entries[f"{prefix}weight"] = entries[f"{prefix}weight"] * 3

    @staticmethod
    def _scale_back(_: Any, entries: Any, prefix: str, *__: Any) -> None:
        entries[f"{prefix}weight"] = entries[f"{prefix}weight"] / 3

    @staticmethod
    def _in_place(module: Any, entries: Any, prefix: str, *__: Any) -> None:
        module.weight /= 3
        module.bias.data[0] = 7
        module.bias.data = torch.zeros(2)
        entries[f"{prefix}bias"].mul_(2)


@pytest.mark.parametrize("way", ["both", "load", "in place"])
def test_weights_are_what_was_saved_whatever_a_load_makes_of_them(tmp_path: Path, way: str) -> None:
    saved, model = nn.Sequential(Scaled(way)), nn.Sequential(Scaled(way))
    weight, bias = saved[0].weight.detach().clone(), saved[0].bias.detach().clone()
    holdfast.save(tmp_path, {"model": saved}, step=1)
    holdfast.load(tmp_path, {"model": model})
    assert torch.equal(model[0].weight, weight) and torch.equal(model[0].bias, bias)
    assert model[0].is_true and model[0].loads == 1 and model[0].weight.requires_grad


class Renamed(Halved):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._put)
        self.register_load_state_dict_pre_hook(self._take)
        self.register_load_state_dict_post_hook(lambda *_: self.derive())

    @staticmethod
    def _put(_: Any, entries: Any, prefix: str, __: Any) -> None:
        entries[f"{prefix}w"] = entries.pop(f"{prefix}weight")

    @staticmethod
    def _take(_: Any, entries: Any, prefix: str, *__: Any) -> None:
        entries[f"{prefix}weight"] = entries.pop(f"{prefix}w")


def test_hooks_that_rename_are_given_their_own_names(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    holdfast.save(tmp_path, {"model": nn.Sequential(Renamed())}, step=1)
    model = nn.Sequential(Renamed())
    holdfast.load(tmp_path, {"model": model})
    assert model[0].is_true and model[0].loads == 1 and not recwarn.list
