"""Rules over meshes against arrays: what ranks store, what is refused, what is a sharding."""

from __future__ import annotations

import re
import time
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.rules.chains import Chain, chains
from holdfast.errors import RuleError
from holdfast.layout import Box, Mesh, whole
from holdfast.rules import RuleSet

MODERATE = settings(max_examples=250, deadline=None)


def rules_of(chain: Chain, replica: str = "replicated") -> RuleSet:
    axes = ", ".join(a for a, _ in chain.mesh.axes)
    return RuleSet.parse(f"axes {axes}\n** {', '.join([replica, *chain.text])}")


@MODERATE
@given(chains())
def test_ranks_store_what_the_rule_says_and_together_everything(chain) -> None:
    layout = rules_of(chain).layout("w", chain.shape, chain.mesh)
    layout.check()
    result = np.full(chain.shape, -1)
    for rank, array in enumerate(chain.stored):
        view = layout.view(rank)
        assert view.stored == array.shape
        flat, origin = np.ascontiguousarray(array).reshape(-1), (0,) * len(chain.shape)
        for f in layout.fragments(rank):
            strides = [s * flat.itemsize for s in f.strides]
            source = np.lib.stride_tricks.as_strided(flat[f.offset :], f.box.shape, strides)
            result[f.box.within(origin)] = source
    assert np.array_equal(result, np.arange(prod(chain.shape)).reshape(chain.shape))


@MODERATE
@given(chains(distinct=False), st.sampled_from(["unique", "replicated"]))
def test_holes_and_overlaps_are_refused_and_named(chain, replica) -> None:
    counts = chain.counts(replicas=replica == "replicated")
    layout = rules_of(chain, replica).layout("w", chain.shape, chain.mesh)
    if np.all(counts == 1):
        layout.check()
        return
    with pytest.raises(RuleError) as error:
        layout.check()
    message = str(error.value)
    region = re.search(r"\[([\d:,]*)\]", message)
    if region is None:
        assert "it is unique, but all" in message
        return
    ends = [tuple(map(int, e.split(":"))) for e in region[1].split(",") if e]
    found = counts[tuple(slice(a, b) for a, b in ends)]
    assert found.size
    assert np.all(found == 0) if "no rank holds" in message else np.all(found > 1)


@MODERATE
@given(chains(distinct=False))
def test_a_sharding_says_the_same(chain) -> None:
    layout = rules_of(chain).layout("w", chain.shape, chain.mesh)
    sharding = layout.sharding()
    if sharding is None:
        return
    for rank, array in enumerate(chain.stored):
        box = sharding.box(chain.shape, chain.mesh, rank)
        held = np.zeros(prod(chain.shape), bool)
        if array is not None:
            held[array[array >= 0]] = True
        expected = np.zeros(chain.shape, bool)
        if box is not None:
            expected[box.within((0,) * len(chain.shape))] = True
        assert np.array_equal(held.reshape(chain.shape), expected)


def test_regular_rules_are_shardings() -> None:
    mesh = Mesh((("dp", 2), ("tp", 4), ("pp", 2)))
    rules = RuleSet.parse(
        "axes dp, tp, pp\n"
        "a replicated, shard 0 over tp, shard 0 over dp\n"
        "b replicated, transposed, shard 0 over tp\n"
        "c replicated, on pp 1, shard 1 over dp*tp even\n"
        "d replicated, fused 0 (8, 8), shard 0 over ep\n"
        "e replicated, fused 0 (8, 8), shard 0 over tp\n"
        "axes ep\n"
    )
    texts = {n: str(rules.layout(n, (16, 16), mesh).sharding()) for n in "abcde"}
    assert texts == {
        "a": "dim 0 over tp, dim 0 over dp",
        "b": "dim 1 over tp",
        "c": "dim 1 over dp*tp, on pp 1",
        "d": "replicated",
        "e": "None",
    }


def test_scales_go_by_the_state() -> None:
    rules = RuleSet.parse("axes tp\n** replicated, scaled tp")
    mesh = Mesh((("tp", 4),))

    def scale(state: str) -> float:
        return rules.layout("b", (4,), mesh, state=state).fragments(0)[0].scale

    assert [scale(s) for s in ("param", "exp_avg", "exp_avg_sq")] == [4, 1 / 4, 1 / 16]
    with pytest.raises(RuleError, match="what a scale means for state 'momentum' is not known"):
        scale("momentum")


def test_experts_inside_and_outside() -> None:
    rules = RuleSet.parse(
        "axes ep, tp\n"
        "**.experts.{e}.w  unique, experts {e} of 8 over ep, shard 0 over tp\n"
        "**.experts.w      unique, experts 0 over ep, shard 1 over tp\n"
    )
    mesh = Mesh((("ep", 4), ("tp", 2)))
    rules.check({"l.experts.w": (8, 4, 2), **{f"l.experts.{e}.w": (4, 2) for e in range(8)}}, mesh)
    layout = rules.layout("l.experts.5.w", (4, 2), mesh)
    assert [r for r in range(8) if layout.view(r).is_here] == [4, 5]
    assert str(layout.sharding()) == "dim 0 over tp, on ep 2"
    inside = rules.layout("l.experts.w", (8, 4, 2), mesh)
    assert [f.box for f in inside.fragments(5)] == [Box((4, 2, 0), (6, 4, 2))]
    with pytest.raises(RuleError, match="expert 8 of 8"):
        rules.layout("l.experts.8.w", (4, 2), mesh).view(0)


def test_vocabulary_is_padded_for_the_mesh() -> None:
    rules = RuleSet.parse("axes tp\n** unique, padded 0 multiple 128*tp, shard 0 over tp even")
    for tp, stored in ((1, 50304), (2, 25216), (4, 12672)):
        layout = rules.layout("emb", (50257, 4), Mesh((("tp", tp),)))
        layout.check()
        assert layout.view(0).stored == (stored, 4)
        assert sum(f.box.size for r in range(tp) for f in layout.fragments(r)) == 50257 * 4


def test_thousands_of_tensors_cost_what_their_kinds_cost() -> None:
    rules = RuleSet.parse(
        "axes tp, dp\nlet heads = 64\n"
        "**.qkv  replicated, interleaved 0 heads of (16, 8, 8), shard 0 over tp, flat over dp\n"
        "**      replicated, shard 1 over tp, flat over dp\n"
    )
    mesh = Mesh((("dp", 64), ("tp", 8)))
    shapes = {f"h.{i}.{kind}": (2048, 512) for i in range(2500) for kind in ("qkv", "o")}
    began = time.process_time()
    rules.check(shapes, mesh)
    for name, shape in shapes.items():
        assert rules.layout(name, shape, mesh).fragments(37)
    assert time.process_time() - began < 20  # a fraction of it, here


def test_layouts_of_no_elements_and_no_dims() -> None:
    rules = RuleSet.parse("axes tp\n* replicated, shard 0 over tp\n*.s replicated, flat over tp")
    mesh = Mesh((("tp", 3),))
    rules.layout("w", (0, 4), mesh).check()
    layout = rules.layout("w.s", (), mesh)
    layout.check()
    assert [len(layout.fragments(r)) for r in range(3)] == [1, 0, 0]
    assert layout.fragments(0)[0].box == whole(())
