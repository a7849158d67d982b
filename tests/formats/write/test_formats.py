"""One training state as every format, read by those whose format it is."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import holdfast
from holdfast.core.checkpoint.diffing import compare_checkpoints
from holdfast.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


class Model(nn.Module):
    """Tied, with buffers, two kinds of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(100, 16)
        self.body = nn.Sequential(nn.Linear(16, 33), nn.BatchNorm1d(33), nn.Linear(33, 16))
        self.out = nn.Linear(16, 100, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(self.emb(x)))


def run(seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Model()
    wide = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "lr": 3e-4}]
    optim = torch.optim.AdamW(groups, lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 100)
    for _ in range(steps):
        model(torch.randint(0, 100, (8,))).square().sum().backward()
        optim.step()
        optim.zero_grad()
        sched.step()
    return {"model": model, "optim": optim, "sched": sched}


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    return run(0, 3)


@pytest.fixture(scope="module")
def source(trained: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("run"))
    more = {"a": [1, 2], "t": torch.arange(5), "f": io.BytesIO(b"x")}
    holdfast.save(url, {**trained, "more": more}, step=3)
    return url


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    for (name, x), y in zip(a["model"].state_dict().items(), b["model"].state_dict().values()):
        assert torch.equal(x, y), name
    for x, y in zip(a["optim"].param_groups, b["optim"].param_groups):
        assert {k: v for k, v in x.items() if k != "params"} == {
            k: v for k, v in y.items() if k != "params"
        }
    for p, q in zip(a["model"].parameters(), b["model"].parameters()):
        x, y = a["optim"].state[p], b["optim"].state[q]
        assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def test_universal(source: str, trained: dict[str, Any], tmp_path: Path) -> None:
    made = holdfast.convert(source, tmp_path / "u")
    assert compare_checkpoints(holdfast.open(source), holdfast.open(tmp_path / "u")).identical
    assert made.bytes == sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors"))
    fresh = run(1, 1)
    assert holdfast.load(tmp_path / "u", fresh) == 3
    assert_same(trained, fresh)
    assert not (tmp_path / "u.partial").exists()


def test_universal_into_a_root_with_steps(source: str, tmp_path: Path) -> None:
    holdfast.save(tmp_path, run(5, 1), step=9)
    holdfast.convert(source, tmp_path)
    with pytest.raises(UsageError, match="has a step 3 already"):
        holdfast.convert(source, tmp_path)
    with pytest.raises(UsageError, match="has a step 3 already"):
        holdfast.convert(source, source)
    assert holdfast.steps(tmp_path) == [3, 9]
    found = holdfast.open(tmp_path, step=3)
    assert compare_checkpoints(holdfast.open(source), found).identical
    folder = tmp_path / "steps/0000000003"
    assert {p.name for p in folder.iterdir()} == {
        "manifest.json", "model.safetensors.index.json", found.manifest.attempt,
    }  # fmt: skip


def test_dcp(source: str, trained: dict[str, Any], tmp_path: Path) -> None:
    holdfast.convert(source, tmp_path / "d", to="dcp")
    fresh = run(1, 1)
    model, optim = get_state_dict(fresh["model"], fresh["optim"])
    state = {"model": model, "optim": optim, "sched": fresh["sched"].state_dict(),
             "more": {"a": None, "t": torch.zeros(5, dtype=torch.int64), "f": None}}  # fmt: skip
    dcp.load(state, checkpoint_id=tmp_path / "d")
    set_state_dict(fresh["model"], fresh["optim"], model_state_dict=state["model"],
                   optim_state_dict=state["optim"])  # fmt: skip
    assert_same(trained, fresh)
    assert state["more"]["a"] == [1, 2] and state["more"]["t"].tolist() == list(range(5))
    assert state["more"]["f"] == b"x"
    assert state["sched"] == trained["sched"].state_dict()


def test_dcp_and_back(source: str, trained: dict[str, Any], tmp_path: Path) -> None:
    holdfast.convert(source, tmp_path / "d", to="dcp")
    holdfast.convert(tmp_path / "d", tmp_path / "back")
    fresh = run(1, 1)
    holdfast.load(tmp_path / "back", {"model": fresh["model"], "optim": fresh["optim"]})
    assert_same(trained, fresh)


def test_dcp_converts_it_by_its_own_tool(
    source: str, trained: dict[str, Any], tmp_path: Path
) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    holdfast.convert(source, tmp_path / "d", to="dcp")
    dcp_to_torch_save(tmp_path / "d", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=False)
    for name, value in trained["model"].state_dict().items():
        assert torch.equal(found["model"][name], value)


def test_large_tensors_are_chunks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.formats.write import dcp as writer

    monkeypatch.setattr(writer, "_CHUNK_BYTES", 1000)
    value = {"w": torch.randn(61, 7, 3), "v": torch.randn(999), "e": torch.zeros(0, 4)}
    holdfast.save(tmp_path / "s", {"x": value}, step=0)
    holdfast.convert(tmp_path / "s", tmp_path / "d", to="dcp", max_file_bytes=4000)
    found = {"x": {k: torch.full_like(v, 9.0) for k, v in value.items()}}
    dcp.load(found, checkpoint_id=tmp_path / "d")
    assert all(torch.equal(found["x"][k], v) for k, v in value.items())
    metadata = dcp.FileSystemReader(tmp_path / "d").read_metadata()
    assert len(metadata.state_dict_metadata["x.w"].chunks) == 6
    assert len(list((tmp_path / "d").glob("*.distcp"))) > 1


def test_huggingface(source: str, trained: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    holdfast.convert(source, tmp_path / "h", to="huggingface")
    found = load_file(tmp_path / "h/model.safetensors")
    expected = trained["model"].state_dict()
    assert found.keys() == expected.keys() - {"out.weight"}
    assert all(torch.equal(v, expected[k]) for k, v in found.items())


def test_huggingface_shards_and_casts(source: str, trained: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    holdfast.convert(
        source, tmp_path / "h", to="huggingface", dtype="bfloat16", max_file_bytes=2000
    )
    index = json.loads((tmp_path / "h/model.safetensors.index.json").read_text())
    expected = trained["model"].state_dict()
    files = set(index["weight_map"].values())
    assert len(files) > 2
    total = 0
    for file in files:
        for name, value in load_file(tmp_path / "h" / file).items():
            wide = expected[name].is_floating_point()
            assert torch.equal(value, expected[name].bfloat16() if wide else expected[name])
            assert index["weight_map"][name] == file
            total += value.nbytes
    assert index["metadata"]["total_size"] == total


def test_names_are_mapped(source: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    holdfast.convert(source, tmp_path / "h", to="huggingface", rename=lambda n: f"net.{n}")
    assert all(n.startswith("net.") for n in load_file(tmp_path / "h/model.safetensors"))
    with pytest.raises(UsageError, match="would both be named 'x'"):
        holdfast.convert(source, tmp_path / "i", to="huggingface", rename=lambda n: "x")


def test_one_file_of_torch_save(source: str, trained: dict[str, Any], tmp_path: Path) -> None:
    holdfast.convert(source, tmp_path / "w.pt", to="torch")
    fresh = Model()
    fresh.load_state_dict(torch.load(tmp_path / "w.pt"))
    assert list(tmp_path.iterdir()) == [tmp_path / "w.pt"]
    for name, value in trained["model"].state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)


def test_one_safetensors_file(source: str, trained: dict[str, Any], tmp_path: Path) -> None:
    """However large: `max_file_bytes` divides folders alone."""
    from safetensors.torch import load_file

    target = tmp_path / "w.safetensors"
    made = holdfast.convert(source, target, to="safetensors", max_file_bytes=2000)
    assert (made.path, made.num_files) == (str(target), 1)
    assert list(tmp_path.iterdir()) == [target] and target.is_file()
    found, expected = load_file(target), trained["model"].state_dict()
    assert found.keys() == expected.keys() - {"out.weight"}
    assert all(torch.equal(v, expected[k]) for k, v in found.items())
    with holdfast.open(target) as c:
        assert c.format == "huggingface"
    holdfast.convert(source, tmp_path / "half.safetensors", to="safetensors", dtype="float16")
    half = load_file(tmp_path / "half.safetensors")
    assert all(torch.equal(v, expected[k].half()) for k, v in half.items() if v.is_floating_point())


def test_a_name_that_is_of_another_kind_is_refused(source: str, tmp_path: Path) -> None:
    for to, name, message, instead in (
        ("huggingface", "w.safetensors", "huggingface writes a folder", "to='safetensors'"),
        ("dcp", "w.pt", "dcp writes a folder", "to='torch'"),
        ("universal", "w.pth", "universal writes a folder", "to='torch'"),
        ("torch", "w.safetensors", "torch writes a file of torch.save", "to='safetensors'"),
        ("safetensors", "w.pt", "does not end in .safetensors", "to='huggingface'"),
        ("safetensors", "weights", "does not end in .safetensors", "to='huggingface'"),
        ("safetensors", "weights/", "does not end in .safetensors", "to='huggingface'"),
    ):
        with pytest.raises(UsageError, match=message) as refused:
            holdfast.convert(source, f"{tmp_path}/{name}", to=to)
        assert instead in (refused.value.hint or "")
        assert not list(tmp_path.iterdir())


def test_what_a_format_cannot_do_is_refused(source: str, tmp_path: Path) -> None:
    for options, match in (
        ({"to": "hugingface"}, "huggingface"),
        ({"to": "dcp", "dtype": "bfloat16"}, "keep the state as it is"),
        ({"to": "torch", "dtype": "int8"}, "floating"),
        ({"to": "torch", "key": "modle"}, "model"),
        ({"memory_bytes": 1000}, "at least"),
        ({"max_file_bytes": 0}, "positive"),
    ):
        with pytest.raises(UsageError, match=match):
            holdfast.convert(source, tmp_path / "x", **options)
        assert not (tmp_path / "x").exists()


def test_a_cast_makes_nothing_infinite(tmp_path: Path) -> None:
    """Nor is an infinity lost in a dtype that has none."""
    weight = torch.tensor([1.0, float("inf"), -1e5])
    holdfast.save(tmp_path / "r", {"model": {"w": weight}}, step=1)
    with pytest.raises(
        UsageError, match=r"'model\.w': saved as float32, and -100000 is no float16"
    ):
        holdfast.convert(tmp_path / "r", tmp_path / "half", to="torch", dtype="float16")
    holdfast.save(tmp_path / "inf", {"model": {"w": weight[:2]}}, step=1)
    with pytest.raises(
        UsageError, match=r"'model\.w': saved as float32, and inf is no float8_e4m3fn"
    ):
        holdfast.convert(tmp_path / "inf", tmp_path / "8", to="torch", dtype="float8_e4m3fn")
    holdfast.convert(tmp_path / "r", tmp_path / "out", to="torch", dtype="bfloat16")
    assert torch.equal(torch.load(tmp_path / "out")["w"], weight.bfloat16())


def test_dicts_with_numbers_as_keys_load_in_dcp(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3)}, "seen": {"shards": {3: "x", 7: [1, 2]}}}
    holdfast.save(tmp_path / "r", state, step=1)
    holdfast.convert(tmp_path / "r", tmp_path / "d", to="dcp")
    dcp_to_torch_save(tmp_path / "d", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=False)
    assert found["seen"] == {"shards": {"3": "x", "7": [1, 2]}}  # as torch itself names them


def test_lists_of_dicts_load_in_dcp_by_the_state_dict_that_was_saved(tmp_path: Path) -> None:
    def made(lr: float) -> dict[str, Any]:
        optim = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr)
        schedules = [torch.optim.lr_scheduler.StepLR(optim, size) for size in (3, 5)]
        return torch.optim.lr_scheduler.SequentialLR(optim, schedules, [4]).state_dict()

    saved, found = (
        {"sched": made(lr), "l": [[1, {"a": n}], n, [n]]} for lr, n in ((0.5, 7), (2.0, 0))
    )
    holdfast.save(tmp_path / "r", saved, step=1)
    holdfast.convert(tmp_path / "r", tmp_path / "d", to="dcp")
    dcp.load(found, checkpoint_id=tmp_path / "d")
    assert found == saved
    holdfast.convert(tmp_path / "d", tmp_path / "back")
    found["l"] = None
    holdfast.load(tmp_path / "back", found)
    assert found == saved


def test_deepspeed_names_what_has_no_place(tmp_path: Path) -> None:
    state = run(0, 2)
    other = nn.Linear(4, 4)
    holdfast.save(tmp_path / "r", {**state, "ema": other, "scaler": {"scale": 3.0}}, step=2)
    made = holdfast.convert(tmp_path / "r", tmp_path / "d", to="deepspeed")
    assert {"ema", "scaler"} <= set(made.left_out)
    optim = torch.optim.AdamW([*state["model"].parameters(), *other.parameters()])
    other(torch.ones(4)).sum().backward()
    optim.step()
    both = {"model": state["model"], "other": other, "optim": optim}
    holdfast.save(tmp_path / "b", both, step=2)
    with pytest.raises(UsageError, match="optimizer state would be lost"):
        holdfast.convert(tmp_path / "b", tmp_path / "e", to="deepspeed")


@pytest.mark.parametrize("to", ["universal", "dcp", "huggingface", "deepspeed", "torch"])
def test_nothing_is_overwritten(source: str, tmp_path: Path, to: str) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/mine").write_text("mine")
    with pytest.raises(UsageError, match="not there yet"):
        holdfast.convert(source, tmp_path / "x", to=to)
    (tmp_path / "y.partial").mkdir()
    (tmp_path / "y.partial/mine").write_text("mine")
    with pytest.raises(UsageError, match="in the way"):
        holdfast.convert(source, tmp_path / "y", to=to)
    assert (tmp_path / "y.partial/mine").read_text() == "mine"
    assert (tmp_path / "x/mine").read_text() == "mine"


def test_a_target_below_its_source(source: str, tmp_path: Path) -> None:
    """What the conversion itself writes there is no change of the source."""
    holdfast.convert(source, tmp_path / "dcp", to="dcp")
    with holdfast.open(tmp_path / "dcp") as step:
        expected = step.read("model.emb.weight")
    for name in ("one", "deep/er"):
        target = tmp_path / "dcp" / name
        holdfast.convert(tmp_path / "dcp", target, to="universal")
        assert np.array_equal(holdfast.open(target).read("model.emb.weight"), expected)


def test_tensors_are_not_written_as_their_names(tmp_path: Path) -> None:
    """Settings of an optimizer, and items of lists, that are tensors: refused by name."""
    model = nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    saved = {"model": model.state_dict(), "optimizer": optim.state_dict()}
    torch.save(saved, tmp_path / "lr.pt")
    torch.save({"model": model.state_dict(), "q": [torch.ones(20_000)]}, tmp_path / "list.pt")
    for name, told in (
        ("lr", r"param_groups\.0\.lr: a tensor"),
        ("list", "q: a tensor at a place"),
    ):
        with pytest.raises(UsageError, match=told):
            holdfast.convert(tmp_path / f"{name}.pt", tmp_path / "d", to="dcp")
    with pytest.raises(UsageError, match="param_groups"):
        holdfast.convert(tmp_path / "lr.pt", tmp_path / "d", to="deepspeed")


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


@pytest.mark.parametrize("momentum", [0.5, 0.0])
@pytest.mark.parametrize(("tied", "other"), [(False, True), (True, False), (True, True)])
def test_dcp_lists_each_parameter_of_an_optimizer_once(
    tied: bool, other: bool, momentum: float, tmp_path: Path
) -> None:
    """Of a tied one the first name, as torch does; ties of another module of the state do not matter.
    Without any states it cannot be known whose the parameters are: then none is left out."""
    model, teacher = Tied(tied=tied), Tied(tied=other)
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
    model.lm_head(model.wte(torch.tensor([1, 2]))).sum().backward()
    optim.step()
    state = {"model": model, "teacher": teacher, "optim": optim}
    holdfast.save(tmp_path / "r", state, step=1)
    holdfast.convert(tmp_path / "r", tmp_path / "d", to="dcp")
    dcp_to_torch_save(tmp_path / "d", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=False)["optim"]
    own = get_state_dict(model, optim)[1]
    names = own["param_groups"][0]["params"]
    if not momentum and not other:
        names = ["wte.weight", "lm_head.weight"]
    assert found["param_groups"][0]["params"] == names
    assert found.get("state", {}).keys() == own["state"].keys()


class Average:
    """Weights that are kept as a `state_dict` within the object's own."""

    def __init__(self, fill: float) -> None:
        self.module, self.decay = nn.Linear(200, 200), fill
        nn.init.constant_(self.module.weight, fill)

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "shadow": self.module.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decay = state["decay"]
        self.module.load_state_dict(state["shadow"])


def test_a_state_dict_within_an_objects_own_loads_in_dcp(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "r", {"ema": (saved := Average(0.25))}, step=1)
    holdfast.convert(tmp_path / "r", tmp_path / "d", to="dcp")
    found = {"ema": Average(0.5).state_dict()}
    dcp.load(found, checkpoint_id=tmp_path / "d")
    assert found["ema"]["decay"] == 0.25
    assert torch.equal(found["ema"]["shadow"]["weight"], saved.module.weight)
