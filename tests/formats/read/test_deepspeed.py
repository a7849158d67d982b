"""Checkpoints of real DeepSpeed engines: every element as DeepSpeed itself has it, and nothing run."""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import holdfast
from cli.calling import call
from holdfast.core.format.extras import decode
from holdfast.errors import (
    Corrupt,
    FormatError,
    HoldfastError,
    HoldfastWarning,
    NotFound,
    UsageError,
)
from holdfast.formats.read.deepspeed.opening import open_deepspeed
from holdfast.formats.read.deepspeed.tensors import Layouts
from holdfast.formats.read.deepspeed.zero import even_cuts, flat_cuts
from holdfast.live.state.encoding import outline_tensor
from holdfast.store import open_store
from system.distributed.launch import launch

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed makes the checkpoints"
    ),
]

FULL = (
    "z0", "z0-bf16", "z0-fp16", "z0-fused", "z1", "z2", "z3", "z1-bf16", "z2-bf16", "z3-bf16", "z2-fp16",
    "z3-fp16", "z2-robin", "z2-offload", "z3-offload", "z1-elastic", "z2-aligned", "z3-small", "z2-lion",
    "z3-lion", "z3-sgd", "z2-wide", "z2-one", "z1-immediate",
)  # fmt: skip
SOME = ("z1", "z2", "z3", "z2-bf16")
RANKS = {2: FULL, 3: SOME, 1: ("z2", "z3")}


def is_soak(ranks: int, case: str) -> bool:
    """Of three ranks `make test` needs one case, which shows their parts."""
    return ranks != 2 and (ranks, case) != (3, "z2")


CASES = [
    pytest.param(n, case, id=f"{case}-dp{n}", marks=[pytest.mark.soak] * is_soak(n, case))
    for n, cases in RANKS.items()
    for case in cases
]


@pytest.fixture(scope="module")
def sources(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """The folder of what so many ranks have saved."""
    made: dict[int, Path] = {}

    def of(ranks: int) -> Path:
        if ranks not in made:
            out = tmp_path_factory.mktemp(f"dp{ranks}")
            all_run = "not soak" not in request.config.option.markexpr
            cases = [case for case in RANKS[ranks] if all_run or not is_soak(ranks, case)]
            launch("formats.read.deepspeed_sources", ranks, out, *cases, timeout_s=400).check()
            made[ranks] = out
        return made[ranks]

    return of


@pytest.fixture
def z2(sources: Callable[[int], Path], tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(sources(2) / "z2" / "save", tmp_path / "z2"))


def value(checkpoint: Any, name: str) -> torch.Tensor:
    raw = checkpoint.read(name)
    if checkpoint.info(name).dtype == "bfloat16":
        return torch.from_numpy(raw.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(raw)


def named(param: str, state: str) -> str:
    return f"model.{param}" if state == "fp32" else f"optim.{param}.{state}"


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, after a cast that loses nothing."""
    wide = torch.promote_types(found.dtype, expected.dtype)
    return found.shape == expected.shape and torch.equal(found.to(wide), expected.to(wide))


def differences(checkpoint: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    return [n for n, v in expected.items() if not same(value(checkpoint, n), v)]


def universal(folder: Path, shapes: Any) -> dict[str, torch.Tensor]:
    """What ds_to_universal has written, by our names; ZeRO-3's is flat."""
    found = {}
    for path in folder.glob("*/zero/*/*.pt"):
        held = torch.load(path, weights_only=False)
        tensor = held["param"] if isinstance(held, dict) else held
        name = named(path.parent.name, path.stem)
        found[name] = tensor.reshape(shapes(name)) if torch.is_tensor(tensor) else tensor
    return found


# -- data parallelism -----------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_every_element(sources: Callable[[int], Path], ranks: int, case: str) -> None:
    """Against the engine that saved, its weights, zero_to_fp32 and ds_to_universal."""
    folder = sources(ranks) / case
    truth = torch.load(folder / "truth.pt", weights_only=False)
    with holdfast.open(str(folder / "save")) as found:
        assert found.step == 3
        held = {named(p, s): v for p, states in truth["held"].items() for s, v in states.items()}
        if case != "z2-robin":  # see below
            assert held or case.startswith("z0-")
            assert differences(found, held) == []
        for name, v in truth["module"].items():
            if v.numel() or not prod(found.info(f"model.{name}").shape):
                assert same(value(found, f"model.{name}").to(v.dtype), v), name
        if not case.startswith("z0"):
            theirs = torch.load(folder / "fp32.pt", weights_only=False)
            assert differences(found, {f"model.{n}": v for n, v in theirs.items()}) == []
        trained = {t.name for t in found.manifest.tensors if t.state in ("param", "exp_avg")}
        assert {n for n in held if n.endswith((".exp_avg", ".weight"))} <= trained | set(
            found.names()
        )


CONVERTED = [
    p for p in CASES if p.values[1] not in ("z2-robin", "z1-elastic") and "z0" not in p.values[1]
]
CONVERTED = [p for p in CONVERTED if not p.values[1].endswith(("lion", "sgd"))]


@pytest.mark.parametrize(("ranks", "case"), CONVERTED)
def test_as_universal(sources: Callable[[int], Path], ranks: int, case: str) -> None:
    """Tensor by tensor as ds_to_universal has it, and the same when its result is opened."""
    folder = sources(ranks) / case
    with (
        holdfast.open(str(folder / "save")) as found,
        holdfast.open(f"deepspeed:{folder / 'universal'}") as theirs,
    ):
        made = universal(folder / "universal", lambda name: found.info(name).shape)
        made.pop("model.head.weight", None)  # the tied name: theirs is the rounded 16-bit copy
        assert len(made) >= 8 * 3
        assert differences(found, made) == []
        assert sorted(found.names()) == sorted(theirs.names())
        assert differences(theirs, {n: value(found, n) for n in found.names()}) == []
        for key in ("optim", "scheduler", "scaler", "client"):
            assert theirs.manifest.extras.get(key) == found.manifest.extras.get(key)


@pytest.mark.parametrize("case", ["z2-lion", "z3-lion", "z3-sgd", "z1-elastic"])
def test_what_deepspeed_cannot_convert(sources: Callable[[int], Path], case: str) -> None:
    assert "Error" in (sources(2) / case / "universal.txt").read_text()


def test_round_robin(sources: Callable[[int], Path]) -> None:
    """ZeRO-2 with round_robin_gradients flattens in another order; DeepSpeed's list of slices, and so its
    converter, do not know that.  The weights of this fp32 run do (test_every_element)."""
    folder = sources(2) / "z2-robin"
    with holdfast.open(str(folder / "save")) as found:
        made = universal(folder / "universal", lambda name: found.info(name).shape)
        assert differences(found, made), "DeepSpeed has mended this: compare as the others"


def test_groups_keep_their_hyper_parameters(sources: Callable[[int], Path]) -> None:
    """Of ZeRO-3, too, with several sub-groups in a group."""
    with holdfast.open(str(sources(2) / "z3-small" / "save")) as found:
        groups = found.manifest.extras["optim"]["$optimizer"]["groups"]
    assert [(g["hyper"]["weight_decay"], g["hyper"]["initial_lr"]) for g in groups] == [
        (0.3, 3e-2), (0.1, 1e-2), (0.0, 2e-2),
    ]  # fmt: skip
    assert groups[0]["params"] == ["cube"]
    assert set(groups[1]["params"]) == {"embed.weight", "head.weight", "one.weight", "two.weight"}
    assert all(n.endswith("bias") or n == "norm.weight" for n in groups[2]["params"])


@pytest.mark.parametrize("case", ["z0", "z1", "z2", "z3"])
def test_the_rest(sources: Callable[[int], Path], case: str) -> None:
    with holdfast.open(str(sources(2) / case / "save")) as found:
        extras = found.manifest.extras
        client = decode(extras["client"], lambda tag, body: {tag: body})
        assert client.pop("file").getvalue() == b"x"
        assert client.pop("args") == {"lr": 0.5, "dtype": "float16", "stage": 2}
        assert client.pop("random").tolist() == [3, 1, 2]
        assert client == {"mine": [1, (2.5, None)], "noise": {"$at": "client.noise"}, "epoch": 7}
        assert value(found, "client.noise").tolist() == [0.0, 1.0, 2.0]
        assert decode(extras["scheduler"])["last_epoch"] == 3
        assert extras["deepspeed"]["global_steps"] == 3
        assert extras["deepspeed"]["skipped_steps"] == 0
        assert extras["deepspeed"]["global_samples"] == 24
        info = found.info("model.count")
        assert (info.dtype, info.state, info.shape) == ("int64", "buffer", ())
        assert found.info("model.frozen").state == "param"
        assert "optim.frozen.exp_avg" not in found.names()
        assert found.manifest.aliases["model.head.weight"] == "model.embed.weight"
        assert found.manifest.aliases["optim.head.weight.exp_avg"] == "optim.embed.weight.exp_avg"
        assert found.manifest.software == {"deepspeed": extras["deepspeed"]["ds_version"]}


@pytest.mark.parametrize("case", ["z2-fp16", "z3-fp16", "z0-fp16"])
def test_the_loss_scaler(sources: Callable[[int], Path], case: str) -> None:
    with holdfast.open(str(sources(2) / case / "save")) as found:
        scaler = found.manifest.extras["scaler"]
    assert scaler["cur_scale"] in (2.0**n for n in range(10, 20))
    assert scaler["cur_iter"] == 3


def test_states_of_any_name(sources: Callable[[int], Path]) -> None:
    """By element, one number for all, and of a rank's part alone: none is lost."""
    for case in ("z2-lion", "z3-lion"):
        with holdfast.open(str(sources(2) / case / "save")) as found:
            extras = found.manifest.extras
            assert found.info("optim.cube.momentum").shape == (3, 5, 7)
            assert extras["optim"]["$optimizer"]["state"]["cube"] == {"calls": 3}
            blocks = [n for n in found.names() if n.startswith("zero.")]
            assert blocks == [f"zero.group{g}.rank{r}.blocks" for g in (0, 1) for r in (0, 1)]
            assert value(found, blocks[0]).shape == (3,)
            assert len(extras["deepspeed"]["parts"]) == 4


# -- steps and places -----------------------------------------------------------------------------


def test_tags(sources: Callable[[int], Path], tmp_path: Path) -> None:
    """`latest` names the newest; others by step; a tag's folder by itself; tags of any name."""
    root = Path(shutil.copytree(sources(2) / "z2" / "save", tmp_path / "run"))
    shutil.copytree(sources(2) / "z2" / "later" / "global_step6", root / "global_step6")
    assert holdfast.steps(str(root)) == [3, 6]
    assert holdfast.open(str(root)).step == 3
    assert holdfast.open(str(root), step=6).step == 6
    assert holdfast.open(str(root / "global_step6")).step == 6
    assert holdfast.open(f"deepspeed:{root / 'global_step6'}", step=6).step == 6
    with pytest.raises(NotFound, match="no step 5"):
        holdfast.open(str(root), step=5)
    (root / "latest").write_text("global_step6")
    assert holdfast.open(str(root)).step == 6
    best = sources(2) / "z2-bf16" / "save"
    assert (best / "latest").read_text() == "best"
    assert holdfast.steps(str(best)) == [3]
    assert holdfast.open(str(best)).step == 3
    (root / "latest").write_text("global_step9")
    with pytest.raises(NotFound, match="global_step9"):
        holdfast.open(str(root))
    shutil.copytree(best / "best", root / "best")
    (root / "latest").write_text("global_step6")
    with pytest.raises(UsageError, match="best, global_step3"):
        holdfast.open(str(root), step=3)


def test_tags_without_a_marker(sources: Callable[[int], Path], tmp_path: Path) -> None:
    """As of a run that was killed before it wrote the marker: nothing says which is whole."""
    root = Path(shutil.copytree(sources(2) / "z2" / "save", tmp_path / "run"))
    (root / "latest").unlink()
    with pytest.raises(NotFound, match="global_step3"):
        holdfast.open(f"deepspeed:{root}")
    assert holdfast.open(f"deepspeed:{root}", step=3).step == 3
    assert holdfast.steps(f"deepspeed:{root}") == [3]
    with pytest.raises(HoldfastError):
        holdfast.open(str(root))
    (root / "latest").write_text("global_step9")
    (root / "latest_universal").write_text("global_step3")
    with pytest.raises(NotFound, match="global_step9"):
        holdfast.open(f"deepspeed:{root}")


def test_commands(sources: Callable[[int], Path]) -> None:
    path = str(sources(2) / "z3" / "save")
    for command in (["ls", path], ["inspect", path], ["verify", path]):
        code, out, err = call(*command)
        assert code == 0, out + err
    assert "one.weight" in call("inspect", path)[1]


class Counting:
    """A store that counts the bytes that are read."""

    def __init__(self, path: Path) -> None:
        self._inner = open_store(str(path))
        self.url = self._inner.url
        self.bytes = 0

    def read(self, key: str, offset: int, into: memoryview) -> None:
        self.bytes += len(into)
        self._inner.read(key, offset, into)

    def open(self, key: str) -> Any:
        store, inner = self, self._inner.open(key)

        class Reader:
            def read(self, offset: int, into: memoryview) -> None:
                store.bytes += len(into)
                inner.read(offset, into)

            def close(self) -> None:
                inner.close()

        return Reader()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_opening_reads_no_tensors(sources: Callable[[int], Path]) -> None:
    path = sources(2) / "z2-wide" / "save"
    store = Counting(path)
    found = open_deepspeed(store)  # type: ignore[arg-type]
    assert store.bytes < 100_000
    part = found.read("optim.cube.exp_avg")
    assert store.bytes < 100_000 + part.nbytes + 1000


# -- the run goes on ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["z2", "z3"])
def test_a_run_goes_on_without_deepspeed(sources: Callable[[int], Path], case: str) -> None:
    """In one process with torch's AdamW: gradients of both ranks' batches, averaged.

    Bit for bit what DeepSpeed did, with all optimizer states, three steps on.
    """
    from formats.read.deepspeed_sources import MORE, STEPS, Net, batch, groups_of

    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.AdamW(groups_of(net, 2), lr=9.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    state = {"model": net, "optim": optimizer, "scheduler": scheduler}
    assert holdfast.load(str(sources(2) / case / "save"), state) == STEPS
    losses = []
    for step in range(STEPS, STEPS + MORE):
        optimizer.zero_grad()
        each = [net(*batch(step, rank)) for rank in (0, 1)]
        for loss in each:
            (loss / 2).backward()
        optimizer.step()
        scheduler.step()
        losses.append((each[0] + each[1]).item() / 2)
    assert losses == torch.load(sources(2) / case / "losses.pt")
    with holdfast.open(str(sources(2) / case / "later")) as later:
        for name, p in net.named_parameters():
            torch.testing.assert_close(
                p.detach(), value(later, f"model.{name}"), rtol=1e-5, atol=1e-6
            )


# -- tensor and pipeline parallelism --------------------------------------------------------------

GRIDS = {
    "tp2-pp2-dp2": (2, 2, 2, 1, "fp32"),
    "pp2-bf16": (2, 1, 2, 0, "bf16"),
}


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            pp, tp, dp, *more = GRIDS[name]
            out = tmp_path_factory.mktemp(name)
            ran = launch(
                "formats.read.deepspeed_grid",
                pp * tp * dp,
                out,
                pp,
                tp,
                dp,
                *more,
                timeout_s=400,
            )
            ran.check()
            made[name] = out
        return made[name]

    return of


def together(out: Path, tp: int) -> dict[str, torch.Tensor]:
    """What the ranks said that they held, put together by hand."""
    held: dict[str, dict[int, torch.Tensor]] = {}
    for path in sorted((out / "held").glob("*.pt")):
        rank = int(path.stem.split("-")[1])
        for param, states in torch.load(path, weights_only=False)["held"].items():
            for state, v in states.items():
                held.setdefault(named(param, state), {})[rank] = v
    return {name: joined(name, [parts[t] for t in range(tp)]) for name, parts in held.items()}


def joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if "embed" in name:
        return torch.cat(parts)[:11]
    if ".qkv" in name:
        split = [p.split([n // len(parts) for n in (8, 4, 4)]) for p in parts]
        return torch.cat([s[i] for i in range(3) for s in split])
    if ".gate" in name:
        return torch.cat([p.chunk(2)[i] for i in range(2) for p in parts])
    if ".out" in name or ".down" in name:
        return torch.cat(parts, 1)
    assert all(torch.equal(p, parts[0]) for p in parts)
    return parts[0]


@pytest.mark.soak
def test_a_grid(grids: Callable[[str], Path]) -> None:
    """Two stages, two tensor-parallel ranks, two data-parallel ones: as the ranks had it, and as
    ds_to_universal has it.  The embedding is tied over the stages and padded."""
    out = grids("tp2-pp2-dp2")
    code, printed, err = call("verify", out / "save")
    assert code == 0, printed + err
    with holdfast.open(str(out / "save")) as found:
        held = together(out, 2)
        assert len(held) == 24 * 3
        assert differences(found, held) == []
        made = universal(out / "universal", lambda name: found.info(name).shape)
        assert {n for n in made if not n.endswith(".step")} == held.keys()
        assert differences(found, made) == []
        assert found.info("model.tied_modules.embed.weight").shape == (11, 6)
        assert found.info("model.1.calls").state == "buffer"
        assert value(found, "model.3.calls").tolist() == [6.0, 6.0]
        groups = found.manifest.extras["optim"]["$optimizer"]["groups"]
        assert [len(g["params"]) for g in groups] == [13, 11]
        copies = {n: value(other, n) for other in found.others for n in other.names()}
        assert "model.tied_modules.embed.weight" in copies
        assert "optim.3.norm.bias.exp_avg" in copies
        assert differences(found, copies) == []


@pytest.mark.soak
def test_pipeline_of_bf16(grids: Callable[[str], Path]) -> None:
    """DeepSpeed cuts the optimizer though ZeRO is off, and its own tools read none of it."""
    out = grids("pp2-bf16")
    assert "Error" in (out / "universal.txt").read_text()
    with holdfast.open(str(out / "save")) as found:
        held = together(out, 1)
        assert len(held) == 24 * 3
        assert differences(found, held) == []


def test_what_is_said_of_tensor_parallelism_is_needed(
    grids: Callable[[str], Path], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(grids("tp2-pp2-dp2") / "save", tmp_path / "grid"))
    for path in root.glob("*/mp_rank_*"):
        tree = torch.load(path, weights_only=False)
        del tree["universal_checkpoint_info"]
        torch.save(tree, path)
    with pytest.raises(FormatError, match="universal_checkpoint_info"):
        holdfast.open(str(root))
    (root / "global_step3" / "mp_rank_03_model_states.pt").unlink()
    with pytest.raises(FormatError, match="3 model files"):
        holdfast.open(str(root))


@pytest.mark.parametrize(
    "change_of_info",
    [
        {"tp_replicated_parameter_patterns": [r"(a+)+$", r"\d+\.(norm.*|bias|weight)"]},
        {"tp_replicated_parameter_patterns": []},
        {"tp_replicated_parameter_patterns": 7},
        {"parameter_with_row_parallelism_patterns": ["("]},
        {"sub_param_shard_widths": {}},
        {"sub_param_shard_widths": {r"\d+\.qkv": [[4, 4], [2, 2], [2, 3]]}},
        {"original_vocab_size": None},
    ],
    ids=str,
)
def test_lies_of_tensor_parallelism(
    grids: Callable[[str], Path], tmp_path: Path, change_of_info: dict[str, Any]
) -> None:
    """Refused, or of another shape than the model's: never the right shape with wrong values."""
    root = Path(shutil.copytree(grids("tp2-pp2-dp2") / "save", tmp_path / "grid"))
    path = root / "global_step3" / "mp_rank_00_model_states.pt"
    change(path, lambda tree: tree["universal_checkpoint_info"].update(change_of_info))
    if change_of_info == {"tp_replicated_parameter_patterns": []}:
        assert holdfast.open(str(root)).info("model.1.norm.weight").shape == (12,)
    else:
        assert refused(root).key == "global_step3/mp_rank_00_model_states.pt"


def test_a_scale_is_of_each_state_another() -> None:
    """A parameter that is stored halved has gradients, and so moments, of another scale."""
    rows = [
        {
            "shard_shape": [4],
            "pieces": [{"shape": [4], "source": [4 * r, [1]], "dest": [0, [1]], "scale": 0.5}],
        }
        for r in (0, 1)
    ]
    entry = {"logical_shape": [8], "ranks": {str(r): held for r, held in enumerate(rows)}}
    info = {"affine_map": {"version": 1, "params": {"b": entry}}}
    layout = Layouts(info, "info", {"b": [(4,), (4,)]}).of("b")
    scales = {s: {v.scale for v in layout.views(s)} for s in ("param", "exp_avg", "exp_avg_sq")}
    assert scales == {"param": {2.0}, "exp_avg": {0.5}, "exp_avg_sq": {0.25}}
    with pytest.raises(FormatError, match="momentum") as caught:
        layout.views("momentum")
    assert caught.value.key == "info"


# -- experts --------------------------------------------------------------------------------------

MIXTURES = {"dp4-bf16": (4, 2, 2, "bf16"), "dp2-zero0": (2, 0, 2, "fp32")}


@pytest.mark.soak
@pytest.mark.parametrize("name", MIXTURES)
def test_experts(tmp_path: Path, name: str) -> None:
    """Each rank's experts under their numbers of all, with master copies and states."""
    ranks, *more = MIXTURES[name]
    launch("formats.read.deepspeed_moe", ranks, tmp_path, *more, timeout_s=300).check()
    with holdfast.open(str(tmp_path / "save")) as found:
        for path in (tmp_path / "held").glob("*.pt"):
            held = torch.load(path, weights_only=False)

            def everywhere(param: str, first: int = 2 * held["expert_rank"]) -> str:
                return re.sub(r"(?<=_experts\.)\d+", lambda m: str(first + int(m[0])), param)

            states = {
                named(everywhere(p), s): v for p, ss in held["held"].items() for s, v in ss.items()
            }
            assert len(states) >= 3 * 22
            assert differences(found, states) == []
            for param, v in held["module"].items():
                assert same(value(found, f"model.{everywhere(param)}").to(v.dtype), v)
        groups = found.manifest.extras["optim"]["$optimizer"]["groups"]
        assert [len(g["params"]) for g in groups] == [6, 32]
        assert groups[1]["hyper"]["moe"] is True


# -- damaged and hostile files --------------------------------------------------------------------


def refused(path: Path, *words: str) -> HoldfastError:
    """The error of opening, in little time."""
    started = time.monotonic()
    with pytest.raises(HoldfastError) as caught:
        holdfast.open(f"deepspeed:{path}")
    assert time.monotonic() - started < 600
    for word in words:
        assert word in str(caught.value)
    return caught.value


STATES = "global_step3/zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "global_step3/mp_rank_00_model_states.pt"


@pytest.mark.parametrize("file", [STATES.format(0), STATES.format(1), MODEL])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_truncated(z2: Path, file: str, share: float) -> None:
    size = (z2 / file).stat().st_size
    os.truncate(z2 / file, int(size * share))
    error = refused(z2) if file == MODEL else refused(z2, Path(file).name)
    assert isinstance(error, (FormatError, NotFound))


def test_missing_files(z2: Path) -> None:
    (z2 / STATES.format(1)).rename(z2 / "aside")
    assert isinstance(refused(z2, "rank 1 of 2", Path(STATES.format(1)).name), NotFound)
    (z2 / STATES.format(0)).rename(z2 / "aside0")
    refused(z2, "optim_states")
    (z2 / "aside").rename(z2 / STATES.format(1))
    refused(z2, Path(STATES.format(0)).name)
    (z2 / MODEL).unlink()
    refused(z2, "global_step3")


def test_files_of_another_number_of_ranks(sources: Callable[[int], Path], z2: Path) -> None:
    of_three = sources(3) / "z2" / "save"
    shutil.copy(of_three / STATES.format(2), z2 / STATES.format(2))
    refused(z2, "2 ranks", Path(STATES.format(2)).name)
    (z2 / STATES.format(2)).unlink()
    shutil.copy(of_three / STATES.format(1), z2 / STATES.format(1))
    refused(z2, Path(STATES.format(1)).name)


def test_files_of_two_stages(sources: Callable[[int], Path], z2: Path) -> None:
    for path in (sources(2) / "z3" / "save" / "global_step3").iterdir():
        shutil.copy(path, z2 / "global_step3")
    refused(z2, "twice")


@pytest.mark.parametrize("case", ["z1", "z2", "z3"])
@pytest.mark.parametrize("rank", [0, 1])
def test_files_of_two_steps(
    sources: Callable[[int], Path], tmp_path: Path, case: str, rank: int
) -> None:
    root = Path(shutil.copytree(sources(2) / case / "save", tmp_path / "run"))
    later = sources(2) / case / "later" / "global_step6"
    shutil.copy(later / Path(STATES.format(rank)).name, root / STATES.format(rank))
    refused(root, Path(STATES.format(1)).name, "two saves")


def test_two_steps_of_an_optimizer_that_counts_none(z2: Path) -> None:
    """Their hyper-parameters, or the loss scaler, tell."""
    path = z2 / STATES.format(1)
    tree = torch.load(path, weights_only=False)
    base = tree["optimizer_state_dict"]["base_optimizer_state"]
    base["param_groups"][0]["lr"] *= 2
    torch.save(tree, path)
    refused(z2, path.name, "two saves")


def rewritten(path: Path, data: bytes) -> None:
    """The archive with another pickle, its checksums in order."""
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, held in members.items():
            new.writestr(name, data if name.endswith("data.pkl") else held)


def pickled(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("file", [STATES.format(0), STATES.format(1), MODEL])
def test_a_pickle_that_runs_a_command(z2: Path, tmp_path: Path, file: str) -> None:
    rewritten(z2 / file, pickle.dumps({"module": Evil(tmp_path / "ran")}, protocol=2))
    error = refused(z2, "system", Path(file).name)
    assert isinstance(error, FormatError)
    assert not (tmp_path / "ran").exists()


def test_a_value_of_the_user_that_is_no_plain_data_is_left_out_and_told(z2: Path) -> None:
    command = f"touch {z2 / 'ran'}".encode()
    text = b"X" + len(command).to_bytes(4, "little") + command
    one_more = b"X\x02\0\0\0mycposix\nsystem\n" + text + b"\x85Rs."  # state["my"] = system(...)
    rewritten(z2 / MODEL, pickled(z2 / MODEL)[:-1] + one_more)
    with pytest.warns(HoldfastWarning, match=r"left out, .* data: my \(posix\.system\)"):
        found = holdfast.open(str(z2 / "global_step3"))
    assert found.extras["client"]["epoch"] == 7 and "my" not in found.extras["client"]
    assert not (z2 / "ran").exists()


@pytest.mark.parametrize("file", [STATES.format(0), MODEL])
def test_fuzzed_pickles(z2: Path, file: str) -> None:
    """Flipped bytes in a pickle whose checksum is right: an error of ours, or a checkpoint."""
    data = pickled(z2 / file)
    dice = random.Random(5)
    outcomes = set()
    for _ in range(150):
        bad = bytearray(data)
        for _ in range(dice.choice((1, 1, 2, 8))):
            bad[dice.randrange(len(bad))] = dice.randrange(256)
        rewritten(z2 / file, bytes(bad))
        started = time.monotonic()
        try:
            holdfast.open(str(z2 / "global_step3"))
            outcomes.add("opened")
        except HoldfastError as error:
            outcomes.add(type(error).__name__)
        assert time.monotonic() - started < 600
    assert "FormatError" in outcomes


def test_a_flipped_pickle_is_found_by_its_checksum(z2: Path) -> None:
    data = (z2 / MODEL).read_bytes()
    at = data.index(pickled(z2 / MODEL)) + 40
    (z2 / MODEL).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert isinstance(refused(z2, Path(MODEL).name), Corrupt)


def change(path: Path, do: Callable[[dict[str, Any]], None]) -> None:
    tree = torch.load(path, weights_only=False)
    do(tree)
    torch.save(tree, path)


def _shape(name: str, shape: Any) -> Callable[[dict[str, Any]], None]:
    def do(tree: dict[str, Any]) -> None:
        for group in tree["param_shapes"]:
            if name in group:
                group[name] = shape

    return do


LIES = {
    "huge": _shape("one.weight", torch.Size((1 << 40, 7))),
    "larger": _shape("one.weight", torch.Size((14, 7))),
    "smaller": _shape("one.weight", torch.Size((12, 7))),
    "negative": _shape("one.weight", (-1, 7)),
    "text": _shape("one.weight", "7"),
    "dims": _shape("one.weight", (1,) * 5000),
    "no groups": lambda tree: tree["param_shapes"].clear(),
    "a group less": lambda tree: tree["param_shapes"].pop(),
    "shapes twice": lambda tree: tree["param_shapes"].append(tree["param_shapes"][0]),
    "other names": lambda tree: tree["param_shapes"][0].update(
        {"nobody": tree["param_shapes"][0].pop("one.weight")}
    ),
    "no list": lambda tree: tree.update(param_shapes=3),
    "no module": lambda tree: tree.update(module=[1]),
    "steps": lambda tree: tree.update(global_steps="three"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_of_the_model_file(z2: Path, lie: str) -> None:
    (z2 / "global_step3").rename(z2 / "tag")
    (z2 / "latest").write_text("tag")
    change(z2 / "tag" / Path(MODEL).name, LIES[lie])
    refused(z2)


def _optim(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tree: tree["optimizer_state_dict"].update({key: value})


PARTS = {
    "no parts": _optim("single_partition_of_fp32_groups", []),
    "a part less": lambda t: t["optimizer_state_dict"]["single_partition_of_fp32_groups"].pop(),
    "short part": lambda t: t["optimizer_state_dict"][
        "single_partition_of_fp32_groups"
    ].__setitem__(0, torch.zeros(3)),
    "square part": lambda t: t["optimizer_state_dict"][
        "single_partition_of_fp32_groups"
    ].__setitem__(0, torch.zeros(3, 3)),
    "no count": _optim("partition_count", None),
    "counts": _optim("partition_count", [10**9, 2]),
    "zero": _optim("partition_count", 0),
    "stage": _optim("zero_stage", 9),
    "paddings": _optim("param_alignment_paddings", [[1]]),
    "no state": _optim("base_optimizer_state", 7),
    "lost state": lambda t: t["optimizer_state_dict"]["base_optimizer_state"]["state"][0].pop(
        "exp_avg"
    ),
    "bf16 state": lambda t: t["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(
        exp_avg=t["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"].bfloat16()
    ),
    "empty": lambda t: t.clear(),
}


@pytest.mark.parametrize("lie", PARTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_lies_of_an_optimizer_file(z2: Path, lie: str, rank: int) -> None:
    path = z2 / STATES.format(rank)
    change(path, PARTS[lie])
    error = refused(z2)
    assert "optim_states" in str(error) or error.key


# -- cuts -----------------------------------------------------------------------------------------


def cases() -> Iterator[tuple[dict[str, tuple[int, ...]], int]]:
    dice = random.Random(3)
    for _ in range(60):
        shapes = {
            f"p{i}": tuple(dice.randrange(1, 6) for _ in range(dice.randrange(4)))
            for i in range(dice.randrange(1, 9))
        }
        yield shapes, dice.randrange(1, 7)


def test_cuts_against_slices_of_arrays() -> None:
    for shapes, ranks in cases():
        sizes = [prod(s) for s in shapes.values()]
        whole = torch.arange(sum(sizes))
        part = -(-len(whole) // ranks)
        begin = 0
        for (name, cuts), size in zip(flat_cuts(shapes, [0] * len(sizes), part).items(), sizes):
            parts = [whole[c.rank * part :][c.at : c.at + c.stop - c.start] for c in cuts]
            assert torch.equal(torch.cat(parts), whole[begin : begin + size]), name
            assert [c.start for c in cuts] == [0, *[c.stop for c in cuts]][: len(cuts)]
            begin += size
        for cuts, size in zip(even_cuts(shapes, ranks).values(), sizes):
            padded = functional.pad(torch.arange(size), (0, -size % ranks)).chunk(ranks)
            held = [padded[c.rank][: c.stop - c.start] for c in cuts]
            assert torch.cat(held).tolist() == list(range(size))


def test_a_step_that_is_a_plain_number_is_a_tensor_for_torch() -> None:
    from holdfast.formats.read.deepspeed.other_state import number

    tree: Any = None
    assert outline_tensor(number(tree, "step", 7)["$tensor"]).item() == 7.0


# -- and back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["z1", "z2", "z3", "z2-bf16", "z3-bf16", "z2-fp16", "z3-fp16"])
def test_converted_as_deepspeed_converts(
    sources: Callable[[int], Path], case: str, tmp_path: Path
) -> None:
    """holdfast's universal files hold, tensor by tensor, what ds_to_universal's hold."""
    holdfast.convert(sources(2) / case / "save", tmp_path / "out", to="deepspeed")
    with holdfast.open(str(sources(2) / case / "save")) as source:
        theirs = sources(2) / case / "universal"
        expected = universal(theirs, lambda name: source.info(name).shape)
        expected.pop("model.head.weight", None)  # the tied name: theirs is the rounded 16-bit copy
        expected = {n: t for n, t in expected.items() if source.info(n).state != "buffer"}
        written = universal(tmp_path / "out", lambda name: source.info(name).shape)
        assert len(expected) > 20 and expected.keys() <= written.keys()
        for name, tensor in expected.items():
            assert same(written[name], tensor), name
    tag = (tmp_path / "out/latest_universal").read_text()
    states = torch.load(tmp_path / f"out/{tag}/mp_rank_00_model_states.pt", weights_only=False)
    skipped = 2 if case.endswith("fp16") else 0  # the first scales overflow
    counted = [states[k] for k in ("global_steps", "global_samples", "skipped_steps")]
    assert counted == [3, 24, skipped] and states["lr_scheduler"]["last_epoch"] == 3 - skipped
    assert states.get("epoch") == (7 if "client" in source.manifest.extras else None)
    shared = torch.load(tmp_path / f"out/{tag}/zero/optimizer_state.pt", weights_only=False)
    assert len({group["weight_decay"] for group in shared["param_groups"]}) > 1
    if case.endswith("fp16"):
        (theirs,) = (sources(2) / case / "universal").glob("*/zero/optimizer_state.pt")
        scaler = torch.load(theirs, weights_only=False)["loss_scaler"]
        assert type(shared["loss_scaler"]) is type(scaler) and scaler.dynamic
        assert vars(shared["loss_scaler"]) == vars(scaler) and shared["dynamic_loss_scale"]
    else:
        assert "loss_scaler" not in shared


@pytest.mark.parametrize("case", ["z1", "z2"])
def test_a_parameter_without_its_step(
    sources: Callable[[int], Path], tmp_path: Path, case: str
) -> None:
    """DeepSpeed's conversion has it there alone."""
    root = Path(shutil.copytree(sources(2) / case / "universal", tmp_path / "run"))
    next(root.glob("*/zero/*/step.pt")).unlink()
    assert isinstance(refused(root, "has no step.pt, which others have"), NotFound)


def test_a_folder_of_no_parameter_is_not_looked_at(
    sources: Callable[[int], Path], tmp_path: Path
) -> None:
    """The model files name the parameters; what else lies there needs no step."""
    root = Path(shutil.copytree(sources(2) / "z1" / "universal", tmp_path / "run"))
    with holdfast.open(f"deepspeed:{root}") as found:
        names = sorted(found.names())
    step = next(root.glob("*/zero/*/step.pt"))
    shutil.copytree(step.parent, step.parent.with_name("stray"))
    (step.parent.with_name("stray") / "step.pt").unlink()
    with holdfast.open(f"deepspeed:{root}") as found:
        assert sorted(found.names()) == names
