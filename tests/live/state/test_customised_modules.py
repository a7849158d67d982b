"""What a module's own state_dict() has beyond parameters and buffers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from capabilities import FSDP2_ON_CPUS
from holdfast.errors import StateMismatch, UsageError
from holdfast.live.state.customised import customised
from holdfast.store import open_store
from holdfast.tiers.records.offline import replay_to

pytestmark = pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:torch.ao")


class Book(nn.Module):
    """A live tensor of its own, with its own ways to save and load, and something derived from it."""

    def __init__(self, fill: float = 0.0, rows: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), fill))
        self.codebook = torch.full((rows,), fill)
        self.total = float(self.codebook.sum())

    def _save_to_state_dict(self, found: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(found, prefix, keep_vars)
        found[prefix + "codebook"] = self.codebook

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.codebook = state.pop(prefix + "codebook")
        self.total = float(self.codebook.sum())
        super()._load_from_state_dict(state, prefix, *args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum() + self.codebook.sum() * self.total


class Packed(nn.Module):
    """Values that are made at each call: numbers as tensors, a dtype, a text, a large weight unpacked."""

    def __init__(self, fill: float = 0.0, size: int = 3) -> None:
        super().__init__()
        self.scale, self.kind = fill, torch.float16 if fill else torch.bfloat16
        self.weight = [fill] * size

    def _save_to_state_dict(self, found: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(found, prefix, keep_vars)
        found[prefix + "scale"] = torch.tensor(self.scale)
        found[prefix + "kind"] = self.kind
        found[prefix + "weight"] = (torch.tensor(self.weight), "packed")

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.scale = float(state.pop(prefix + "scale"))
        self.kind = state.pop(prefix + "kind")
        self.weight = state.pop(prefix + "weight")[0].tolist()
        super()._load_from_state_dict(state, prefix, *args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale + sum(self.weight)).to(self.kind)


class Stuck(Packed):
    """Saves what it does not load."""

    def _load_from_state_dict(self, *args: Any) -> None:
        nn.Module._load_from_state_dict(self, *args)


class Mute(nn.Linear):
    """Cannot say what it has, as bitsandbytes' quantised embeddings."""

    def _save_to_state_dict(self, *_: Any) -> None:
        raise NotImplementedError("saving is not implemented")


class Whole(nn.Module):
    """Overrides state_dict() itself, without its arguments."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.inner, self.epoch = nn.Linear(2, 2), int(fill)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "epoch": self.epoch}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        state = dict(state)
        self.epoch = state.pop("epoch")
        return super().load_state_dict(state, strict)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.epoch


def hooked(fill: float) -> nn.Module:
    """A hook of an outer module renames a parameter, splits another, and adds a value."""
    torch.manual_seed(int(fill))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.epoch = int(fill)  # type: ignore[assignment]

    def after(module: Any, state: Any, prefix: str, _: Any) -> None:
        state[prefix + "first"] = state.pop(prefix + "0.weight")
        state[prefix + "above"], state[prefix + "below"] = state.pop(prefix + "1.weight").chunk(2)
        state[prefix + "epoch"] = module.epoch

    def before(module: Any, state: Any, prefix: str, *_: Any) -> None:
        state[prefix + "0.weight"] = state.pop(prefix + "first")
        halves = state.pop(prefix + "above"), state.pop(prefix + "below")
        state[prefix + "1.weight"] = torch.cat(halves)
        module.epoch = state.pop(prefix + "epoch")

    model.register_state_dict_post_hook(after)
    model.register_load_state_dict_pre_hook(before)
    return model


def dynamic(fill: float) -> nn.Module:
    torch.manual_seed(int(fill))
    model = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 300))
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def half(fill: float) -> nn.Module:
    torch.manual_seed(int(fill))
    model = nn.Sequential(nn.Linear(8, 8))
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.float16)


def recurrent(fill: float) -> nn.Module:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    torch.manual_seed(int(fill))
    return torch.ao.quantization.quantize_dynamic(First(), {nn.LSTM}, dtype=torch.qint8)


def static(fill: float) -> nn.Module:
    """Quantised per channel, by calibration."""
    torch.manual_seed(int(fill))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    model = torch.ao.quantization.QuantWrapper(model)
    model.qconfig = torch.ao.quantization.get_default_qconfig("x86")  # type: ignore[assignment]
    torch.ao.quantization.prepare(model, inplace=True)
    model(torch.randn(16, 8) * (1 + fill))
    return torch.ao.quantization.convert(model)


class Stateful(nn.Module):
    """`get_extra_state` with a tensor that is no more text, bare or in a dict."""

    def __init__(self, fill: float, bare: bool) -> None:
        super().__init__()
        self.table, self.bare = torch.full((40_000,), fill), bare

    def get_extra_state(self) -> Any:
        return self.table if self.bare else {"table": self.table}

    def set_extra_state(self, state: Any) -> None:
        self.table = state if self.bare else state["table"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table.sum()


class Extra(nn.Module):
    def get_extra_state(self) -> Any:
        return 3

    def set_extra_state(self, state: Any) -> None:
        pass


BUILDS: dict[str, tuple[Callable[[float], nn.Module], tuple[int, ...]]] = {
    "live": (lambda f: nn.Sequential(Book(f), nn.Linear(2, 2)), (2,)),
    "made": (lambda f: nn.Sequential(Packed(f)), (2,)),
    "made, large": (lambda f: Packed(f, 40_000), (2,)),
    "all of state_dict": (lambda f: nn.Sequential(Whole(f)), (2,)),
    "hooks": (hooked, (2,)),
    "dynamic quantisation": (dynamic, (1, 8)),
    "half precision": (half, (1, 8)),
    "static quantisation": (static, (1, 8)),
    "extra state": (lambda f: Stateful(f, False), (2,)),
    "extra state, a bare tensor": (lambda f: Stateful(f, True), (2,)),
}


@pytest.mark.parametrize("name", BUILDS)
def test_a_twin_computes_the_same_after_a_restore(name: str, tmp_path: Path) -> None:
    build, shape = BUILDS[name]
    x = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)
    model, twin = build(1.0), build(2.0)
    expected = model(x)
    assert not torch.equal(twin(x), expected)
    holdfast.save(tmp_path, {"model": model}, step=1)
    assert torch.equal(model(x), expected)
    holdfast.load(tmp_path, {"model": twin})
    assert torch.equal(twin(x), expected)
    holdfast.save(tmp_path, {"model": twin}, step=2)
    holdfast.load(tmp_path, {"model": model}, step=2)
    assert torch.equal(model(x), expected)


def test_what_lies_in_a_parameter_is_not_saved_again(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": hooked(1.0)}, step=1)
    found = holdfast.open(str(tmp_path))
    assert found.names() == [f"model.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")]
    assert found.extras == {"model._own_extra_state": {"epoch": 1}}
    twin = hooked(2.0)
    holdfast.load(tmp_path, {"model": twin})
    assert twin.epoch == 1


def test_live_tensors_stay_the_same_objects_and_hooks_derive_from_them(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": Book(3.0)}, step=1)
    twin = Book()
    codebook = twin.codebook
    holdfast.load(tmp_path, {"model": twin})
    assert twin.codebook is codebook and twin.total == 12.0


def test_every_save_has_the_values_of_its_step(tmp_path: Path) -> None:
    model = nn.Sequential(Book(1.0), Packed(1.0))
    with holdfast.Checkpointer(tmp_path, {"model": model}) as ckpt:
        for step in (1, 2):
            ckpt.save(step).wait()
            model[0].codebook = torch.full((4,), 7.0)  # in other memory
            model[1].scale = 7.0
    for step, value in ((1, 1.0), (2, 7.0)):
        twin = nn.Sequential(Book(), Packed())
        holdfast.load(tmp_path, {"model": twin}, step=step)
        assert (twin[0].codebook == value).all() and twin[1].scale == value


def test_a_value_that_the_module_does_not_take_is_named(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": nn.Sequential(Stuck(1.0))}, step=1)
    with pytest.warns(
        holdfast.HoldfastWarning, match=r"^model\.0\.scale, model\.0\.weight: saved "
    ):
        holdfast.load(tmp_path, {"model": nn.Sequential(Stuck(2.0))})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holdfast.load(tmp_path, {"model": nn.Sequential(Stuck(1.0))})  # it has these values already


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(Packed(1.0))
    model[0].kind = object()
    with pytest.raises(
        UsageError, match=r"model\.0\.kind: .* builtins\.object(?s:.*)ignore\(model, '0\.kind'"
    ):
        holdfast.save(tmp_path, {"model": model}, step=1)
    with pytest.raises(
        UsageError, match=r"model\.lstm\.\S*\.param: a torch\.ScriptObject cannot be saved"
    ):
        holdfast.save(tmp_path, {"model": recurrent(1.0)}, step=1)


def test_a_module_that_cannot_say_what_it_has_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(Mute(2, 2))
    with pytest.raises(
        UsageError, match=r"model\.0: .* cannot be known.*(?s:.*)ignore\(model, '0\.\*'\)"
    ):
        holdfast.save(tmp_path, {"model": model}, step=1)
    holdfast.save(tmp_path, {"model": holdfast.ignore(model, "0.*")}, step=1)
    twin = holdfast.ignore(nn.Sequential(Mute(2, 2)), "0.*")
    holdfast.load(tmp_path, {"model": twin})
    assert torch.equal(twin[0].weight, model[0].weight)


def test_what_is_ignored_is_neither_saved_nor_restored(tmp_path: Path) -> None:
    model, twin = (nn.Sequential(Book(f), Packed(f)) for f in (1.0, 2.0))
    holdfast.save(tmp_path, {"model": model}, step=1)
    assert holdfast.ignore(model[0], "codebook") is model[0]
    holdfast.ignore(model, "1.*")
    holdfast.save(tmp_path, {"model": model}, step=2)
    found = holdfast.open(str(tmp_path), step=2)
    assert (found.names(), found.extras) == (["model.0.weight"], {})
    holdfast.ignore(twin, "0.codebook", "1.*")
    for step in (1, 2):
        holdfast.load(tmp_path, {"model": twin}, step=step)
        assert twin[0].weight[0] == 1.0
        assert (twin[0].codebook == 2.0).all() and twin[1].scale == 2.0


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    model = holdfast.ignore(nn.Sequential(Book()), "0.codebok")
    with pytest.raises(UsageError, match=r"matches nothing.*(?s:.*)did you mean '0.codebook'"):
        holdfast.save(tmp_path, {"model": model}, step=1)
    for wrong in ((3, "x"), (Book(),), (Book(), ""), (Book(), 3)):
        with pytest.raises(UsageError, match="ignore"):
            holdfast.ignore(*wrong)


def test_a_checkpoint_without_these_values_is_refused_or_told(tmp_path: Path) -> None:
    model = nn.Sequential(Book(1.0), Packed(1.0))
    holdfast.save(tmp_path, {"model": holdfast.ignore(model, "*")}, step=1)
    twin = nn.Sequential(Book(2.0), Packed(2.0))
    with pytest.raises(StateMismatch) as caught:
        holdfast.load(tmp_path, {"model": twin})
    missing = ["0.codebook", "1.scale", "1.kind", "1.weight"]
    assert [p.split(" (")[0] for p in caught.value.problems] == [
        f"missing in the checkpoint: model.{name}" for name in missing
    ]
    with pytest.warns(
        holdfast.HoldfastWarning, match="left as it is:(?s:.*)model.1.weight"
    ) as told:
        holdfast.load(tmp_path, {"model": twin}, strict=False)
    assert len(told) == 1 and twin[0].weight[0] == 1.0 and twin[1].scale == 2.0


def test_saved_values_that_no_module_takes_are_refused_or_told(tmp_path: Path) -> None:
    """An extra state is told: Transformer Engine's layers have one that others can do without."""
    plain = {"model": nn.Sequential(nn.ReLU())}
    holdfast.save(tmp_path, {"model": nn.Sequential(Packed(1.0))}, step=1)
    with pytest.raises(StateMismatch, match=r"unexpected.*: model\.0\._own_extra_state"):
        holdfast.load(tmp_path, plain)
    with pytest.warns(holdfast.HoldfastWarning, match=r"model\.0\._own_extra_state"):
        holdfast.load(tmp_path, plain, strict=False)
    holdfast.save(tmp_path, {"model": nn.Sequential(Extra())}, step=2)
    with pytest.warns(holdfast.HoldfastWarning, match=r"unexpected.*: model\.0\._extra_state"):
        holdfast.load(tmp_path, plain)


def test_what_a_lenient_load_leaves_is_told_once(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": nn.Linear(2, 2), "epoch": 1}, step=1)
    net = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(holdfast.HoldfastWarning) as told:
        holdfast.load(tmp_path, {"model": net, "best": 4}, strict=False)
    (text,) = [str(one.message) for one in told]
    for line in ("missing in the checkpoint: model.0.weight", "missing in the checkpoint: best"):
        assert line in text
    assert "unexpected in the checkpoint: model.bias" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holdfast.load(tmp_path, {"model": nn.Linear(2, 2), "epoch": 0}, strict=False)


def test_a_module_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Some values have the same names, some others."""

    class Other(Packed):
        def _save_to_state_dict(self, found: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(found, prefix, keep_vars)
            found[prefix + "type"] = found.pop(prefix + "kind")

    holdfast.save(tmp_path, {"model": nn.Sequential(Packed(1.0))}, step=1)
    twin = nn.Sequential(Other(2.0))
    with pytest.raises(StateMismatch) as caught:
        holdfast.load(tmp_path, {"model": twin})
    assert [p.split(" (")[0] for p in caught.value.problems] == [
        "missing in the checkpoint: model.0.type",
        "unexpected in the checkpoint: model.0.kind",
    ]
    assert twin[0].scale == 2.0


def test_only_some_names(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": nn.Sequential(Packed(1.0), Packed(1.0, 40_000))}, step=1)
    twin = nn.Sequential(Packed(2.0), Packed(2.0, 40_000))
    holdfast.load(tmp_path, {"model": twin}, only="model.1.*")
    assert (twin[0].scale, twin[1].scale) == (2.0, 1.0) and set(twin[1].weight) == {1.0}


def test_records_have_them(tmp_path: Path) -> None:
    def build(fill: float) -> dict[str, Any]:
        model = nn.Sequential(Book(fill), Packed(fill))
        return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}

    every, delta = holdfast.Every(durable=100, delta=1), holdfast.Delta()
    state = build(1.0)
    model = state["model"]
    with holdfast.Checkpointer(tmp_path, state, every=every, delta=delta) as ckpt:
        for step in range(1, 4):
            model(torch.ones(2)).sum().backward()
            state["optim"].step()
            model[0].codebook.add_(step)
            model[1].scale = float(step)
            ckpt.step(step)
    with pytest.raises(
        holdfast.errors.NotRecoverable, match=r"'model.1' is a module with its own way"
    ):
        replay_to(open_store(str(tmp_path)), 3)
    twin = build(2.0)
    with holdfast.Checkpointer(tmp_path, twin, every=every, delta=delta) as ckpt:
        assert ckpt.restore() == 3
    assert torch.equal(twin["model"][0].codebook, model[0].codebook)
    assert twin["model"][1].scale == 3.0
    assert torch.equal(twin["model"][0].weight, model[0].weight)


def test_hooks_of_fsdp_are_not_called(tmp_path: Path, mesh: Any) -> None:
    FSDP2_ON_CPUS.require()
    """They may gather; modules that it wraps are still asked for what they have of their own."""

    def build(fill: float) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), Book(fill))
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    model, twin = build(1.0), build(2.0)
    model(torch.ones(2, 2))  # until then there are none
    ((number, hook),) = model[0]._state_dict_pre_hooks.items()
    called: list[nn.Module] = []

    @functools.wraps(hook)
    def watched(module: nn.Module, *rest: Any) -> None:
        called.append(module)
        hook(module, *rest)

    model[0]._state_dict_pre_hooks[number] = watched
    assert [own.path for own in customised("model", model)] == ["1"]
    holdfast.save(tmp_path, {"model": model}, step=1)
    assert not called
    holdfast.load(tmp_path, {"model": twin})
    assert (twin[1].codebook == 1.0).all() and twin[1].total == 4.0


def test_optimizers_with_hooks_that_add_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_state_dict_post_hook(lambda _, found: {**found, "made": 3})
    state = {"model": model, "optim": optimizer}
    with pytest.raises(UsageError, match=r"has 'made' .*(?s:.*)ignore\(optim, 'made'\)"):
        holdfast.save(tmp_path, state, step=1)
    holdfast.ignore(optimizer, "made")
    holdfast.save(tmp_path, state, step=1)
    holdfast.ignore(optimizer, "more")
    with pytest.raises(UsageError, match=r"'more'. matches nothing"):
        holdfast.save(tmp_path, state, step=2)
