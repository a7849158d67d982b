"""Names are torch's own, whatever wraps a module, at any depth: `get_model_state_dict` is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

import holdfast
from capabilities import FQN_MODIFIERS
from holdfast.errors import UsageError

pytestmark = pytest.mark.usefixtures("mesh")

Wrap = Callable[[nn.Module], nn.Module]


def plain(module: nn.Module) -> nn.Module:
    return module


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def fabric(module: nn.Module) -> nn.Module:
    """Lightning Fabric's own wrapper, around DDP."""
    pytest.importorskip("lightning")
    from lightning.fabric import Fabric
    from lightning.fabric.wrappers import _FabricModule

    return _FabricModule(DDP(module), Fabric(accelerator="cpu").strategy, module)


class Extra(nn.Linear):
    """With an extra state and a buffer."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.register_buffer("seen", torch.zeros(3))
        self.said = "nothing"

    def get_extra_state(self) -> Any:
        return {"said": self.said}

    def set_extra_state(self, state: Any) -> None:
        self.said = state["said"]


def residuals(wrap: Wrap, value: float) -> holdfast.compression.TopK:
    """Of a model that is wrapped inside of its DDP; they have a value that tells them."""
    topk = holdfast.compression.TopK()
    topk.register(DDP(nn.Sequential(wrap(nn.Linear(2, 2)), nn.Linear(2, 2))))
    for residual in topk._residual.values():
        residual.fill_(value)
    return topk


def test_what_a_compressor_holds_back_goes_by_torchs_names(tmp_path: Path) -> None:
    wrapped = residuals(compiled, 1)
    holdfast.save(tmp_path, {"topk": wrapped}, step=1)
    bare, other = residuals(plain, 2), residuals(lambda m: compiled(checkpoint_wrapper(m)), 3)
    for topk in (bare, other):
        holdfast.load(tmp_path, {"topk": topk})
        assert topk._residual.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert all(bool((r == 1).all()) for r in topk._residual.values())
    former = wrapped.state_dict()
    former["residual"] = {
        n.replace("0.", "0._orig_mod.", 1): r.full_tensor() * 5
        for n, r in former["residual"].items()
    }
    wrapped.load_state_dict(former)
    assert all(bool((r == 5).all()) for r in wrapped._residual.values())


class Fused(nn.Module):
    """Its state_dict says `weight` of what its child has, and tells torch so."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self._register_state_dict_hook(Fused._said)
        self._register_load_state_dict_pre_hook(self._heard)

    def _said(self, destination: dict[str, Any], prefix: str, _: Any) -> None:
        destination[f"{prefix}weight"] = destination.pop(f"{prefix}embedding.weight")

    def _heard(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}embedding.weight"] = state.pop(f"{prefix}weight")

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "embedding"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.embedding(x)
        return y


class Net(nn.Module):
    """Wrapped in several places; a submodule is called as wrappers call what they wrap."""

    def __init__(self, wrap: Wrap, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.module = wrap(nn.Linear(2, 2))
        self.deep = nn.ModuleDict({"module": nn.Sequential(wrap(Extra(2, 2)), nn.Linear(2, 2))})
        self.tied = wrap(nn.Linear(2, 2, bias=False))
        self.again = nn.Linear(2, 2, bias=False)
        self.again.weight = next(self.tied.parameters())  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.deep["module"](self.module(x))
        return y + self.tied(x) + self.again(x)


WRAPS: dict[str, Wrap] = {
    "ddp": DDP,
    "dataparallel": nn.DataParallel,
    "compiled": compiled,
    "checkpoint": checkpoint_wrapper,
    "offload": offload_wrapper,
    "fsdp2": fully_shard,
    "fabric": fabric,
    "two": lambda m: DDP(compiled(checkpoint_wrapper(m))),
    "four": lambda m: compiled(DDP(checkpoint_wrapper(compiled(m)))),
}
UNKNOWN = ("dataparallel", "four", "fabric")
"""What torch itself does not take out of names: DataParallel, a compiled module in a checkpointed one, and
Fabric's wrapper around a module with a child `module`."""


def trained(wrap: Wrap, seed: int, top: bool = False) -> dict[str, Any]:
    """A model, wrapped inside and perhaps as a whole, and an optimizer with states."""
    model: nn.Module = Net(wrap, seed)
    model = wrap(model) if top else model
    optim = torch.optim.Adam(model.parameters(), lr=0.1 * seed)
    torch.manual_seed(7)
    # as wrappers are not to be run here, gradients are made up
    for p in model.parameters():
        p.grad = torch.ones_like(p) * seed
    optim.step()
    return {"model": model, "optim": optim}


def values(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Everything of a plain one."""
    optim = get_optimizer_state_dict(state["model"], state["optim"])["state"]
    found = {f"{n}.{s}": v for n, of in optim.items() for s, v in of.items()}
    return found | {n: v for n, v in state["model"].state_dict().items() if "_extra" not in n}


CASES = [(name, top) for name in WRAPS for top in (False, True)]
CASES.remove(("fsdp2", True))  # a tied weight in two of its units it does not support
MARKED = [pytest.param(*c, marks=pytest.mark.soak if "fabric" in c[0] else ()) for c in CASES]


@pytest.mark.parametrize(("name", "top"), MARKED)
def test_names_are_torchs_own_and_load_without_the_wrapper_and_back(
    tmp_path: Path, name: str, top: bool
) -> None:
    wrapped, bare = trained(WRAPS[name], 1, top), trained(plain, 2)
    holdfast.save(tmp_path / "a", wrapped, step=1)
    with holdfast.open(tmp_path / "a") as found:
        names = {n.removeprefix("model.") for n in found.names() if n.startswith("model.")}
        params = {p for g in found.extras["optim"]["param_groups"] for p in g["params"]}
        names |= {k.removeprefix("model.") for k in found.extras if k.startswith("model.")}
    if name not in UNKNOWN:
        assert names == set(get_model_state_dict(wrapped["model"]))
    assert names == set(get_model_state_dict(bare["model"]))
    assert params == set(dict(bare["model"].named_parameters(remove_duplicate=False)))
    holdfast.load(tmp_path / "a", bare)
    holdfast.save(tmp_path / "b", bare, step=1)
    other = trained(WRAPS[name], 3, top)
    holdfast.load(tmp_path / "b", other)
    holdfast.save(tmp_path / "c", other, step=1)
    end = trained(plain, 4)
    holdfast.load(tmp_path / "c", end)
    mine, expected = values(end), values(bare)
    assert mine.keys() == expected.keys()
    assert all(torch.equal(mine[k], expected[k]) for k in mine)
    for a, b in zip(wrapped["model"].parameters(), bare["model"].parameters()):
        assert torch.equal(a.full_tensor() if hasattr(a, "full_tensor") else a, b)


def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    model(torch.randn(3, 2)).square().sum().backward()
    optim.step()


def layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layer = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])
    return nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(*layer))


def goes_both_ways(folder: Path, wrapped: dict[str, Any]) -> None:
    """Into the same model without anything around it, and back."""
    holdfast.save(folder / "a", wrapped, step=1)
    bare: dict[str, Any] = {"model": layers(2)}
    bare["optim"] = torch.optim.Adam(bare["model"].parameters(), lr=5.0)
    holdfast.load(folder / "a", bare)
    expected = {k: v.clone() for k, v in values(bare).items()}
    assert expected.keys() >= {"0.weight", "0.running_mean", "1.0.0.weight", "1.1.0.bias.exp_avg"}
    step(bare["model"], bare["optim"])
    assert not torch.equal(values(bare)["1.0.0.weight"], expected["1.0.0.weight"])
    holdfast.save(folder / "b", bare, step=1)
    holdfast.load(folder / "b", wrapped)
    holdfast.save(folder / "c", wrapped, step=1)
    end: dict[str, Any] = {"model": layers(3)}
    end["optim"] = torch.optim.Adam(end["model"].parameters())
    holdfast.load(folder / "c", end)
    mine, theirs = values(end), values(bare)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_what_fabric_sets_up(tmp_path: Path, strategy: str) -> None:
    """Model and optimizer as `Fabric.setup` returns them."""
    pytest.importorskip("lightning")
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    bare = layers(1)
    model, optim = fabric.setup(bare, torch.optim.Adam(bare.parameters()))
    step(model, optim)
    goes_both_ways(tmp_path, {"model": model, "optim": optim})


@pytest.mark.soak
@pytest.mark.parametrize("regional", [False, True])
def test_what_accelerate_prepares(tmp_path: Path, regional: bool) -> None:
    """Compiled as a whole, or layer by layer into a copy of the model that shares its weights."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.utils import compile_regions

    accelerator = Accelerator(cpu=True)
    bare = layers(1)
    optim = torch.optim.Adam(bare.parameters())
    model, optim = accelerator.prepare(bare, optim)
    model = compile_regions(model, backend="eager") if regional else compiled(model)
    step(model, optim)
    goes_both_ways(tmp_path, {"model": model, "optim": optim})


def test_an_average_keeps_its_own_prefix(tmp_path: Path) -> None:
    """As torch does: it is no wrapper, but a model beside the model."""
    average = AveragedModel(DDP(nn.Linear(2, 2)))
    holdfast.save(tmp_path, {"ema": average}, step=1)
    with holdfast.open(tmp_path) as found:
        assert {n.removeprefix("ema.") for n in found.names()} == set(get_model_state_dict(average))
        assert "ema.module.weight" in found.names()


def test_a_class_of_ones_own_says_what_does_not_show(tmp_path: Path) -> None:
    """By torch's protocol for modules whose state_dict has other names than their children."""
    model = nn.Sequential(Fused(), DDP(Fused()))
    holdfast.save(tmp_path, {"model": model}, step=1)
    with holdfast.open(tmp_path) as found:
        assert found.names() == ["model.0.weight", "model.1.weight"]
    if FQN_MODIFIERS.is_there:
        assert set(get_model_state_dict(model)) == {"0.weight", "1.weight"}
    other = nn.Sequential(Fused(), Fused())
    holdfast.load(tmp_path, {"model": other})
    assert torch.equal(other[1].embedding.weight, model[1].module.embedding.weight)


class Scaled(DDP):
    """Has a parameter of its own."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        setattr(self, name, nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("top", [False, True])
def test_what_a_wrapper_itself_has_is_saved(tmp_path: Path, top: bool) -> None:
    def build() -> nn.Module:
        scaled = Scaled(nn.Linear(2, 2), "scale")
        return scaled if top else nn.ModuleDict({"part": scaled})

    first, second = build(), build()
    start = "model." if top else "model.part."
    with torch.no_grad():
        for p in first.parameters():
            p.fill_(5)
    holdfast.save(tmp_path, {"model": first}, step=1)
    with holdfast.open(tmp_path) as found:
        assert set(found.names()) == {start + n for n in ("scale", "weight", "bias")}
    holdfast.load(tmp_path, {"model": second})
    assert all(bool((p == 5).all()) for p in second.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_two_that_would_have_one_name_are_refused_with_both(tmp_path: Path, tied: bool) -> None:
    model = nn.ModuleDict({"part": Scaled(nn.Linear(2, 2), "bias")})
    if tied:  # it has another name, too
        model["other"] = nn.Linear(2, 2)
        model["other"].bias = model["part"].module.bias
    said = r"model.part.bias and model.part.module.bias would both be called model.part.bias"
    with pytest.raises(UsageError, match=said):
        holdfast.save(tmp_path, {"model": model}, step=1)
    holdfast.save(tmp_path / "b", {"model": nn.Linear(2, 2)}, step=1)
    with pytest.raises(holdfast.errors.HoldfastError, match=said):
        holdfast.load(tmp_path / "b", {"model": model})


def test_a_buffer_on_the_meta_device_inside_a_wrapper_is_given_memory(tmp_path: Path) -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.BatchNorm1d(2)))
    holdfast.save(tmp_path, {"model": model}, step=1)
    with torch.device("meta"):
        other = nn.Sequential(checkpoint_wrapper(nn.BatchNorm1d(2)))
    holdfast.load(tmp_path, {"model": other})
    assert torch.equal(other[0].running_var, torch.ones(2))


def test_a_module_inside_itself_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.append(model)
    with pytest.raises(UsageError, match=r"inside itself: 1\.1\.1\."):
        holdfast.save(tmp_path, {"model": model}, step=1)
