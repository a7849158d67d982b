"""Parameters of an optimizer that nothing else in the state has: by torch's names, else by position."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import HoldfastWarning, StateMismatch

SHAPES = {"encoder": (4, 4), "decoder": (4, 4), "bias": (4,)}


def params_of(seed: int, names: list[str]) -> dict[str, nn.Parameter]:
    torch.manual_seed(seed)
    return {name: nn.Parameter(torch.randn(SHAPES[name])) for name in names}


def stepped(params: dict[str, nn.Parameter], optim: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for p in params.values():
        p.grad = torch.randn_like(p)
    optim.step()
    return optim


def named(seed: int, *names: str, prefix: str = "") -> Any:
    """Parameters in an order, and an optimizer that knows their names."""
    params = params_of(seed, list(names))
    pairs = [(prefix + name, p) for name, p in params.items()]
    return params, torch.optim.Adam(pairs)


def unnamed(seed: int, *names: str) -> Any:
    params = params_of(seed, list(names))
    return params, torch.optim.Adam(list(params.values()))


def has(mine: Any, theirs: Any, names: list[str]) -> bool:
    """True if parameters and moments of these names are equal."""
    (a, of_a), (b, of_b) = mine, theirs
    return all(
        torch.equal(a[n], b[n])
        and all(torch.equal(of_a.state[a[n]][k], v) for k, v in of_b.state[b[n]].items())
        for n in names
    )


@pytest.fixture(autouse=True)
def no_word() -> Any:
    """Nothing is told that a test does not expect."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", HoldfastWarning)
        yield


@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_names_that_torch_keeps_are_taken(prefix: str, tmp_path: Path) -> None:
    """In any order, and in other groups; with what wrappers put before them."""
    run = named(0, "encoder", "decoder", "bias")
    stepped(*run)
    holdfast.save(tmp_path, {"optim": run[1]}, step=1)
    with holdfast.open(tmp_path) as saved:
        assert {"optim.encoder.value", "optim.decoder.exp_avg"} <= set(saved.names())
    again = named(1, "decoder", "bias", "encoder", prefix=prefix)
    holdfast.load(tmp_path, {"optim": again[1]})
    assert has(again, run, [*SHAPES])
    params = params_of(2, ["bias", "decoder", "encoder"])
    groups = [{"params": [(n, p)]} for n, p in params.items()]
    two = params, torch.optim.Adam(groups)
    holdfast.load(tmp_path, {"optim": two[1]})
    assert has(two, run, [*SHAPES])


def test_names_of_the_group_are_those_of_the_model(tmp_path: Path) -> None:
    """Saved without the model, loaded with it: moments find their places; the weights have none."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    params = dict(model.named_parameters())
    optim = stepped(params, torch.optim.Adam(model.named_parameters()))
    holdfast.save(tmp_path / "alone", {"optim": optim}, step=1)
    other = nn.ModuleDict({"b": nn.Linear(3, 3), "a": nn.Linear(3, 3)})
    its = torch.optim.Adam(other.parameters())
    with pytest.warns(HoldfastWarning, match="have not all in common"):
        holdfast.load(tmp_path / "alone", {"model": other, "optim": its}, strict=False)
    mine = optim.state[params["a.weight"]]["exp_avg"]
    assert torch.equal(its.state[other["a"].weight]["exp_avg"], mine)


def test_an_order_that_nothing_proves(tmp_path: Path) -> None:
    """Told at the first save; refused at a load, with nothing touched; taken where it is not strict."""
    run = unnamed(0, "encoder", "decoder", "bias")
    stepped(*run)
    shapes, ways = r"group0\.0 and group0\.1 have shape \(4, 4\)", r"AdamW\(.*values.*strict=False"
    told = rf"{shapes}.*a restart will be refused.*{ways}.*\[pos"
    with pytest.warns(HoldfastWarning, match=told):
        holdfast.save(tmp_path, {"optim": run[1]}, step=1)
    again = unnamed(1, "decoder", "encoder", "bias")
    before = {name: p.detach().clone() for name, p in again[0].items()}
    with pytest.raises(
        StateMismatch, match=r"group0\.0 and group0\.1 have shape.*cannot be proved"
    ):
        holdfast.load(tmp_path, {"optim": again[1]})
    with (
        holdfast.Checkpointer(tmp_path, {"optim": again[1]}) as ckpt,
        pytest.raises(StateMismatch, match=r"from named parameters: AdamW\(\[") as refused,
    ):
        ckpt.restore()
    assert "strict=False" in str(refused.value) and "same model" not in str(refused.value)
    assert all(torch.equal(before[n], p) for n, p in again[0].items()) and not again[1].state
    same = unnamed(1, "encoder", "decoder", "bias")
    with pytest.warns(HoldfastWarning, match=r"taken in their order \[positions\]"):
        holdfast.load(tmp_path, {"optim": same[1]}, strict=False)
    assert has(same, run, [*SHAPES])


def test_shapes_that_all_differ_prove_the_order(tmp_path: Path) -> None:
    run = unnamed(0, "encoder", "bias")
    stepped(*run)
    holdfast.save(tmp_path, {"optim": run[1]}, step=1)
    again = unnamed(1, "encoder", "bias")
    holdfast.load(tmp_path, {"optim": again[1]})
    assert has(again, run, ["encoder", "bias"])
    with pytest.raises(StateMismatch, match=r"optim\.group0\.0\.value: saved with shape \(4, 4\)"):
        holdfast.load(tmp_path, {"optim": unnamed(1, "bias", "encoder")[1]})


def test_parameters_that_are_plain_values_have_their_names(tmp_path: Path) -> None:
    """Also those in a list."""

    def state(seed: int, *names: str) -> Any:
        params = params_of(seed, list(names))
        kept = {"net": {n: [params[n]] for n in ("encoder", "decoder")}, "bias": params["bias"]}
        return params, torch.optim.Adam(list(params.values())), kept

    params, optim, kept = state(0, "encoder", "decoder", "bias")
    stepped(params, optim)
    holdfast.save(tmp_path, {**kept, "optim": optim}, step=1)
    with holdfast.open(tmp_path) as saved:
        assert {"optim.net.encoder[0].exp_avg", "optim.bias.step"} <= set(saved.names())
    others, its, theirs = state(1, "bias", "decoder", "encoder")
    holdfast.load(tmp_path, {**theirs, "optim": its})
    assert has((others, its), (params, optim), [*SHAPES])


def test_a_step_without_names_is_taken_in_order_by_a_script_that_has_some(tmp_path: Path) -> None:
    """It is told; the next step has the names."""
    run = unnamed(0, "encoder", "decoder", "bias")
    stepped(*run)
    with pytest.warns(HoldfastWarning, match=r"\[positions\]"):
        holdfast.save(tmp_path, {"optim": run[1]}, step=1)
    again = named(1, "encoder", "decoder", "bias")
    with pytest.warns(HoldfastWarning, match=r"saved by their positions.*'encoder'.*\[positions\]"):
        holdfast.load(tmp_path, {"optim": again[1]})
    assert has(again, run, [*SHAPES])
    holdfast.save(tmp_path, {"optim": again[1]}, step=2)
    other = named(2, "bias", "decoder", "encoder")
    holdfast.load(tmp_path, {"optim": other[1]})
    assert has(other, run, [*SHAPES])


def test_a_step_with_names_is_taken_by_a_script_without_if_shapes_prove_it(tmp_path: Path) -> None:
    run = named(0, "encoder", "bias")
    stepped(*run)
    holdfast.save(tmp_path / "two", {"optim": run[1]}, step=1)
    again = unnamed(1, "encoder", "bias")
    holdfast.load(tmp_path / "two", {"optim": again[1]})
    assert has(again, run, ["encoder", "bias"])
    run = named(0, *SHAPES)
    stepped(*run)
    holdfast.save(tmp_path / "three", {"optim": run[1]}, step=1)
    with pytest.raises(StateMismatch, match="cannot be proved"):
        holdfast.load(tmp_path / "three", {"optim": unnamed(1, *SHAPES)[1]})


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["group0.1", "group0.0", "bias"], "group0.0 and group0.1"),
        (["x", "y", "bias"], ""),
        (["x.exp_avg", "x", "bias"], ""),
        (["x.value", "x", "bias"], ""),
        (["value", "x", "step"], ""),
    ],
)
def test_names_that_look_like_others(names: list[str], told: str, tmp_path: Path) -> None:
    """Like positions: they are none then.  Like names of states: they are names."""

    def build(seed: int, turned: bool) -> Any:
        params = params_of(seed, [*SHAPES])
        pairs = list(zip(names, params.values()))
        return params, torch.optim.Adam(pairs[::-1] if turned else pairs)

    run = build(0, False)
    stepped(*run)
    if told:
        with pytest.warns(HoldfastWarning, match=told):
            holdfast.save(tmp_path, {"optim": run[1]}, step=1)
        with pytest.raises(StateMismatch, match=told):
            holdfast.load(tmp_path, {"optim": build(1, False)[1]})
        return
    holdfast.save(tmp_path, {"optim": run[1]}, step=1)
    again = build(1, True)
    holdfast.load(tmp_path, {"optim": again[1]})
    assert has(again, run, [*SHAPES])


def test_a_name_in_two_groups_or_of_the_model_says_nothing(tmp_path: Path) -> None:
    """Those parameters go by position; the others keep their names."""
    params = params_of(0, [*SHAPES])
    model = nn.ModuleDict({"bias": nn.Identity()})
    model.bias.register_parameter("weight", params["bias"])
    groups: list[Any] = [
        {"params": [("w", params["encoder"])]},
        {"params": [("w", params["decoder"])], "lr": 0.1},
    ]
    optim = torch.optim.Adam([*groups, {"params": [("bias.weight", params["bias"])]}])
    stepped(params, optim)
    with pytest.warns(HoldfastWarning, match=r"group0\.0 and group1\.0 have shape \(4, 4\)"):
        holdfast.save(tmp_path, {"model": model, "optim": optim}, step=1)
    with holdfast.open(tmp_path) as saved:
        names = set(saved.names())
    assert {"model.bias.weight", "optim.bias.weight.exp_avg", "optim.group1.0.exp_avg"} <= names
    assert "optim.bias.weight.value" not in names


def test_the_notice_is_told_once_and_silenced(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("holdfast.errors._silenced", set())
    run = unnamed(0, *SHAPES)
    stepped(*run)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with holdfast.Checkpointer(tmp_path, {"optim": run[1]}) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(step).wait()
    assert len([w for w in told if "[positions]" in str(w.message)]) == 1
    holdfast.silence("positions")
    holdfast.save(tmp_path / "again", {"optim": run[1]}, step=1)


def test_a_part_of_the_state_is_not_asked_for_its_order(tmp_path: Path) -> None:
    run = unnamed(0, *SHAPES)
    stepped(*run)
    with pytest.warns(HoldfastWarning, match=r"\[positions\]"):
        holdfast.save(tmp_path, {"optim": run[1], "x": torch.ones(2)}, step=1)
    state = {"optim": unnamed(1, *SHAPES)[1], "x": torch.zeros(2)}
    holdfast.load(tmp_path, state, only="x")
    assert state["x"].tolist() == [1, 1] and not state["optim"].state


class Agent:
    """An object of the script's own, with a state_dict() that has parameters in dicts and lists."""

    def __init__(self, seed: int, *, is_turned: bool = False) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.alphas = [nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(1))]
        self.asked = 0
        params = [*self.net.parameters(), *self.alphas]
        self.optim = torch.optim.Adam(params[::-1] if is_turned else params)

    def state_dict(self) -> Any:
        self.asked += 1
        return {"net": self.net.state_dict(), "more": {"alphas": self.alphas}}

    def load_state_dict(self, saved: Any) -> None:
        self.net.load_state_dict(saved["net"])
        with torch.no_grad():
            for mine, value in zip(self.alphas, saved["more"]["alphas"]):
                mine.copy_(value)

    def stepped(self) -> Agent:
        for p in self.net.parameters():
            p.grad = torch.randn_like(p)
        for p in self.alphas:
            p.grad = torch.randn_like(p)
        self.optim.step()
        return self

    def params(self) -> dict[str, torch.Tensor]:
        return {**dict(self.net.named_parameters()), "0": self.alphas[0], "1": self.alphas[1]}

    def has(self, other: Agent) -> bool:
        mine, theirs = self.params(), other.params()
        pair = (mine, self.optim), (theirs, other.optim)
        return has(*pair, [*mine])


@pytest.mark.parametrize("where", ["a value", "in a list"])
def test_parameters_that_an_object_has_go_by_where_it_has_them(where: str, tmp_path: Path) -> None:
    """A restart of an unchanged script, and one that makes the optimizer in another order."""

    def state(agent: Agent) -> Any:
        return {"z": agent if where == "a value" else [agent], "optim": agent.optim}

    run = Agent(0).stepped()
    with holdfast.Checkpointer(tmp_path, state(run)) as ckpt:
        ckpt.save(1).wait(60)
        before = run.asked
        ckpt.save(2).wait(60)
        assert run.asked == before + 1  # what is saved of it itself
    at = "z" if where == "a value" else "z[0]"
    with holdfast.open(tmp_path) as saved:
        names = {f"optim.{at}.net.0.weight.exp_avg", f"optim.{at}.more.alphas[1].exp_avg"}
        assert names <= {*saved.names()}
    for is_turned in (False, True):
        again = Agent(1, is_turned=is_turned)
        with holdfast.Checkpointer(tmp_path, state(again)) as ckpt:
            assert ckpt.restore() == 2
        assert again.has(run)
    other = Agent(2)
    holdfast.load(tmp_path, state(other))
    assert other.has(run)


def test_a_step_of_an_older_release_is_taken_in_its_order(tmp_path: Path, monkeypatch: Any) -> None:
    """It has no note of masters, and no names of objects; nothing could have been done at its save."""
    run, agent = unnamed(0, *SHAPES), Agent(0).stepped()
    stepped(*run)
    with monkeypatch.context() as older:
        older.setattr("holdfast.live.state.nameless_parameters.note_positions", lambda *_: None)
        older.setattr("holdfast.live.state.nameless_parameters.names_in_objects", lambda *_: {})
        holdfast.save(tmp_path / "a", {"optim": run[1]}, step=1)
        holdfast.save(tmp_path / "b", {"agent": agent, "optim": agent.optim}, step=1)
    with holdfast.open(tmp_path / "b") as saved:
        assert "optim.group0.0.exp_avg" in saved.names()
    again, its = unnamed(1, *SHAPES), Agent(1)
    with (
        holdfast.Checkpointer(tmp_path / "a", {"optim": again[1]}) as ckpt,
        pytest.warns(HoldfastWarning, match=r"taken in their order \[positions\]"),
    ):
        assert ckpt.restore() == 1
    assert has(again, run, [*SHAPES])
    with pytest.warns(HoldfastWarning, match=r"'agent\.net\.0\.weight' is the first of 6"):
        holdfast.load(tmp_path / "b", {"agent": its, "optim": its.optim})
    assert its.has(agent)


def test_a_step_without_names_is_taken_by_values_of_the_state(tmp_path: Path) -> None:
    """What is told at the first save is a way out also for the steps that are there."""
    run = unnamed(0, *SHAPES)
    stepped(*run)
    with pytest.warns(HoldfastWarning, match=r"\[positions\]"):
        holdfast.save(tmp_path, {"optim": run[1]}, step=1)
    again = unnamed(1, *SHAPES)
    with pytest.warns(HoldfastWarning, match=r"saved by their positions.*'encoder'.*\[positions\]"):
        holdfast.load(tmp_path, {**again[0], "optim": again[1]})
    assert has(again, run, [*SHAPES])
