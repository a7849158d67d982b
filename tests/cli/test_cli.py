"""Each verb on real checkpoints: what it prints, its JSON, its exit code, and that it needs no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast
from builders import FSDP_TP, Tensor, build, transformer
from cli.calling import call, call_json
from holdfast.base.sizes import parse_size
from holdfast.cli.verbs import VERBS
from holdfast.cli.words import ranks_text, size
from holdfast.core.checkpoint.names import committed
from holdfast.core.checkpoint.notes import measure
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.formats.read.addresses import located
from holdfast.layout import Cut, Mesh, Sharding
from holdfast.store import LocalStore

EXTRAS = {"optim": {"param_groups": [{"lr": 0.1, "params": ["w"]}], "state": {}}, "steps": 3}
PER_RANK = {"rng": ("fresh", [b"a", b"b", b"c", b"d"])}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 10, 20 and 30 of a small model, and what a crash left of step 40."""
    path = tmp_path / "run"
    store = LocalStore(path)
    for step in (10, 20, 30):
        tensors = transformer(seed=step)
        build(store, FSDP_TP, tensors, step=step, extras=EXTRAS, per_rank=PER_RANK)  # type: ignore[arg-type]
    build(store, FSDP_TP, transformer(), step=40, committed=False)
    return path


def damage(root: Path, step: int, *, at: int | None = None) -> Path:
    """Flip a byte of rank 1's file, or remove the file."""
    (path,) = (root / f"steps/{step:010d}").glob("*/r00001.safetensors")
    if at is None:
        path.unlink()
        return path
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    return path


# -- ls -------------------------------------------------------------------------------------------


def test_ls(root: Path) -> None:
    code, out, _ = call("ls", root)
    assert code == 0
    assert out.count("complete") == 3
    assert "dp 2 x tp 2" in out
    lines = [line for line in out.splitlines() if "newest" in line]
    assert len(lines) == 1 and lines[0].startswith("→") and " 30 " in lines[0]
    assert "40" in out.split("Not referenced")[1]


def test_ls_says_why_a_step_is_not_complete(root: Path) -> None:
    damage(root, 30)
    (root / "steps/0000000010/manifest.json").write_text("{")
    code, found = call_json("ls", root)
    assert code == 1
    problems = {s["step"]: s["problem"] for s in found["steps"]}
    assert problems[20] is None
    assert "r00001.safetensors is missing" in problems[30]
    assert "manifest" in problems[10]
    assert (found["newest"], found["newest_good"]) == (30, 20)
    assert [a["step"] for a in found["unreferenced"]] == [40]
    assert "goes back to step 20" in call("ls", root)[1]


def test_ls_orders_by_run_and_then_step(root: Path) -> None:
    build(LocalStore(root), FSDP_TP, transformer(), step=15, run=2)
    assert call_json("ls", root)[1]["newest"] == 15


def test_ls_of_nothing(tmp_path: Path) -> None:
    said = f"no steps in file://{tmp_path}/no (there is no {tmp_path}/no)\n"
    assert call("ls", tmp_path / "no") == (1, said, "")
    assert call_json("ls", tmp_path / "no")[1]["steps"] == []
    said = f"no records in file://{tmp_path}/no (there is no {tmp_path}/no)\n"
    assert call("log", tmp_path / "no") == (1, said, "")
    assert call("log", tmp_path)[0] == 0


def test_a_path_that_leads_into_a_root_is_told_the_root(root: Path) -> None:
    inside = f"{root}/steps"
    told = f"it lies in a root: give {root}"
    assert call("ls", inside) == (1, f"no steps in file://{inside} ({told})\n", "")
    for verb in ("inspect", "verify"):
        code, _, said = call(verb, inside)
        assert code == 1 and f" hint: {told}\n" in said
    assert call_json("verify", f"{inside}/0000000020")[1]["step"] == 20


def test_ls_of_what_is_no_root_says_what_lies_below(root: Path) -> None:
    above = root.parent
    (above / "old/step_6").mkdir(parents=True)
    (above / "old/empty").mkdir()
    assert call("convert", f"{root}@20", above / "old/step_6", "--to", "dcp")[0] == 0
    code, out, _ = call("ls", above)
    assert code == 1 and out.startswith(f"no steps in file://{above}\n")
    rows = [line.split() for line in out.split("Below it\n")[1].splitlines()]
    assert rows == [
        ["path", "format", "steps", "highest"],
        ["old/step_6", "dcp", "1", "0"],
        ["run", "holdfast", "3", "30"],
    ]
    _, found = call_json("ls", above)
    assert found["below"] == [
        {"path": "old/step_6", "format": "dcp", "steps": [0]},
        {"path": "run", "format": "holdfast", "steps": [10, 20, 30]},
    ]
    code, _, err = call("inspect", above)
    assert code == 1 and f"below it lie {above}/old/step_6, {above}/run" in err


def test_ls_is_readable_on_80_columns(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the many metrics of a trainer: those that are not asked for are named below."""
    names = ("eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    for step in (10, 20, 30):
        measure(LocalStore(root), step, dict.fromkeys(names, 1.25 * step), coming={})
    code, out, _ = call("ls", root)
    assert code == 0
    _, head, *lines = out.splitlines()
    assert head.split() == ["step", "size", "age", "run", "mesh", "state"]
    assert max(map(len, lines)) <= 80
    (total,) = [line for line in lines if line.startswith("3 steps, ")]
    _, found = call_json("ls", root)
    assert total == f"3 steps, {size(sum(s['bytes'] for s in found['steps']))}"
    assert found["steps"][0]["metrics"] == dict.fromkeys(names, 12.5)
    others = f"metrics: {', '.join(names)} (--columns NAME,... shows them)"
    assert others in out.replace("\n  ", " ")
    code, out, _ = call("ls", root, "--columns", "eval_loss,files")
    head, row = out.splitlines()[1:3]
    assert head.split()[-3:] == ["eval_loss", "files", "state"]
    assert row.split()[-3:] == ["12.5", "4", "complete"]
    code, _, err = call("ls", root, "--columns", "eval_los")
    assert code == 2 and "did you mean 'eval_loss'" in err


def test_ls_shows_the_metric_that_the_run_keeps_the_best_by(tmp_path: Path) -> None:
    keep = holdfast.Keep(last=1, best=("accuracy", 2, "max"))
    state = {"x": {"n": 1}}
    with holdfast.Checkpointer(tmp_path / "run", state, every=1, keep=keep) as ckpt:
        for step, accuracy in ((1, 0.5), (2, 0.75), (3, 0.25)):
            ckpt.save(step, metrics={"loss": 2.0, "accuracy": accuracy}).wait()
    _, head, *rows = call("ls", tmp_path / "run")[1].splitlines()
    assert head.split()[-2:] == ["accuracy", "state"]
    assert [row.replace("→", " ").split()[0] for row in rows[:3]] == ["1", "2", "3"]
    assert ["0.5" in rows[0], "0.75" in rows[1], "0.25" in rows[2]] == [True] * 3
    assert "metrics: loss (--columns NAME,... shows them)" in rows
    assert call_json("ls", tmp_path / "run")[1]["best_by"] == "accuracy"


# -- inspect --------------------------------------------------------------------------------------


def test_inspect_a_step(root: Path) -> None:
    code, out, _ = call("inspect", f"{root}@20")
    assert code == 0
    assert out.startswith("step 20\n")
    assert "model.h.{0..1}.attn.wo.weight" in out
    assert "optim.wte.weight.exp_avg" not in out
    assert "exp_avg_sq" in out
    assert "1 group: lr 0.1" in out
    assert "starts anew" in out
    assert "optim.wte.weight.exp_avg" in call("inspect", root, "--all")[1]


def test_inspect_json(root: Path) -> None:
    code, found = call_json("inspect", root)
    assert code == 0
    assert (found["step"], found["mesh"]) == (30, {"dp": 2, "tp": 2})
    assert len(found["tensors"]) == sum(t["tensors"] for t in found["totals"])
    assert found["extras"]["steps"] == 3
    assert found["per_rank"] == {"rng": "fresh"}


def test_inspect_one_tensor_draws_it(root: Path) -> None:
    code, out, _ = call("inspect", root, "model.h.0.attn.wo.weight")
    assert code == 0
    assert "cut along dim 1 in 2 over tp, then each part along dim 0 in 2 over dp" in out
    picture = """\
           dim 1
           0            4            8
  dim 0  0 ┌────────────┬────────────┐
           │ rank 0     │ rank 1     │
         4 ├────────────┼────────────┤
           │ rank 2     │ rank 3     │
         8 └────────────┴────────────┘
"""
    assert picture in out


def test_inspect_says_where_each_piece_lies(root: Path) -> None:
    """The stated bytes of the stated files are the values."""
    name = "model.h.1.mlp.down.weight"
    values = transformer(seed=30)[name].values
    _, found = call_json("inspect", root, name)
    seen = np.zeros(values.shape, int)
    for piece in found["pieces"]:
        box = tuple(slice(a, b) for a, b in zip(piece["start"], piece["stop"]))
        data = (root / "steps/0000000030" / piece["file"]).read_bytes()
        assert data[piece["from"] : piece["to"]] == values[box].tobytes()
        seen[box] += 1
    assert np.all(seen == 1)


def test_inspect_a_name_that_is_not_there(root: Path) -> None:
    code, _, err = call("inspect", root, "model.h.0.atn.wo.weight")
    assert code == 2
    assert "did you mean 'model.h.0.attn.wo.weight'" in err
    assert "Traceback" not in err
    assert call("inspect", root, "nothing*")[0] == 2


def test_inspect_a_pattern(root: Path) -> None:
    code, out, _ = call("inspect", root, "model.*.norm.weight")
    assert code == 0
    assert "3 tensors" in out or "2 tensors" in out
    names = [t["name"] for t in call_json("inspect", root, "model.h.*.norm.weight")[1]]
    assert names == ["model.h.0.norm.weight", "model.h.1.norm.weight"]


def test_inspect_statistics(root: Path) -> None:
    code, out, _ = call("inspect", root, "model.*norm.weight", "--stats")
    assert code == 0
    head, *rows = [line.split() for line in out.splitlines()]
    assert head == ["name", "mean", "deviation", "least", "most", "NaN", "Inf"]
    tensors = transformer(seed=30)
    assert [row[0] for row in rows] == [
        n for n in tensors if n.endswith("norm.weight") and n[0] == "m"
    ]
    for name, *numbers, nan, inf in rows:
        v = tensors[name].values.astype("f8")
        assert numbers == [f"{x:.4g}" for x in (v.mean(), v.std(), v.min(), v.max())]
        assert (nan, inf) == ("0", "0")
    out = call("inspect", root, "--stats")[1]
    assert out.splitlines()[-1] == "and 36 tensors of optimizer state: --all reads them"
    assert len(call_json("inspect", root, "--stats", "--all")[1]["tensors"]) == len(tensors)
    assert call("inspect", root, "modle.*", "--stats")[0] == 2
    assert "did you mean" in call("inspect", root, "model.wte.wieght", "--stats")[2]


def test_inspect_prints_an_extra_by_its_path(tmp_path: Path) -> None:
    extras = {"meta": {"wandb_id": "3kf9", "tags": [*range(100)]}, "epoch": 3, **EXTRAS}
    build(LocalStore(tmp_path), FSDP_TP, transformer(), extras=extras, per_rank=PER_RANK)  # type: ignore[arg-type]
    for path, text in (
        ("meta.wandb_id", "3kf9"), ("epoch", "3"), ("meta.tags[99]", "99"),
        ("optim.param_groups[0].lr", "0.1"), ("rank1.rng", "b'b'"),
        ("meta", f"{{wandb_id: '3kf9', tags: {[*range(100)]}}}"),
    ):  # fmt: skip
        assert call("inspect", tmp_path, path) == (0, f"{text}\n", "")
    assert call_json("inspect", tmp_path, "epoch")[1] == {"path": "epoch", "value": 3}
    code, _, err = call("inspect", tmp_path, "meta.wandb_ic")
    assert code == 2 and "no tensor and no extra" in err and "did you mean 'meta.wandb_id'" in err
    assert "3, 4, " in (short := call("inspect", tmp_path)[1]) and "98, 99]" not in short
    whole = call("inspect", tmp_path, "--all")[1]
    assert ", 97, 98, 99]" in whole and "…" not in whole and "in all" not in whole


def test_inspect_prints_keys_that_json_lacks(tmp_path: Path) -> None:
    """And a dict of the user's own with the keys of an optimizer's."""
    meta = {(0, 1): 3, None: [{True: 1}], 2: 4, "a": {"b": 5}}
    own = {"param_groups": [{"lr": 0.1}], "state": {}}
    holdfast.save(tmp_path, {"meta": meta, "own": own}, step=1)
    code, found = call_json("inspect", tmp_path)
    told = {"(0, 1)": 3, "None": [{"True": 1}], "2": 4, "a": {"b": 5}}
    assert code == 0 and found["extras"]["meta"] == told
    assert call_json("inspect", tmp_path, "meta")[1] == {"path": "meta", "value": told}
    code, out, err = call("inspect", tmp_path)
    assert code == 0 and "lr: 0.1" in out and not err


# -- verify ---------------------------------------------------------------------------------------


def test_verify(root: Path) -> None:
    code, out, _ = call("verify", root)
    assert code == 0
    assert out.startswith("good  step 30")
    assert "every digest checked" in out
    assert call("verify", root, "--quick")[0] == 0


def test_verify_says_what_is_wrong_and_which_step_is_good(root: Path) -> None:
    damage(root, 30, at=5000)
    damage(root, 20)
    code, out, _ = call("verify", root)
    assert code == 1
    assert "r00001.safetensors  bytes 0.." in out
    assert "Step 10 is good" in out
    code, found = call_json("verify", f"{root}@20")
    assert (code, found["good"], found["older_good_step"]) == (1, False, 10)
    assert found["problems"][0]["message"] == "is missing"


def test_verify_quick_leaves_the_data_alone(root: Path) -> None:
    damage(root, 30, at=5000)
    assert call("verify", root, "--quick")[0] == 0
    assert call("verify", root)[0] == 1


def test_verify_tells_of_steps_that_it_passes_over(root: Path) -> None:
    (root / "steps/0000000030/manifest.json").write_text("{")
    code, out, _ = call("verify", root)
    assert code == 1
    assert "good  step 20" in out
    assert "step 30" in out


def test_verify_a_step_that_is_not_there(root: Path) -> None:
    code, _, err = call("verify", f"{root}@99")
    assert code == 1
    assert "no step 99" in err and "10, 20, 30" in err
    assert call("verify", root / "no")[0] == 1


# -- diff -----------------------------------------------------------------------------------------


def test_diff(root: Path) -> None:
    code, out, _ = call("diff", root, f"{root}@30")
    assert code == 0
    assert "no difference" in out
    code, out, _ = call("diff", f"{root}@20", root)
    assert code == 1
    parts = [out.index(p) for p in ("Weights: 12 tensors differ", "Optimizer states: 24 tensors")]
    assert parts == sorted(parts)
    assert "relative L2" in out and "max relative" not in out and "NaN" not in out
    weights = out[parts[0] : parts[1]].splitlines()[2:-1]
    shown = [float(line.split()[1]) for line in weights]
    assert len(shown) == 12 and shown == sorted(shown, reverse=True)
    a, b = (transformer(seed=s)["model.norm.weight"].values.astype("f8") for s in (20, 30))
    expected = np.linalg.norm(a - b) / max(np.linalg.norm(a), np.linalg.norm(b))
    (row,) = [line.split() for line in weights if line.split()[0] == "model.norm.weight"]
    assert row[1] == f"{expected:.3g}"
    code, found = call_json("diff", f"{root}@20", root, "--only", "*.step")
    assert (code, found["identical"]) == (0, True)


def test_diff_over_layouts(root: Path, tmp_path: Path) -> None:
    mesh = Mesh((("fsdp", 3),))
    build(LocalStore(tmp_path / "b"), mesh, transformer(mesh, seed=30), extras=EXTRAS)
    code, out, _ = call("diff", root, tmp_path / "b")
    assert code == 0, out
    assert "were not compared: 4 and 3 ranks" in out


def test_diff_against_another_system_says_why_extras_of_ranks_are_not_compared(
    root: Path, tmp_path: Path
) -> None:
    assert call("convert", root, tmp_path / "dcp", "--to", "dcp")[0] == 0
    out = call("diff", root, tmp_path / "dcp")[1]
    told = "extras of single ranks (rng) were not compared: b is a dcp checkpoint, which has none"
    assert told in out.splitlines()


# -- prune ----------------------------------------------------------------------------------------


def steps(root: Path) -> list[int]:
    return sorted(s.step for s in committed(LocalStore(root)))


def test_prune(root: Path) -> None:
    assert call("prune", root)[0] == 2
    code, found = call_json("prune", root, "--keep-last", 2, "--dry-run")
    assert (code, found["gone"], found["kept"], steps(root)) == (0, [10], [20, 30], [10, 20, 30])
    assert found["freed_bytes"] > 0
    assert "1 step deleted" in call("prune", root, "--keep-last", 2)[1]
    assert steps(root) == [20, 30]
    assert call("prune", root, "--keep-last", 0)[0] == 2


def test_prune_keeps_the_newest_good_step(root: Path) -> None:
    damage(root, 30)
    call("prune", root, "--keep-last", 1)
    assert steps(root) == [20, 30]


def test_prune_keeps_the_newest_good_step_and_not_any_good_one(root: Path) -> None:
    """10 is kept by its number and good, but the newest good one is 20."""
    store = LocalStore(root)
    build(store, FSDP_TP, transformer(), step=45)
    damage(root, 45)
    damage(root, 30)
    call("prune", root, "--keep-last", 1, "--keep-every", 10_000)
    assert steps(root) == [20, 45]
    build(store, FSDP_TP, transformer(), step=7)
    call("prune", root, "--keep-last", 1, "--keep-every", 7)
    assert steps(root) == [7, 20, 45]


# -- plan -----------------------------------------------------------------------------------------


def test_plan(root: Path) -> None:
    code, out, _ = call("plan", root, "--mesh", "dp=4,tp=2")
    assert code == 0
    assert "as saved: cut (2 ranks then, 4 now)" in out
    code, found = call_json("plan", root, "--mesh", "fsdp=2", "--rank", 1)
    assert code == 0
    assert [r["rank"] for r in found["ranks"]] == [1]
    assert "guess" in found["assumed"]["fsdp"]
    assert call("plan", root, "--mesh", "dp=2", "--rank", 0)[0] == 0
    assert call("plan", root, "--mesh", "dp=2", "--rank", 2)[0] == 2
    assert call("plan", root, "--mesh", "dp:2")[0] == 2
    assert call("plan", root)[0] == 2
    assert "more" in call("plan", root, "--mesh", "dp=64")[1]


def test_plan_of_snapshots_in_memory(root: Path) -> None:
    code, out, _ = call("plan", root, "--mesh", "dp=8", "--nodes", 4)
    assert code == 0
    assert "parity (auto)" in out and "any 2 nodes" in out
    assert "group 1  1 on node0, 3 on node1, 5 on node2, 7 on node3" in out
    assert "node3  6, 7   0, 1" in out and "a block of parity" in out
    code, found = call_json("plan", root, "--mesh", "dp=8", "--nodes", 4, "--redundancy", "copy")
    assert code == 0
    (memory,) = found["memory"]
    assert memory["groups"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert ["node0", "node1"] in memory["fatal_sets"]
    assert 0 < memory["loss"] < 1e-6
    assert call("plan", root, "--mesh", "dp=8", "--nodes", 3)[0] == 2
    four = ("--nodes", 4, "--redundancy", "parity")  # replicas along an axis that was not there
    (memory,) = call_json("plan", root, "--mesh", "cp=2,dp=2", *four)[1]["memory"]
    assert memory["groups"] == [[0, 2], [1, 3]]
    assert memory["fatal_sets"] == [["node0", "node2"], ["node1", "node3"]]
    (memory,) = call_json("plan", root, "--mesh", "dp=4", *four)[1]["memory"]
    assert memory["groups"] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("nodes", [128, pytest.param(512, marks=pytest.mark.soak)])
def test_plan_of_many_nodes_fits_on_a_screen(root: Path, nodes: int) -> None:
    many = ("plan", root, "--mesh", f"dp={nodes},tp=8", "--nodes", nodes, "--redundancy", "copy")
    out = call(*many)[1]
    assert f"… {nodes - 8} more" in out and len(out.splitlines()) < 70
    assert "node8 " not in out.partition("member of groups")[2]
    assert f"node{nodes - 1}" in call(*many, "--all")[1]


def test_plan_of_too_few_nodes(root: Path) -> None:
    assert call("plan", root, "--mesh", "dp=8", "--nodes", 2, "--redundancy", "rs(2)")[0] == 2


def test_agent_actions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent is had, looked at and ended; what is misspelt is refused."""
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    assert call("agent", "status")[0] == 1
    code, found = call_json("agent", "start")
    assert code == 0 and found["running"] and found["jobs"] == []
    assert "no snapshots" in call("agent", "status")[1]
    assert "0 jobs freed" in call("agent", "clean")[1]
    assert "stopped" in call("agent", "stop")[1]
    code, _, err = call("agent", "stat")
    assert code == 2 and "status" in err


def test_the_agent_is_not_started_by_looking(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    assert call("agent", "status")[0] == 1
    assert call("agent", "clean") == (0, "0 jobs freed\n", "")
    code, _, err = call("agent", "clean", "--job", "j")
    assert code == 2 and "job j is not known here" in err
    assert call_json("ls", root)[1]["snapshots"] == []
    assert not (tmp_path / "node").exists()


def test_a_memory_directory_whose_socket_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unix sockets have short paths: told before an agent is started that could not be reached."""
    short = tmp_path / "node"
    for far in (short / ("x" * 96), Path("/" + "x" * 97)):
        monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(far))
        code, _, err = call("agent", "status")
        assert code == 2 and f"{len(str(far))} bytes" in err and "may have 96" in err
    assert not short.exists()
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", "/" + "x" * 95)
    assert call("agent", "status")[0] == 1  # there is none


def test_plan_by_rules(root: Path, tmp_path: Path) -> None:
    names = {t["name"]: t for t in call_json("inspect", root)[1]["tensors"]}
    file = tmp_path / "some.rules"
    file.write_text("axes tp\ncopies dp\n**  replicated, flat over tp multiple grain\nneed grain\n")
    options = ("--rules", file, "--mesh", "dp=2,tp=2", "--let", "grain=8")
    code, out, _ = call("plan", root, *options)
    assert code == 0 and "Every element is held exactly once" in out and "flat over tp" in out
    code, found = call_json("plan", root, *options)
    assert code == 0 and {t["name"] for t in found["tensors"]} == set(names)
    expected = padding = 0
    for t in found["tensors"]:
        size = int(np.prod(t["shape"]))
        item = np.dtype(t["dtype"]).itemsize if t["dtype"] != "bfloat16" else 2
        each = size if t["layout"] is None else -(-size // 16) * 8
        assert t["bytes_per_rank"] == [each * item]
        expected += each * item
        padding += 0 if t["layout"] is None else 2 * each * item - size * item
    assert [r["bytes"] for r in found["ranks"]] == [expected] * 4
    assert sum(r["padding_bytes"] for r in found["ranks"][:2]) == padding
    assert call_json("plan", root, *options, "--rank", 3)[1]["ranks"][0]["rank"] == 3


def test_convert_renames_by_rules(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "names.rules"
    file.write_text("rename wte.{x} -> embed.{x}\nrename {x:**} -> model.{x}\n")
    options = ("--to", "huggingface", "--rules", file)
    assert call("convert", root, tmp_path / "out", *options)[0] == 0
    header = (tmp_path / "out/model.safetensors").read_bytes()
    found = set(json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])) - {"__metadata__"}
    old = {
        n.removeprefix("model.")
        for n in Checkpoint.open(str(root)).names()
        if n.startswith("model.")
    }
    assert found == {"embed.weight" if n == "wte.weight" else f"model.{n}" for n in old}
    file.write_text("rename wte.{x} -> embed.{x}\n")
    code, _, err = call("convert", root, tmp_path / "other", *options)
    assert code == 2 and "no rename matches" in err and not (tmp_path / "other").exists()
    file.write_text("** replicated\n")
    code, _, err = call("convert", root, tmp_path / "other", *options)
    assert code == 2 and "no rename in it" in err


def test_plan_by_rules_that_do_not_fit(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "some.rules"
    file.write_text("axes tp\nsome.weight  unique, shard 0 over tp\n")
    code, _, err = call("plan", root, "--rules", file, "--mesh", "tp=2")
    assert (
        code == 2
        and "no rule matches" in err
        and "some.rules:2: this rule is used by no name" in err
    )
    for options, message in (
        (("--rules", "lama", "--mesh", "tp=2"), "did you mean 'llama'?"),
        (("--rules", "mixtral", "--mesh", "tp=2"), "experts has no value"),
        (("--rules", "gpt2", "--mesh", "tp=2", "--rank", 2), "rank 2 is not in 0..1"),
        (("--rules", "gpt2", "--mesh", "tp=2", "--nodes", 2), "give one"),
        (("--rules", "gpt2", "--mesh", "tp=2", "--let", "x"), "--let x: not a variable"),
        (("--mesh", "tp=2", "--let", "x=1"), "it needs --rules FILE"),
    ):
        code, _, err = call("plan", root, *options)
        assert code == 2 and message in err, err


# -- the command itself ---------------------------------------------------------------------------


def test_usage() -> None:
    code, out, _ = call("--version")
    assert code == 0 and re.fullmatch(
        r"holdfast \S+ \(Python \S+, (no torch|torch \S+), \S+\)\n", out
    )
    code, _, err = call("inspekt", "x")
    assert code == 2 and "did you mean 'inspect'" in err
    code, _, err = call("ls", "x", "--jsno")
    assert code == 2 and "--json" in err
    assert call()[0] == 2
    for verb in VERBS:
        code, out, _ = call(verb, "--help")
        assert code == 0 and "--json" in out


def test_an_unsupported_url_is_a_usage_error() -> None:
    code, _, err = call("ls", "s33://bucket/x")
    assert code == 2 and err.startswith("error: ") and "hint" in err


def test_verbs_run_without_torch(root: Path) -> None:
    """In a process of their own; rich is not loaded either, as stdout is no terminal."""
    verbs = [
        ["ls", "{root}"],
        ["inspect", "{root}"],
        ["inspect", "{root}", "model.wte.weight"],
        ["verify", "{root}"],
        ["diff", "{root}", "{root}"],
        ["plan", "{root}", "--mesh", "dp=2"],
        ["plan", "{root}", "--mesh", "dp=2", "--rules", "deepspeed-zero"],
        ["prune", "{root}", "--keep-last", "9"],
        ["copy", "{root}", "{root}/other"],
        ["nonsense"],
    ]
    code = """
import json, sys
from holdfast.cli.main import main
for args in json.loads(sys.argv[1]):
    sys.argv[1:] = args
    try:
        main()
    except SystemExit as end:
        loaded = sorted({"torch", "rich"} & set(sys.modules))
        print("LOADED", loaded, end.code, file=sys.stderr)
"""
    asked = json.dumps([[a.format(root=root) for a in args] for args in verbs])
    done = subprocess.run(
        [sys.executable, "-c", code, asked], capture_output=True, text=True, check=False
    )
    told = [line for line in done.stderr.splitlines() if line.startswith("LOADED")]
    assert told == ["LOADED [] 0"] * 9 + ["LOADED [] 2"], done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_of_a_real_model(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import holdfast

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optim = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optim.step()
    holdfast.save(tmp_path, {"model": model, "optim": optim, "epoch": 3}, step=1)
    before = [call(v, tmp_path)[0] for v in ("ls", "inspect", "verify")]
    assert before == [0, 0, 0]
    optim.step()
    holdfast.save(tmp_path, {"model": model, "optim": optim, "epoch": 4}, step=2)
    code, out, _ = call("diff", f"{tmp_path}@1", f"{tmp_path}@2")
    assert code == 1
    assert "epoch" in out
    assert "model.0.weight" in out


# -- words ----------------------------------------------------------------------------------------


def test_targets() -> None:
    assert located("runs/gpt@1000") == ("runs/gpt", 1000)
    assert located("runs/me@home") == ("runs/me@home", None)
    assert located("file:///a@b@3") == ("file:///a@b", 3)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_600, "1.00 MB"), (12_340_000, "12.3 MB"),
     (123_456_789, "123 MB"), (5e15, "5000 TB")],
)  # fmt: skip
def test_sizes(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


def test_ranks() -> None:
    assert ranks_text([0, 1, 2, 3, 8]) == "0–3, 8"
    assert ranks_text([0, 1]) == "0, 1"
    assert ranks_text(list(range(0, 100, 2)), 3) == "0, 2, … (50 ranks)"


def test_an_irregular_tensor_is_drawn_too(tmp_path: Path) -> None:
    from holdfast.layout import Box

    held = ((0, Box((0, 0), (2, 4))), (1, Box((2, 0), (4, 1))), (2, Box((2, 1), (4, 4))))
    mesh = Mesh((("rank", 3),))
    tensor = Tensor(np.arange(16, dtype="f4").reshape(4, 4), Sharding(held=held))
    build(LocalStore(tmp_path), mesh, {"m.w": tensor})
    code, out, _ = call("inspect", tmp_path, "m.w")
    assert code == 0
    assert "irregular: 3 fragments" in out
    assert out.count("rank 0") == 2 and out.count("rank 2") == 1


def test_a_large_grid_is_abbreviated(tmp_path: Path) -> None:
    mesh = Mesh((("dp", 20), ("tp", 10)))
    cut = Sharding((Cut(1, ("tp",)), Cut(0, ("dp",))))
    tensors = {"m.w": Tensor(np.zeros((39, 40), "f4"), cut)}
    build(LocalStore(tmp_path), mesh, tensors)
    out = call("inspect", tmp_path, "m.w")[1]
    assert "⋯" in out and "⋮" in out
    assert len(out.splitlines()) < 60
    assert call("inspect", tmp_path, "m.w", "--all")[0] == 0


def test_convert(root: Path, tmp_path: Path) -> None:
    code, out, err = call("convert", f"{root}@20", tmp_path / "h", "--to", "huggingface")
    assert code == 0, err
    assert "converted  step 20 to huggingface" in out and "every byte read back" in out
    code, found = call_json("convert", root, tmp_path / "d", "--to", "dcp", "--no-verify")
    assert code == 0 and found["step"] == 30 and found["to"] == "dcp"
    code, _, err = call("convert", root, tmp_path / "d", "--to", "dcp")
    assert code == 2 and "exists" in err and "not there yet" in err
    code, _, err = call("convert", root, tmp_path / "x", "--to", "dpc")
    assert code == 2 and "did you mean 'dcp'?" in err
    code, _, err = call("convert", root, tmp_path / "x", "--memory", "lots")
    assert code == 2 and "--memory 'lots': not a size" in err
    code, _, err = call("convert", root, tmp_path / "x", "--from", "dcp")
    assert code == 1 and "no dcp checkpoint" in err
    code, _, err = call("convert", tmp_path / "nothing", tmp_path / "x")
    assert code == 1 and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1.5 kB", 1500), ("7", 7), ("64Mi", 64 << 20)],
)
def test_sizes_that_users_write(text: str, expected: int) -> None:
    assert parse_size("--memory", text) == expected
