"""Values that a module makes for its state_dict(): steady or refused, each saved once, and never poison."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import holdfast
from holdfast.errors import StateMismatch, UsageError
from holdfast.live.state.customised import customised

Make = Callable[[nn.Module], Any]


def saying(module: nn.Module, takes: bool = False, **entries: Make) -> nn.Module:
    """A module whose state_dict() has these entries, too; `takes`: its own loader takes them away."""

    def after(part: nn.Module, state: Any, prefix: str, _: Any) -> None:
        state.update({prefix + name: make(part) for name, make in entries.items()})

    def before(part: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for name in entries:
            state.pop(prefix + name, None)

    module.register_state_dict_post_hook(after)
    if takes:
        module.register_load_state_dict_pre_hook(before)
    return module


def linear(fill: float = 1.0) -> nn.Linear:
    made = nn.Linear(2, 3)
    nn.init.constant_(made.weight, fill)
    return made


def counting() -> Make:
    numbers = itertools.count()
    return lambda _: next(numbers)


# -- values that are not the same at each call, or in each run --------------------------------------


@pytest.mark.parametrize("takes", [True, False])
def test_a_value_that_changes_at_each_call_is_refused_at_the_first_save(
    takes: bool, tmp_path: Path
) -> None:
    model = nn.Sequential(saying(linear(), takes, saved_at=counting(), kind=lambda _: "a"))
    with pytest.raises(
        UsageError, match=r"^model\.0\.saved_at: .*each call(?s:.*)ignore\(model, '0\.saved_at'\)"
    ):
        holdfast.save(tmp_path, {"model": model}, step=1)
    holdfast.ignore(model, "0.saved_at")
    holdfast.save(tmp_path, {"model": model}, step=1)
    assert holdfast.open(str(tmp_path)).extras == {"model.0._own_extra_state": {"kind": "a"}}


def test_a_constant_that_has_changed_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": nn.Sequential(saying(linear(), version=lambda _: 1))}, step=1)
    twin = nn.Sequential(saying(linear(2.0), version=lambda _: 2))
    with pytest.raises(StateMismatch, match=r"model\.0\.version: .*(?s:.*)'0\.version'"):
        holdfast.load(tmp_path, {"model": twin})
    assert (twin[0].weight == 2.0).all()
    holdfast.ignore(twin, "0.version")
    holdfast.load(tmp_path, {"model": twin})
    assert (twin[0].weight == 1.0).all()


def test_what_a_module_takes_and_leaves_is_told(tmp_path: Path) -> None:
    holdfast.save(
        tmp_path, {"model": nn.Sequential(saying(linear(), True, version=lambda _: 1))}, step=1
    )
    twin = nn.Sequential(saying(linear(2.0), True, version=lambda _: 2))
    with pytest.warns(holdfast.HoldfastWarning, match=r"model\.0\.version: .* left as it is"):
        holdfast.load(tmp_path, {"model": twin})
    assert (twin[0].weight == 1.0).all()


def test_a_way_to_load_that_fails_is_an_error(tmp_path: Path) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("not this one")

    holdfast.save(tmp_path, {"model": saying(linear(), version=lambda _: 1)}, step=1)
    twin = saying(linear(2.0), version=lambda _: 2)
    twin.register_load_state_dict_pre_hook(fails)
    with pytest.raises(StateMismatch, match=r"model\.version: .*not this one"):
        holdfast.load(tmp_path, {"model": twin})


@pytest.mark.parametrize(
    "make",
    [
        lambda part: part.weight.sum().item(),
        lambda part: part.weight.detach().numpy().sum().item(),
        lambda part: part.weight.data[0].tolist(),
        lambda part: part.weight.T.clone(),
    ],
    ids=["number", "numpy", "list", "tensor"],
)
def test_values_made_from_parameters_come_with_them(make: Make, tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": saying(linear(), total=make)}, step=1)
    twin = saying(linear(2.0), total=make)
    holdfast.load(tmp_path, {"model": twin})
    assert (twin.weight == 1.0).all()


# -- names ------------------------------------------------------------------------------------------


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def fabric(module: nn.Module) -> nn.Module:
    pytest.importorskip("lightning")
    from lightning.fabric import Fabric
    from lightning.fabric.wrappers import _FabricModule

    return _FabricModule(DDP(module), Fabric(accelerator="cpu").strategy, module)


class Around(nn.Module):
    """A wrapper that says so by torch's protocol, and does not show in names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"": "inner"}


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DDP,
    "compiled": compiled,
    "checkpointed": checkpoint_wrapper,
    "compiled and checkpointed": lambda m: compiled(checkpoint_wrapper(m)),
    "fabric": fabric,
    "by protocol": Around,
}


class Kept(nn.Linear):
    """With a live tensor and a made value that it loads itself, and a child called as wrappers' are."""

    def __init__(self, fill: float) -> None:
        super().__init__(2, 2)
        self.codes, self.kind = torch.full((3,), fill), str(fill)
        self._orig_mod = nn.Linear(2, 2)

    def _save_to_state_dict(self, found: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(found, prefix, keep_vars)
        found |= {prefix + "codes": self.codes, prefix + "kind": self.kind}

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.codes, self.kind = state.pop(prefix + "codes"), state.pop(prefix + "kind")
        super()._load_from_state_dict(state, prefix, *args)


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("name", WRAPS)
def test_a_wrapper_and_what_it_wraps_have_one_extra_together(name: str, tmp_path: Path) -> None:
    """A hook of the wrapper's, and one of the module around it, see all of it under names of their own."""

    def build(fill: float) -> nn.Module:
        wrapper = saying(WRAPS[name](Kept(fill)), mode=lambda _: "fast")
        return saying(nn.Sequential(nn.ReLU(), wrapper), epoch=lambda _: 3)

    model, twin = build(1.0), build(2.0)
    said = {"mode": "fast"} if name != "fabric" else {}  # which calls no hooks of its own
    holdfast.save(tmp_path, {"model": model}, step=1)
    found = holdfast.open(str(tmp_path))
    assert sorted(found.names()) == [
        f"model.1.{n}" for n in ("_orig_mod.bias", "_orig_mod.weight", "bias", "codes", "weight")
    ]
    assert found.extras == {
        "model._own_extra_state": {"epoch": 3},
        "model.1._own_extra_state": {"kind": "1.0", **said},
    }
    holdfast.load(tmp_path, {"model": twin})
    plain = nn.Sequential(nn.ReLU(), Kept(3.0))
    with pytest.warns(holdfast.HoldfastWarning, match="model._own_extra_state"):
        holdfast.load(tmp_path, {"model": plain}, strict=False)
    for other in (twin, plain):
        (kept,) = (m for m in other.modules() if isinstance(m, Kept))
        (first,) = (m for m in model.modules() if isinstance(m, Kept))
        assert (kept.codes == 1.0).all() and kept.kind == "1.0"
        assert torch.equal(kept._orig_mod.weight, first._orig_mod.weight)


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    inner = saying(linear(), mode=lambda _: "a")
    model = nn.Sequential(saying(compiled(inner), mode=lambda _: "b"))
    with pytest.raises(UsageError, match=r"would both be called model\.0\.mode"):
        holdfast.save(tmp_path, {"model": model}, step=1)


@pytest.mark.parametrize("live", [True, False])
def test_a_child_that_is_called_as_a_wrappers_keeps_its_name(live: bool, tmp_path: Path) -> None:
    """Its own entry and that of its child are two."""

    class Net(nn.Module):
        def __init__(self, fill: float) -> None:
            super().__init__()
            self._orig_mod, self.fill = linear(fill), fill
            self.here, self.below = torch.full((2,), fill), torch.full((3,), fill)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            found = super().state_dict(*args, **kwargs)
            found["scale"] = self.here if live else self.fill
            found["_orig_mod.scale"] = self.below if live else -self.fill
            return found

        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            if not live:
                self.fill = state["scale"]
            return super().load_state_dict(state, strict=False)

    holdfast.save(tmp_path, {"model": nn.Sequential(Net(1.0))}, step=1)
    found, names = holdfast.open(str(tmp_path)), ("scale", "_orig_mod.scale")
    if live:
        assert {f"model.0.{n}" for n in names} <= set(found.names())
    else:
        assert found.extras["model.0._own_extra_state"] == dict(zip(names, (1.0, -1.0)))
    twin = nn.Sequential(Net(2.0))
    holdfast.load(tmp_path, {"model": twin})
    assert twin[0].fill == 1.0 or (twin[0].below == 1.0).all()


def test_a_shared_module_is_ignored_under_all_its_names(tmp_path: Path) -> None:
    shared = holdfast.ignore(saying(linear(), kind=lambda _: "a"), "kind")
    model = nn.ModuleDict({"first": shared, "second": shared})
    holdfast.save(tmp_path, {"model": model}, step=1)
    assert holdfast.open(str(tmp_path)).extras == {}
    holdfast.load(tmp_path, {"model": model})


@pytest.mark.parametrize("names", [["second.kind"], ["first.kind", "second.kind"]], ids=len)
def test_a_shared_module_is_ignored_under_any_name_that_its_model_gives(
    tmp_path: Path, names: list[str]
) -> None:
    shared = saying(linear(), kind=lambda _: "a")
    model = holdfast.ignore(nn.ModuleDict({"first": shared, "second": shared}), *names)
    assert set(names) <= set(model.state_dict())
    holdfast.save(tmp_path, {"model": model}, step=1)
    assert holdfast.open(str(tmp_path)).extras == {}
    holdfast.load(tmp_path, {"model": model})


# -- what is seen -----------------------------------------------------------------------------------


def test_copies_of_parameters_under_other_names_are_told(tmp_path: Path) -> None:
    copies: dict[str, Make] = {
        "renamed": lambda part: part.weight.detach().clone(),
        "zeros": lambda part: torch.zeros(3),
    }
    model = nn.Sequential(saying(nn.Linear(2, 3), **copies))
    nn.init.zeros_(model[0].bias)
    match = r"model\.0\.renamed \(as model\.0\.weight\);.*ignore\(model, '0\.renamed'\)"
    with holdfast.Checkpointer(tmp_path, {"model": model}) as ckpt:
        with pytest.warns(holdfast.HoldfastWarning, match=match):
            ckpt.save(1).wait()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ckpt.save(2).wait()
    holdfast.ignore(model, "0.renamed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holdfast.save(tmp_path, {"model": model}, step=3)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.complex64, torch.uint16, torch.bool], ids=str
)
def test_made_tensors_of_any_dtype_beside_sharded_ones(
    dtype: torch.dtype, mesh: Any, tmp_path: Path
) -> None:
    """They are compared with plain tensors alone, which asks no other rank."""
    model = fully_shard(nn.Linear(2, 3), mesh=mesh)
    codes = torch.randint(0, 2, (3, 2)).to(dtype)
    codes.view(torch.uint8)[0, 0] = 1
    codes.view(torch.uint8)[1, 0] = 0
    model.register_buffer("codes", codes)
    saying(model, copied=lambda part: part.codes.clone(), like=lambda _: torch.ones(3, 2))
    with pytest.warns(holdfast.HoldfastWarning, match=r"model\.copied \(as model\.codes\)"):
        holdfast.save(tmp_path, {"model": model}, step=1)


def test_what_comes_later_is_seen() -> None:
    """A hook, a module, a parameter that was replaced, and a hook that has more to say."""
    model = saying(nn.Sequential(linear(), linear()))
    assert customised("model", model) == []
    model[0].register_state_dict_post_hook(lambda _, s, p, __: s.update({f"{p}new": 1}))
    assert [own.made for own in customised("model", model)] == [{"new": 1}]
    model.append(Kept(1.0))
    assert {own.path for own in customised("model", model)} == {"0", "2"}
    said: dict[str, Any] = {}
    model.register_state_dict_post_hook(lambda _, s, p, __: s.update(said))
    was = model[1].weight
    model.register_state_dict_post_hook(lambda _, s, p, __: s.update({f"{p}first": was}))
    assert {own.path for own in customised("model", model)} == {"0", "2"}
    model[1].weight = nn.Parameter(was.detach().clone())
    assert customised("model", model)[-1].tensors.keys() == {"first"}
    said["later"] = 3
    assert customised("model", model)[-1].made == {"later": 3}


def test_a_record_asks_a_module_once(tmp_path: Path) -> None:
    """And another time where the optimizer's step begins; a hook costs a walk over all of the model."""
    calls: list[int] = []
    model = saying(nn.Sequential(linear(), linear()), calls=lambda _: calls.append(1))
    model[1] = nn.Linear(3, 2)
    holdfast.ignore(model, "calls")
    state = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}
    every = holdfast.Every(durable=100, delta=1)
    with holdfast.Checkpointer(tmp_path, state, every=every, delta=holdfast.Delta()) as ckpt:
        for step in range(1, 5):
            calls.clear()
            model(torch.ones(2)).sum().backward()
            state["optim"].step()
            ckpt.step(step)
    assert len(calls) <= 2
