"""Loading on three ranks, and on one what three ranks saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.errors import RuleError, UsageError
from live.state.test_customised_modules import Book, Packed
from live.state.test_optimizers import Counted

from .cases import Case, check, run_module
from .loading_cases import CASES, Net, Sampler, loader

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loading")


@pytest.fixture(scope="module")
def failed(out: Path) -> dict[str, list[str]]:
    return run_module("loading_cases", 3, out)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_loading(failed: dict[str, list[str]], case: Case) -> None:
    check(failed, case.__name__)


@pytest.mark.soak
def test_loading_by_ranks_that_hash_strings_otherwise(tmp_path: Path) -> None:
    failed = run_module("loading_cases", 3, tmp_path, forked=False)
    for case in CASES:
        check(failed, case.__name__)


def test_sharded_state_on_one_rank(out: Path, failed: dict[str, list[str]]) -> None:
    """Saved under FSDP2 on three ranks, loaded here without torch.distributed."""
    check(failed, "state_goes_on_under_fsdp")
    root = out / "state_goes_on_under_fsdp"
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=9.0)
    assert holdfast.load(root, {"model": net, "optim": optimizer}) == 2
    expected = torch.load(root / "params-0.pt")
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), expected))
    checkpoint = holdfast.open(str(root))
    for name, p in net.named_parameters():
        state = optimizer.state[p]
        assert state["step"].item() == 2.0
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], torch.from_numpy(checkpoint.read(f"optim.{name}.{key}")))
            assert state[key].any()
    assert optimizer.param_groups[0]["lr"] == 0.01
    net(torch.arange(9)).backward()
    optimizer.step()


def test_state_that_belongs_to_no_parameter_on_one_rank(
    out: Path, failed: dict[str, list[str]]
) -> None:
    check(failed, "state_that_belongs_to_no_parameter")
    root = out / "state_that_belongs_to_no_parameter"
    net = Net()
    optimizer = Counted(net.parameters())
    state, own = {"model": net, "optim": optimizer}, optimizer.state
    holdfast.load(root / "False", state)
    assert own["k"].tolist() == [2] and own["large"].tolist() == [2.0] * 20_000
    with pytest.raises(RuleError, match=r"'optim\.common': saved by each rank"):
        holdfast.load(root / "True", state)
    rule = {"optim.common": "rank0"}
    assert resized(root / "True", state, on_resize=rule) == rule
    assert own["rank"] == {"is": 0}
    assert resized(root / "True", state, on_resize={"optim.common": "fresh"})
    assert not [key for key in own if isinstance(key, str)]


def test_what_modules_have_of_their_own_on_one_rank(
    out: Path, failed: dict[str, list[str]]
) -> None:
    check(failed, "modules_keep_their_own_state")
    root = out / "modules_keep_their_own_state"
    net = torch.nn.Sequential(torch.nn.Linear(6, 6), Packed(9.0), Book())
    name = "model.1._own_extra_state"
    with pytest.raises(RuleError, match=f"'{name}': saved by each rank"):
        holdfast.load(root, {"model": net})
    assert resized(root, {"model": net}, on_resize={"model": "rank0"}) == {name: "rank0"}
    assert net[1].scale == 1.0 and (net[2].codebook == 3.0).all()
    net[1].scale = 9.0
    assert resized(root, {"model": net}, on_resize={name: "fresh"}) == {name: "fresh"}
    assert net[1].scale == 9.0


# -- another number of ranks ----------------------------------------------------------------------


@pytest.fixture
def root(out: Path, failed: dict[str, list[str]]) -> Path:
    assert failed["per_rank_state"] == []
    return out / "per_rank_state"


def resized(root: Path, state: dict[str, Any], **options: Any) -> dict[str, str]:
    """Load on one rank; the rule that each key's event names."""
    seen: list[events.Event] = []
    with events.listen(seen.append):
        holdfast.load(root, state, **options)
    return {e.fields["key"]: e.fields["rule"] for e in seen if e.name == "extras.resized"}


def test_a_loader_is_refused_on_another_number_of_ranks(root: Path) -> None:
    with pytest.raises(RuleError, match="'loader'") as caught:
        holdfast.load(root, {"loader": loader(0)})
    for rule in ("same", "rank0", "redistribute", "fresh"):
        assert rule in str(caught.value)


def test_a_loader_may_go_on_where_rank_0_was(root: Path) -> None:
    mine = loader(99)
    assert resized(root, {"loader": mine}, on_resize={"loader": "rank0"}) == {"loader": "rank0"}
    assert str([b.tolist() for b in mine]) == (root / "rest-0.txt").read_text()


def test_a_loader_may_begin_afresh(root: Path) -> None:
    mine = loader(99)
    assert resized(root, {"loader": mine}, on_resize={"loader": "fresh"}) == {"loader": "fresh"}
    assert [b.tolist() for b in mine] == [b.tolist() for b in loader(99)]


def test_an_object_may_deal_its_state_out_itself(root: Path) -> None:
    sampler = Sampler()
    assert resized(root, {"sampler": sampler}) == {"sampler": "redistribute"}
    assert sampler.places == [0, 1, 10, 11, 20, 21]


def test_what_another_number_of_ranks_would_get(root: Path) -> None:
    """By `find`: what the rules give, and the names of what only live objects could say."""
    with holdfast.Checkpointer(root) as ckpt:
        found = ckpt.find()
    assert found is not None and found.extras == {}  # generators are fresh
    assert "no rule for that: on_resize={'loader': ...}" in found.undecided["loader"]
    assert "redistribute() of the live object" in found.undecided["sampler"]
    rules = {"loader": "fresh", "sampler": "rank0"}
    with holdfast.Checkpointer(root, on_resize=rules) as ckpt:
        found = ckpt.find()
        assert found is not None and not found.undecided
        assert found.extras == {"sampler": {"places": [0, 1]}}
        ckpt.state["sampler"], ckpt.state["loader"] = Sampler(), loader(99)
        assert ckpt.restore(found) == 4 and ckpt.state["sampler"].places == [0, 1]
        with pytest.raises(UsageError, match="generators are fresh: step 4"):
            ckpt.restore_rng()


def test_redistribute_needs_the_method(root: Path) -> None:
    with pytest.raises(RuleError, match="no method redistribute"):
        holdfast.load(root, {"loader": loader(0)}, on_resize={"loader": "redistribute"})


def test_random_numbers_stay_as_seeded(root: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    rule = resized(root, {"rng": holdfast.Rng()})
    assert rule == {"rng": "fresh"}
    assert torch.equal(torch.rand(3), expected)
