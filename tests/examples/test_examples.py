"""The examples must run as they are printed, and the demo's judgement must be able to fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

torch = pytest.importorskip("torch")

import compare  # noqa: E402  they lie in examples/
import gpt  # noqa: E402
import launch  # noqa: E402
import text  # noqa: E402

import holdfast  # noqa: E402

SMALL = gpt.Shape(dim=32, hidden=48, num_layers=1, num_heads=4, num_kv_heads=2, context=16)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_share_the_same_global_batches(num_ranks: int) -> None:
    options = {"batch": 8, "context": 16, "seed": 3, "limit_bytes": 10_000}
    alone = text.Loader(**options)
    shared = [text.Loader(**options, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    for _ in range(3):
        inputs, targets = next(alone)
        parts = [next(loader) for loader in shared]
        assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
        assert torch.equal(torch.cat([part[1] for part in parts]), targets)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_the_loader_goes_on_from_its_state() -> None:
    first, second = (text.Loader(batch=4, context=16, seed=0, limit_bytes=10_000) for _ in range(2))
    next(first), next(first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert all(torch.equal(a, b) for a, b in zip(next(first), next(second)))


def test_a_chunk_of_the_fused_qkv_is_whole_groups() -> None:
    """Attention over each half of the rows, side by side, is attention over all of them."""
    whole = gpt.Attention(SMALL)
    whole.proj = torch.nn.Identity()
    x, angles = torch.randn(2, 16, SMALL.dim), gpt.rotary_angles(16, whole.head_dim)
    halves = []
    for rows in whole.qkv.weight.detach().chunk(2):
        half = gpt.Attention(SMALL)
        half.proj = torch.nn.Identity()
        half.qkv.weight = torch.nn.Parameter(rows)
        halves.append(half(x, angles))
    torch.testing.assert_close(torch.cat(halves, dim=-1), whole(x, angles))


def test_the_plan_names_only_modules_that_exist() -> None:
    modules = dict(gpt.build(shape=SMALL).named_modules())
    assert all(pattern.replace("*", "0") in modules for pattern in gpt.tensor_parallel_plan())


def test_no_position_sees_the_future() -> None:
    model = gpt.build(shape=SMALL)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    assert torch.equal(model(tokens)[0, :10], model(changed)[0, :10])


def test_a_verdict_finds_what_differs_and_what_is_missing() -> None:
    verdict = compare.Verdict("good", "bad")
    verdict.expect_equal("x", {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 0, "d": 4})
    assert verdict.problems == [
        "x: b differs",
        "x: c is on one side only",
        "x: d is on one side only",
    ]


def test_half_saved_is_a_step_with_an_attempt_and_no_manifest(tmp_path: Path) -> None:
    assert launch.half_saved(tmp_path) is None
    attempt = tmp_path / "steps/0000000020/0001-000002"
    attempt.mkdir(parents=True)
    (attempt / "r00001.safetensors").touch()
    (attempt / ".tmp-r00000").touch()
    assert launch.half_saved(tmp_path) == (20, [1])
    (tmp_path / "steps/0000000020/manifest.json").touch()
    assert launch.half_saved(tmp_path) is None


def train(tmp_path: Path, name: str, steps: int, *more: str) -> list[tuple[int, float]]:
    """Run train.py in one process on root `name`; the (step, loss) pairs of this run alone."""
    log = tmp_path / f"{name}-{steps}.jsonl"
    options = ["--horizon=6", "--every=2", "--batch=2", "--dropout=0.1", f"--steps={steps}", *more]
    command = [
        sys.executable,
        str(EXAMPLES / "train.py"),
        f"--root={tmp_path / name}",
        f"--log-file={log}",
        *options,
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return [
        (r["step"], r["loss"])
        for r in map(json.loads, log.read_text().splitlines())
        if r["event"] == "step"
    ]


@pytest.mark.soak
@pytest.mark.distributed
def test_a_run_in_two_parts_is_the_run_in_one(tmp_path: Path) -> None:
    """With dropout, so that the random number generators count as well.  The last part goes on from a
    record: step 5 is not saved."""
    parts = train(tmp_path, "parts", 2) + train(tmp_path, "parts", 5, "--every=9", "--records")
    parts += train(tmp_path, "parts", 6, "--records")
    assert holdfast.steps(str(tmp_path / "parts")) == [2, 6]
    assert parts == train(tmp_path, "whole", 6)


def test_what_a_kill_has_cost(tmp_path: Path) -> None:
    """Steps that were logged before the restart and lie after the one that was restored."""
    phase = launch.Phase("x", tmp_path, dp=1, tp=1, until=9, records=True)
    run = launch.Run(phase, tmp_path, horizon=9, every=9)
    assert "--records" in run.command
    run.records = [{"event": "start", "restored_from": 0}]
    run.records += [{"event": "step", "step": n, "loss": 0.0} for n in range(1, 6)]
    assert run.lost() is None
    for restored, lost in ((5, 0), (4, 1), (2, 3)):
        again = {"event": "start", "restored_from": restored}
        run.records = [*run.records[:6], again]
        assert run.lost() == lost


def test_chance_strikes_once_and_not_before_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = []
    monkeypatch.setattr(launch.os, "kill", lambda pid, _: struck.append(pid))
    monkeypatch.setattr(launch.random, "random", lambda: 0.0)
    run = launch.Run(launch.Phase("x", tmp_path, 1, 1, 9), tmp_path, horizon=9, every=9)
    run.records = [{"event": "start", "pids": [7, 8]}]
    chance = launch.Chance(after=3)
    for step in range(1, 7):
        assert chance.look(run) == (step == 4)
        run.records.append({"event": "step", "step": step, "loss": 0.0})
    assert struck in ([7], [8]) and chance.step == 3


def run_with_a_kill(tmp_path: Path, second: list[int]) -> tuple[launch.Run, launch.Chance]:
    """A run whose rank 1 was killed at second 102, after step 5, and that went on in these processes."""
    phase = launch.Phase("x", tmp_path, dp=2, tp=2, until=9, records=True, in_place=True)
    run = launch.Run(phase, tmp_path, horizon=9, every=9)
    assert "--spares=1" in run.command and "holdfast" in run.command
    run.output.write_text("what the ranks printed")
    run.records = [{"event": "start", "restored_from": 0, "pids": [1, 2, 3, 4], "time": 90.0}]
    run.records += [
        {"event": "step", "step": n, "loss": 0.0, "time": 95.0 + n} for n in range(1, 6)
    ]
    run.records += [{"event": "start", "restored_from": 5, "pids": second, "time": 103.0}]
    run.records += [
        {"event": "step", "step": n, "loss": 0.0, "time": 97.25 + n} for n in range(6, 10)
    ]
    return run, launch.Chance(after=3, step=5, rank=1, killed=102.0)


def test_the_demo_tells_what_a_kill_has_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    import demo

    run, chance = run_with_a_kill(tmp_path, [1, 9, 3, 4])
    assert demo.check_in_place(run, chance) == 1.25
    demo.compare_launchers(1.25, 7.0)
    told = capsys.readouterr().out
    assert "next step done on all ranks 1.2 s after the kill" in told
    assert "3 processes went on, a spare took the place of rank 1" in told
    assert "1.2 s  in place, under holdfast run" in told and "7.0 s  all processes" in told
    for others in ([1, 9, 8, 4], [5, 6, 7, 8]):
        with pytest.raises(launch.Failed, match="the processes were"):
            demo.check_in_place(*run_with_a_kill(tmp_path, others))
