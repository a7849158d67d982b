"""DCP directories, read where they lie: the same bytes as torch reads, and damage named."""

from __future__ import annotations

import argparse
import io
import os
import pathlib
import pickle
import subprocess
import sys
import time
from collections import defaultdict
from fractions import Fraction
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.optim.lr_scheduler import LRScheduler

import holdfast
from capabilities import ALONE
from holdfast.core.format.dtypes import DTYPES
from holdfast.errors import (
    Corrupt,
    FormatError,
    HoldfastWarning,
    NotFound,
    StateMismatch,
    UsageError,
)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "large": torch.randn(700, 501),
    }
    for name in (n for n in DTYPES if hasattr(torch, n)):
        raw = torch.randint(0, 2 if name == "bool" else 100, (3, 5, DTYPES[name].bytes))
        plain = raw.to(torch.uint8)
        found[name] = plain.view(getattr(torch, name)).reshape(3, 5)
    found["view"] = torch.randn(20, 30)[3:9, 4:6]
    found["transposed"] = torch.randn(6, 4).t()
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "ck"
    tree = {"t": tensors(), "epoch": 7, "lr": [0.1, 0.2], "name": "run", "none": None}
    dcp.save(tree, checkpoint_id=path, **ALONE)
    return path


def as_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def test_every_tensor(root: Path) -> None:
    with holdfast.open(root) as checkpoint:
        expected = {f"t.{name}": tensor for name, tensor in tensors().items()}
        assert sorted(checkpoint.names()) == sorted(expected)
        for name, tensor in expected.items():
            info = checkpoint.info(name)
            assert (info.shape, f"torch.{info.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
            assert checkpoint.read(name).tobytes() == as_bytes(tensor), name


def test_parts_across_chunks(root: Path) -> None:
    """Elements of a section are aligned however the archive lies in its file."""
    large = tensors()["large"].numpy()
    with holdfast.open(root) as checkpoint:
        for box in ((None, (7, 11)), ((690, 700), None), ((3, 699), (250, 501))):
            a, b = (slice(*r) if r else slice(None) for r in box)
            assert np.array_equal(checkpoint.read("t.large", box), large[a, b])


def test_values_are_extras(root: Path) -> None:
    with holdfast.open(f"dcp:{root}") as checkpoint:
        assert checkpoint.extras["epoch"] == 7
        assert checkpoint.extras["name"] == "run" and checkpoint.extras["none"] is None
        assert [v for k, v in checkpoint.extras.items() if k.startswith("lr")] in (
            [[0.1, 0.2]],
            [0.1, 0.2],
        )


PLAIN: dict[str, Any] = {
    "dataloader": {"dp_rank_0": pickle.dumps({"seen": 3}), "world_size": 1, "none": b""},
    "array": np.arange(6, dtype="f4").reshape(2, 3),
    "scalar": np.float32(2.5),
    "members": {1, 2},
    "place": Path("/data/x"),
    "complex": 1 + 2j,
    "args": argparse.Namespace(lr=0.1),
    "bytes": bytearray(b"ab"),
    "text": np.str_("abc"),
    "counts": defaultdict(int, a=1),
    "types": [bool, int, float, str, list, tuple, dict],
}
COMES_BACK_AS = {
    "place": "/data/x",
    "args": {"lr": 0.1},
    "bytes": b"ab",
    "types": ["bool", "int", "float", "str", "list", "tuple", "dict"],
}
"""Where it is another value."""


@pytest.mark.parametrize("name", PLAIN)
def test_values_of_every_kind_of_plain_data(name: str, tmp_path: Path) -> None:
    """Bytes are where torchtitan keeps the position in its data."""
    dcp.save({"w": torch.ones(2), name: PLAIN[name]}, checkpoint_id=tmp_path, **ALONE)
    found, value = holdfast.open(tmp_path).extras[name], PLAIN[name]
    if isinstance(value, np.ndarray):
        assert found.dtype == value.dtype and np.array_equal(found, value)
    else:
        assert found == COMES_BACK_AS.get(name, value)


def test_a_file_in_memory(tmp_path: Path) -> None:
    (file := io.BytesIO(b"losses")).seek(3)
    dcp.save({"w": torch.ones(2), "file": file}, checkpoint_id=tmp_path, **ALONE)
    found = holdfast.open(tmp_path).extras["file"]
    assert found.getvalue() == b"losses" and found.tell() == 3


@pytest.mark.parametrize("by", ["Python 3.13", "torch 2.2"])
def test_classes_that_had_other_names(
    by: str, root: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """What `.metadata` names when another Python, or an older torch, has written it."""
    metadata = pickle.loads((root / ".metadata").read_bytes())
    if by == "Python 3.13":
        module, kind = "pathlib._local", PosixPath
        monkeypatch.setitem(sys.modules, module, pathlib)
    else:
        module, kind = "torch.distributed._shard.sharded_tensor.metadata", TensorProperties
        monkeypatch.setattr(sys.modules[module], "TensorProperties", TensorProperties)
    monkeypatch.setattr(kind, "__module__", module)
    data = pickle.dumps(metadata)
    assert module.encode() in data
    copy = copied(root, tmp_path / "ck")
    (copy / ".metadata").write_bytes(data)
    with holdfast.open(root) as expected, holdfast.open(copy) as found:
        assert found.names() == expected.names() and found.extras == expected.extras
        assert found.read("t.large").tobytes() == expected.read("t.large").tobytes()


def test_a_value_that_is_no_plain_data_is_left_out_and_told(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "it": [1, Fraction(1, 2)], "epoch": 3}
    dcp.save(state, checkpoint_id=tmp_path, **ALONE)
    with pytest.warns(HoldfastWarning, match=r"left out, .* data: it \(fractions\.Fraction\)"):
        found = holdfast.open(tmp_path)
    assert found.extras == {"epoch": 3} and found.names() == ["w"]


def test_an_optimizers_setting_that_is_no_plain_data_is_refused(tmp_path: Path) -> None:
    """The live one would stay, without a word."""
    model, optimizer, _ = trained()
    optimizer.param_groups[0]["kind"] = Fraction(1, 2)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path, **ALONE)
    with pytest.raises(FormatError, match=r"fractions\.Fraction, which is not known to be data"):
        holdfast.open(tmp_path)


def test_a_value_that_holds_tensors_and_no_plain_data_is_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "it": (torch.ones(2), Fraction(1, 2))}
    dcp.save(state, checkpoint_id=tmp_path, **ALONE)
    with pytest.raises(FormatError, match=r"fractions\.Fraction, which is not known to be data"):
        holdfast.open(tmp_path)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, LRScheduler]:
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.LayerNorm(40))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for _ in range(3):
        model(torch.ones(2, 30)).square().sum().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


def fresh() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.LayerNorm(40))
    decayed = {"params": [model[0].weight], "weight_decay": 0.5}
    rest = {"params": [model[0].bias, *model[1].parameters()], "weight_decay": 0.5}
    optimizer = torch.optim.AdamW([decayed, rest])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    return {
        "model": model,
        "optim": optimizer,
        "scheduler": schedule,
        "run": {"epoch": 0, "seen": []},
    }


@pytest.mark.parametrize("form", ["nested", "flattened", "wrapped", "beside"])
def test_all_of_a_run_comes_back(tmp_path: Path, form: str) -> None:
    """In the forms that torch's own functions, its tutorial's AppState, and torchtitan save."""
    torch.manual_seed(0)
    model, optimizer, schedule = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=form in ("flattened", "beside"))
    weights, states = get_state_dict(model, optimizer, options=options)
    state: dict[str, Any] = {"model": weights, "optim": states, "scheduler": schedule.state_dict()}
    state["run"] = {"epoch": 7, "seen": [torch.arange(5), 3, ("a", 0.5)]}
    if form == "wrapped":
        state = {"app": state}
    if form == "beside":
        state |= state.pop("model")
    dcp.save(state, checkpoint_id=tmp_path, **ALONE)
    live = fresh() | ({"run": {"epoch": 0, "seen": [torch.zeros(5, dtype=torch.int64), 0]}})
    holdfast.load(tmp_path, live)
    assert all(torch.equal(a, b) for a, b in zip(live["model"].parameters(), model.parameters()))
    mine, theirs = live["optim"].state_dict(), optimizer.state_dict()
    for i, of in theirs["state"].items():
        assert all(torch.equal(of[k], mine["state"][i][k]) for k in of), i
    for a, b in zip(mine["param_groups"], theirs["param_groups"]):
        assert {k: a[k] for k in ("lr", "betas", "weight_decay")} == {
            k: b[k] for k in ("lr", "betas", "weight_decay")
        }
    assert live["scheduler"].state_dict() == schedule.state_dict()
    assert live["run"]["epoch"] == 7 and live["run"]["seen"][1:] == [3, ("a", 0.5)]
    assert torch.equal(live["run"]["seen"][0], torch.arange(5))


def test_other_strides(tmp_path: Path) -> None:
    """Convolutions in channels_last, and large transposed weights, lie in DCP's files as in memory."""
    torch.manual_seed(0)
    state = {
        "conv": torch.randn(8, 3, 4, 5).to(memory_format=torch.channels_last),
        "flat": torch.randn(600, 1, 40).permute(2, 1, 0),
        "large": torch.randn(900, 700).t(),
    }
    dcp.save(state, checkpoint_id=tmp_path, **ALONE)
    with holdfast.open(tmp_path) as checkpoint:
        for name, tensor in state.items():
            assert np.array_equal(checkpoint.read(name), tensor.numpy())
        some = checkpoint.read("large", ((13, 19), (800, 900)))
        assert np.array_equal(some, state["large"][13:19, 800:].numpy())


def test_weights_load_into_a_live_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    make = lambda: torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.LayerNorm(400))  # noqa: E731
    saved, live = make(), make()
    dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path, **ALONE)
    assert holdfast.load(tmp_path, {"model": live}) == 0
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), live.parameters()))
    with pytest.raises(StateMismatch, match=r"0\.weight"):
        holdfast.load(tmp_path, {"model": torch.nn.Sequential(torch.nn.Linear(300, 401))})


def test_without_torch(root: Path) -> None:
    code = "import holdfast, sys; c = holdfast.open(sys.argv[1]); c.read('t.float32'); c.read('t.large');"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, root], check=False).returncode == 0


def copied(root: Path, to: Path) -> Path:
    to.mkdir()
    for file in root.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_a_missing_file_is_named(root: Path, tmp_path: Path) -> None:
    broken = copied(root, tmp_path / "ck")
    (data,) = broken.glob("*.distcp")
    data.unlink()
    with pytest.raises(NotFound, match=r"\.distcp"):
        holdfast.open(broken).read("t.large")


def test_a_file_cut_short_is_named(root: Path, tmp_path: Path) -> None:
    broken = copied(root, tmp_path / "ck")
    (data,) = broken.glob("*.distcp")
    os.truncate(data, data.stat().st_size // 2)
    with pytest.raises((Corrupt, FormatError)):
        read_all(broken)


def read_all(path: Path) -> None:
    checkpoint = holdfast.open(path)
    for name in checkpoint.names():
        checkpoint.read(name)


def test_damaged_metadata(root: Path, tmp_path: Path) -> None:
    """Cut anywhere: an error of ours, at once."""
    broken = copied(root, tmp_path / "ck")
    whole = (broken / ".metadata").read_bytes()
    for keep in range(1, len(whole), max(1, len(whole) // 40)):
        (broken / ".metadata").write_bytes(whole[:keep])
        with pytest.raises((FormatError, Corrupt)):
            holdfast.open(broken)


def test_metadata_that_would_run_something(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"cos\nsystem\n(X{chr(len(f'touch {mark}'))}\0\0\0touch {mark}tR."
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + code.encode())
    with pytest.raises(FormatError, match=r"os\.system"):
        holdfast.open(tmp_path)
    assert not mark.exists()


def test_prefixes(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown format 'dpc'"):
        holdfast.open(f"dpc:{root}")
    with pytest.raises(NotFound, match="no dcp checkpoint"):
        holdfast.open(f"dcp:{tmp_path}")
    with pytest.raises(NotFound, match="no step 3"):
        holdfast.open(root, step=3)


@pytest.mark.parametrize("groups", [1, 2])
def test_an_optimizer_goes_on(tmp_path: Path, groups: int) -> None:
    """Saved as torch advises (`get_state_dict`): the next steps are those of the run that saved."""

    def make(seed: int, lr: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 2))
        parts = [{"params": list(m.parameters()), "lr": lr * (i + 1)} for i, m in enumerate(net)]
        params = net.parameters() if groups == 1 else parts
        return net, torch.optim.AdamW(params, lr=lr, betas=(0.8, 0.95))

    def train(net: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
        for i in range(3):
            optim.zero_grad()
            net(torch.full((5, 30), float(i))).square().sum().backward()
            optim.step()

    net, optim = make(0, 0.01)
    train(net, optim)
    weights, states = get_state_dict(net, optim)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path, **ALONE)
    other, fresh = make(1, 0.5)
    holdfast.load(tmp_path, {"model": other, "optim": fresh})
    assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in optim.param_groups]
    assert fresh.param_groups[0]["betas"] == (0.8, 0.95)
    train(net, optim)
    train(other, fresh)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters()))
    assert "optim.0.weight.exp_avg" in holdfast.open(tmp_path).names()


def test_a_root_of_our_own_stays_ours(tmp_path: Path) -> None:
    """Whatever else lies in it: a run that moved from DCP kept its directory."""
    dcp.save({"model": torch.nn.Linear(2, 2).state_dict()}, checkpoint_id=tmp_path, **ALONE)
    holdfast.save(tmp_path, {"x": 5}, step=9)
    assert holdfast.open(tmp_path).step == 9
    assert holdfast.load(tmp_path, {"x": 0}) == 9
    assert "model.weight" in holdfast.open(f"dcp:{tmp_path}").names()


@pytest.mark.parametrize("flat", [False, True])
def test_hyper_parameters_that_are_tensors(tmp_path: Path, flat: bool) -> None:
    """As torch.compile wants learning rates.  Flattened, torch saves one for each parameter."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 2))
    groups = [{"params": list(m.parameters()), "lr": torch.tensor(0.25 / (i + 1))}
              for i, m in enumerate(net)]  # fmt: skip
    optim = torch.optim.AdamW(groups)
    net(torch.ones(5, 30)).square().sum().backward()
    optim.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(net, optim, options=options)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "x", **ALONE)
    holdfast.convert(tmp_path / "x", tmp_path / "own")
    for path in (tmp_path / "x", tmp_path / "own"):
        fresh = torch.optim.AdamW([{"params": list(m.parameters())} for m in net], lr=9.0)
        holdfast.load(path, {"model": net, "optim": fresh})
        assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in optim.param_groups]


@pytest.mark.parametrize("how", ["proved", "stated", "unknown"])
def test_an_optimizer_by_number(tmp_path: Path, how: str) -> None:
    """`optimizer.state_dict()` itself, which torch's own loading takes by position."""
    torch.manual_seed(0)
    make = lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))  # noqa: E731
    net = make()
    params = list(net.named_parameters()) if how == "stated" else list(net.parameters())
    optim = torch.optim.AdamW(params[::-1] if how != "proved" else params, lr=0.25)
    net(torch.ones(5, 3)).square().sum().backward()
    optim.step()
    saved = {"model": net.state_dict(), "optim": optim.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path, **ALONE)
    other = make()
    fresh = torch.optim.AdamW(other.parameters(), lr=9.0)
    if how == "unknown":
        with pytest.raises(StateMismatch, match="which is which cannot be known"):
            holdfast.load(tmp_path, {"model": other, "optim": fresh})
        assert "optim.state.3.exp_avg" in holdfast.open(tmp_path).names()
        return
    holdfast.load(tmp_path, {"model": other, "optim": fresh})
    assert fresh.param_groups[0]["lr"] == 0.25
    for mine, theirs in zip(other.parameters(), net.parameters()):
        for state, value in optim.state[theirs].items():
            assert torch.equal(fresh.state[mine][state], value), state


def test_metadata_of_shared_tuples(tmp_path: Path) -> None:
    """Names and shapes that are none are refused before they are hashed or shown."""
    deep: Any = ()
    for _ in range(30):
        deep = (deep, deep)
    for what in ("path", "size", "offset"):
        info = _StorageInfo(deep if what == "path" else "x", 0, 10)  # type: ignore[arg-type]
        size = deep if what == "size" else (2,)
        tensor = TensorStorageMetadata(TensorProperties(torch.float32), size, [])  # type: ignore[arg-type]
        index = MetadataIndex("w")
        meta = Metadata({"w": tensor}, None, {index: info})
        if what == "offset":
            object.__setattr__(index, "offset", deep)  # once it is hashed
        data = pickle.dumps(meta, 4)
        (tmp_path / ".metadata").write_bytes(data)
        began = time.process_time()
        with pytest.raises(FormatError):
            holdfast.open(tmp_path)
        assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ({"step": 6}, 6),
        ({"step": torch.tensor(7)}, 7),
        ({"progress": {"iteration": 8, "epoch": 1}}, 8),
        ({"one": {"step": 1}, "other": {"step": 2}}, 0),
        ({"epoch": 3}, 0),
    ],
)
def test_the_step_that_values_state(tmp_path: Path, values: dict[str, Any], step: int) -> None:
    """Not that of an optimizer's states."""
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    weights, states = get_state_dict(model, optim)
    tree = {"model": weights, "optim": states, **values}
    dcp.save(tree, checkpoint_id=tmp_path / "dcp", **ALONE)
    assert holdfast.steps(tmp_path / "dcp") == [step]
    with holdfast.Checkpointer(tmp_path / "run", {"model": model, "optim": optim}) as ckpt:
        restored = ckpt.restore(source=tmp_path / "dcp")
        assert restored.found and restored == step
